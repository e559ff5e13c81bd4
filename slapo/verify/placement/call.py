"""One operation as rules see it, and the registry of rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from slapo.verify.placement.place import (
    MASKED,
    MASKED_ELSEWHERE,
    OWN,
    PARTIAL_SUM,
    WHOLE,
    Fault,
    Place,
    PlacementViolation,
    own_draws,
    sliced,
)


@dataclass
class OperationCall:
    """One call of an operation, for rules of all kinds."""

    #: the operation
    func: Any
    #: its name without the overload, with the namespace if that is not ``aten``, as in
    #: ``"mylib::gelu"``. In-place operations have the name of the out-of-place ones
    name: str
    #: arguments of the call
    args: Sequence[Any]
    kwargs: dict[str, Any]
    #: tensors among the arguments and results, in order
    tensors: list[Tensor]
    outs: list[Tensor]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the operation's schema."""
        return argument(self.func, self.args, self.kwargs, name, default)

    def dims(self) -> set[int]:
        """The dimensions that the arguments name; all of them without one."""
        # To unfold adds a dimension, and its derivative counts without it.
        ndim = self.tensors[0].ndim - (self.name == "unfold_backward")
        if self.name == "constant_pad_nd":  # two amounts per dimension, the last one first
            return {ndim - 1 - i // 2 for i, amount in enumerate(self.get("pad")) if amount}
        given = self.get("dim", self.get("dims", self.get("dimension")))
        if given is None or given == []:
            return set(range(ndim))
        return {dim % max(1, ndim) for dim in ([given] if isinstance(given, int) else given)}


@dataclass
class Call(OperationCall):
    """One call of an operation that has run on this rank."""

    #: placements of the argument tensors
    places: list[Place]
    #: this rank, and the number of ranks
    rank: int
    ranks: int
    #: for a view: the shape of its result if nothing is sharded
    shape_in_one_process: tuple[int, ...] | None = None
    #: true if it draws this rank's own random values, to be combined with slices
    draws_own: bool = False
    #: for a view in the backward pass: placement of the tensor whose gradient it returns
    of_gradient_of: Place | None = None

    def place(self, name: str) -> Place | None:
        """The placement of a tensor argument, or None."""
        value = self.get(name)
        pairs = zip(self.tensors, self.places, strict=True)
        return next((place for tensor, place in pairs if tensor is value), None)

    def moved(self) -> Place:
        """The placement of the first tensor; masked tokens are valid in a lookup only."""
        place = self.places[0]
        if place.kind == MASKED:
            raise self.misfit(MASKED_ELSEWHERE)
        if place.kind == OWN and place.uniform:  # then they are shared by several slices
            raise own_draws()
        return place

    def slicewise(self, mixed: Iterable[int], is_linear: bool = False) -> Place:
        """The results' placement, if only the dimensions `mixed` do not work slice by slice."""
        first, ndim = self.moved(), self.tensors[0].ndim
        # A sum of transformed summands is the transformed sum, over whatever dimensions it runs.
        if is_linear and not any(place.is_slice for place in self.places):
            return first
        if any(place.is_partial for place in self.places):
            raise self.misfit("it is not linear, and its input is a partial sum")
        pairs = zip(self.tensors, self.places, strict=True)
        if not first.is_slice or any(t.ndim != ndim or not p.same(first) for t, p in pairs):
            raise self.misfit("its inputs have different placements")
        if first.dim in {dim % ndim for dim in mixed}:
            raise self.misfit(f"it runs over dimension {first.dim}, which is sharded")
        return first

    def misfit(self, why: str, fault: Fault | None = None) -> PlacementViolation:
        """An error to raise; the message already lists the operation's inputs."""
        return PlacementViolation(why, fault)


def qualified_name(operation: Any) -> str:
    """The name of an operation or an overload, with its namespace."""
    return str(getattr(operation, "_qualified_op_name", None) or operation.name()).partition(".")[0]


def argument(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str, default: Any = None
) -> Any:
    """An argument of an operation, by its name in the operation's schema."""
    index, ordinary = _parameters(func).get(name, (len(args), default))
    return args[index] if index < len(args) else kwargs.get(name, ordinary)


@functools.cache
def _parameters(func: Any) -> dict[str, tuple[int, Any]]:
    """Argument -> its position and default value."""
    found = {}
    for index, argument in enumerate(func._schema.arguments):
        # Beyond the positional arguments of any call, so that it is looked up among the keywords.
        position = index if not argument.kwarg_only else 1_000
        found[argument.name] = (position, argument.default_value)
    return found


#: Placements of torch are accepted too.
Rule = Callable[[Call], Any]


def by_rule(rule: Rule, call: Call) -> list[Place]:
    """A placement for each result; a rule may return one for all."""
    found: Any = rule(call)
    several = found if isinstance(found, Sequence) else [found] * len(call.outs)
    return [as_place(each, out.ndim) for each, out in zip(several, call.outs, strict=False)]


def as_place(found: Any, ndim: int) -> Place:
    """Convert a placement of torch."""
    if isinstance(found, Place):
        return found
    if found.is_shard():
        return sliced(found.dim % ndim)
    return PARTIAL_SUM if found.is_partial() else WHOLE


#: Name of an operation -> its rule.
RULES: dict[str, Rule] = {}


def rule_for(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule of the library for operations of torch."""

    def enter(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return enter


def memory_of(tensor: Tensor) -> int:
    """Key of the memory that a tensor shares with its views."""
    # Not ``data_ptr()``, which is 0 for every fake tensor.
    return tensor.untyped_storage()._cdata


@functools.cache
def name_of(func: Any) -> str:
    """The name under which rules are registered."""
    name = func.overloadpacket.__name__
    # Python's operators, such as ``__and__``, are no in-place operations.
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return base if func.namespace == "aten" else f"{func.namespace}::{base}"


def independent_along(*dims: int) -> Rule:
    """Rule for operations that work slice by slice along some dimensions.

    All tensors with as many dimensions as the first result must be sharded alike along one of
    `dims`. Other tensors must be replicated, or constant.
    """

    def rule(call: Call) -> list[Place]:
        first = next(place for place in call.places if not place.is_whole)
        size = call.outs[0].ndim
        allowed = {dim % size for dim in dims}
        for tensor, place in zip(call.tensors, call.places, strict=True):
            if tensor.ndim == size and not (first.is_slice and place.same(first)):
                if place.is_whole and place.is_uniform(tensor, first.dim):
                    continue
                raise call.misfit("its inputs have different placements, or are partial sums")
        if first.dim not in allowed:
            raise call.misfit(f"it mixes what is along dimension {first.dim}")
        return [first if out.ndim == size else Place() for out in call.outs]

    return rule


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors among arguments or results, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation; compute only the output shape if torch lacks a fake kernel for it."""
    if name_of(func) == "_grouped_mm" and isinstance(args[0], FakeTensor):
        left, right = args[:2]  # torch's fake kernel takes bfloat16 only, its real one more
        groups = len(args[2]) if len(args) > 2 and args[2] is not None else 0
        middle = [groups] if left.ndim == right.ndim == 2 else []
        lead = [*left.shape[:1]] if left.ndim == right.ndim == 3 else middle
        return left.new_empty(*lead, left.shape[-2], right.shape[-1])
    return func(*args, **kwargs)
