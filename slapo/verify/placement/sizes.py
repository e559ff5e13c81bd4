"""The operations of the model in one process, to compare sizes with.

Half the size of a head where half the number of heads was meant fits every shape, and every slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

from slapo.history import contains
from slapo.sharding.steps import Step
from slapo.verify.placement.call import argument, name_of, run, tensors_in
from slapo.verify.placement.paths import Paths
from slapo.verify.placement.place import PARTIAL_SUM
from slapo.verify.placement.raw_collectives import RAW, raw_collective
from slapo.verify.placement.reduction_rules import ATTENTION
from slapo.verify.placement.view_rules import COPIES

#: In place of the size of a dimension along which a tensor is constant.
ANY = "any"

Shape = tuple[Any, ...]
#: Shape of a tensor over all ranks.
Whole = Callable[[Tensor], Shape]
#: What torch runs: the name, arguments that sizes may be in, and the shapes of the outputs.
Part = tuple[Any, ...]
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass
class Operation:
    """One call of a function of torch by a module, on the sizes of all ranks."""

    path: str
    name: str
    number: int
    parts: list[Part] = field(default_factory=list)
    #: true if its shapes, or what it reads, depend on values of tensors
    by_value: bool = False
    #: true if it takes a slice of size 1, for which models have shorter ways
    on_one: bool = False

    def is_like(self, other: Operation) -> bool:
        """Return whether it is the same call in the same module."""
        return (self.path, self.name) == (other.path, other.name)

    def difference(self, other: Operation) -> tuple[Part, Part] | None:
        """The first parts that differ; of other ones, which strides choose, the last results."""
        mine, theirs = self.parts, other.parts
        if not self.is_like(other):
            return mine[-1], theirs[-1]
        if [part[0] for part in mine] != [part[0] for part in theirs]:
            mine, theirs = ([(part[0], (), *part[2:3])] for part in (mine[-1], theirs[-1]))
        pairs = zip(mine, theirs, strict=True)
        return next((pair for pair in pairs if not _fit(*pair)), None)


def _fit(mine: Part, theirs: Part) -> bool:
    return len(mine) == len(theirs) and all(
        len(a) == len(b) and all(m in (n, ANY) or m != m for m, n in zip(a, b, strict=True))
        for a, b in zip(mine[1:], theirs[1:], strict=True)
    )


class Calls(TorchFunctionMode):
    """Follows which function of torch a model has called."""

    number, name = 0, ""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number, self.name = self.number + 1, getattr(func, "__name__", "")
        out = func(*args, **(kwargs or {}))
        self.name = ""
        return out


class OperationLog(TorchDispatchMode):
    """Notes the operations of a model's forward pass in one process."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths, self.called = Paths(model), Calls()
        self.operations: list[Operation] = []
        self.quiet, self.is_complete = 0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or self.quiet:  # an error in the first would end the process
            return func(*args, **kwargs)
        return (self.collective if func.namespace in RAW else self.operation)(func, args, kwargs)

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operation, and note it."""
        out = run(func, args, kwargs)
        self.note(func, args, kwargs, out, _shape)
        return out

    def collective(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Nothing is communicated."""
        tensors = tensors_in((args, kwargs))
        return raw_collective(func, args, kwargs, tensors, [PARTIAL_SUM] * len(tensors))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Do not follow operations in the block: its caller gives the placement."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def is_watching(self) -> bool:
        """Return whether operations come here: while a graph is captured, modes are off."""
        return self in _get_current_dispatch_mode_stack()

    def run_unseen(self, step: Step, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A step of tensor parallelism is not an operation of the model."""
        with self.unseen():
            return function(*args, **kwargs)

    def note(
        self, func: Any, args: Any, kwargs: Any, out: Any, whole: Whole, on_one: bool = False
    ) -> None:
        """Note what has run, unless it runs backward or computes nothing."""
        name, now = name_of(func), (self.paths.now()[0], self.called.name, self.called.number)
        forward = torch._C._current_graph_task_id() == -1
        if not forward or name in COPIES:
            return
        last = self.operations[-1] if self.operations else None
        if last is None or (last.path, last.name, last.number) != now:
            last = Operation(*now)
            self.operations.append(last)
        numbers = _numbers(func, args, kwargs, whole)
        numbers += (out,) if isinstance(out, (int, float)) else ()
        if by_value := not _BY_VALUE.isdisjoint(func.tags):
            # One row that was found is not constant along the rows: there may be other numbers.
            whole = _shape
        last.parts.append((name, numbers, *map(whole, tensors_in(out))))
        last.by_value |= by_value
        last.on_one |= on_one


def _shape(tensor: Tensor) -> Shape:
    return tuple(tensor.shape)


def _numbers(func: Any, args: Any, kwargs: Any, whole: Whole) -> tuple[Any, ...]:
    """Where a slice begins, over all ranks; of others what is not a size: factors, fractions."""
    if name_of(func).startswith(ATTENTION):  # heads of keys, which it may repeat
        return (whole(argument(func, args, kwargs, "key"))[1],)
    if name_of(func) != "slice":
        kinds = (int, float) if torch.Tag.pointwise in func.tags else (float,)
        return tuple(value for value in tree_leaves((args, kwargs)) if type(value) in kinds)
    dim = argument(func, args, kwargs, "dim", 0)
    size, size_of_all = args[0].shape[dim], whole(args[0])[dim]
    start = slice(argument(func, args, kwargs, "start"), None).indices(size)[0]
    return (ANY if size_of_all == ANY or not size else start * size_of_all // size,)


Pair = tuple[Operation | None, Operation | None]


def first_difference(found: Sequence[Operation], alone: OperationLog) -> Pair | None:
    """The first operation that is not that of one process."""
    wanted: Sequence[Operation] = alone.operations
    while True:
        pairs = zip_longest(found, wanted)
        pair = next(((a, b) for a, b in pairs if not (a and b) or a.difference(b)), None)
        if pair is None or (pair[1] is None and not alone.is_complete):
            return None
        path = _excused(found, pair)
        if path is None:
            return pair
        found, wanted = ([o for o in log if not contains(path, o.path)] for log in (found, wanted))


def _excused(found: Sequence[Operation], pair: Pair) -> str | None:
    """The module whose operations may be others: they go by values, or a slice of 1 is there."""
    here = [each for each in pair if each is not None]
    paths = [each.path for each in here if each.by_value]
    if len(here) == 1 or not here[0].is_like(here[1]):
        with_one = {each.path for each in found if each.on_one}
        paths += [each.path for each in here[::-1] if each.path in with_one]
    return paths[0] if paths else None
