"""What modules compute: the operations of the model in one process, on the same sizes.

Half the size of a head where half the number of heads was meant fits every shape, and every slice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slapo.check.call import argument, name_of, run, tensors_in
from slapo.check.moves import COPIES
from slapo.check.paths import Paths
from slapo.check.place import PARTIAL_SUM
from slapo.check.raw import RAW, raw_collective
from slapo.history import contains
from slapo.sharding.steps import Step

#: In place of the size of a dimension along which a tensor is constant.
ANY = -1

Shape = tuple[int, ...]
WholeShape = Callable[[Tensor], Shape]
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True)
class Operation:
    """One operation of a forward pass, as far as it has to be that of one process."""

    path: str
    name: str
    #: of its outputs, over all ranks
    shapes: tuple[Shape, ...]
    #: arguments that may be made of sizes, and the value that it reads
    numbers: tuple[Any, ...]
    #: whether its shapes, or what it reads, depend on values of tensors
    by_value: bool
    #: whether it takes a slice of size 1, for which models and torch have shorter ways
    on_one: bool

    def is_like(self, other: Operation) -> bool:
        """Whether it is the same operation of the same module."""
        return (self.path, self.name) == (other.path, other.name)

    def fits(self, other: Operation) -> bool:
        """Whether it is `other`, on the same sizes."""
        mine, theirs = (*self.shapes, self.numbers), (*other.shapes, other.numbers)
        return self.is_like(other) and len(mine) == len(theirs) and all(map(_fit, mine, theirs))


def _fit(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    pairs = zip(mine, theirs, strict=False)
    return len(mine) == len(theirs) and all(m in (n, ANY) or m != m for m, n in pairs)


class OperationLog(TorchDispatchMode):
    """Notes the operations of a model's forward pass in one process, but in modules `apart`."""

    def __init__(self, model: nn.Module, apart: Collection[str]) -> None:
        super().__init__()
        self.paths = Paths(model)
        self.operations: list[Operation] = []
        self.apart, self.quiet, self.is_complete = apart, 0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note it."""
        kwargs = kwargs or {}
        if func.namespace == "prim" or self.quiet:
            return func(*args, **kwargs)
        if func.namespace in RAW:  # nothing is communicated
            tensors = tensors_in((args, kwargs))
            return raw_collective(func, args, kwargs, tensors, [PARTIAL_SUM] * len(tensors))
        out = run(func, args, kwargs)
        self.note(func, args, kwargs, out, lambda tensor: tuple(tensor.shape))
        return out

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What runs in the block is not looked at: who runs it says what it gives."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def run_unseen(self, step: Step, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A step of tensor parallelism is no operation of the model."""
        with self.unseen():
            return function(*args, **kwargs)

    def note(
        self, func: Any, args: Any, kwargs: Any, out: Any, whole: WholeShape, on_one: bool = False
    ) -> None:
        """Note an operation that has run, unless it runs backward or computes nothing."""
        path, name = self.paths.now()[0], name_of(func)
        forward = torch._C._current_graph_task_id() == -1
        if forward and name not in COPIES and path not in self.apart:
            numbers = _numbers(func, args, kwargs, whole)
            numbers += (out,) if isinstance(out, (int, float)) else ()
            shapes = tuple(map(whole, tensors_in(out)))
            by_value = not _BY_VALUE.isdisjoint(func.tags)
            self.operations.append(Operation(path, name, shapes, numbers, by_value, on_one))


def _numbers(func: Any, args: Any, kwargs: Any, whole: WholeShape) -> tuple[Any, ...]:
    """Where a slice begins, over all ranks; of others what is no size: factors, fractions."""
    if name_of(func) != "slice":
        kinds = (int, float) if torch.Tag.pointwise in func.tags else (float,)
        return tuple(value for value in tree_leaves((args, kwargs)) if type(value) in kinds)
    dim = argument(func, args, kwargs, "dim", 0)
    size, size_of_all = args[0].shape[dim], whole(args[0])[dim]
    start = slice(argument(func, args, kwargs, "start"), None).indices(size)[0]
    return (ANY if size_of_all == ANY or not size else start * size_of_all // size,)


Pair = tuple[Operation | None, Operation | None]


def first_difference(
    found: Sequence[Operation], wanted: Sequence[Operation], is_complete: bool
) -> Pair | None:
    """The first operation that is not that of one process, whose run may be incomplete."""
    for pair in zip_longest(found, wanted):
        mine, theirs = pair
        if theirs is None and not is_complete:
            return None
        if mine is None or theirs is None or not mine.fits(theirs):
            path = _excused(found, pair)
            if path is None:
                return pair
            found, wanted = (
                [o for o in log if not contains(path, o.path)] for log in (found, wanted)
            )
            return first_difference(found, wanted, is_complete)
    return None


def _excused(found: Sequence[Operation], pair: Pair) -> str | None:
    """The module whose operations may be others: they go by values, or a slice of 1 is there."""
    here = [each for each in pair if each is not None]
    paths = [each.path for each in here if each.by_value]
    if len(here) == 1 or not here[0].is_like(here[1]):
        with_one = {each.path for each in found if each.on_one}
        paths += [each.path for each in here[::-1] if each.path in with_one]
    return paths[0] if paths else None
