"""The operations of the model in one process, to compare sizes.

Placements alone miss some faults: half the head size instead of half the number of heads fits every
shape and every slice.
"""

from __future__ import annotations

import functools
import weakref
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

from slapo.graph.trace.torch_private import modes_off
from slapo.history import contains
from slapo.sharding.steps import Step
from slapo.verify.placement.call import argument, name_of, run, tensors_in
from slapo.verify.placement.paths import Paths
from slapo.verify.placement.place import PARTIAL_SUM
from slapo.verify.placement.raw_collectives import RAW, raw_collective
from slapo.verify.placement.reduction_rules import ATTENTION
from slapo.verify.placement.view_rules import COPIES

#: Attribute of a tensor that was made of a number.
_NUMBER = "_slapo_number"
#: Placeholder for the size of a dimension along which a tensor is constant.
ANY = "any"

Shape = tuple[Any, ...]
#: Function from a tensor to its shape over all ranks.
Whole = Callable[[Tensor], Shape]
#: One torch operation: its name, arguments that may contain sizes, and output shapes.
Part = tuple[Any, ...]
#: Methods that return a tensor's values without an operation that a dispatch mode sees.
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass
class Operation:
    """One call of a torch function by a module, with the sizes over all ranks."""

    path: str
    name: str
    number: int
    parts: list[Part] = field(default_factory=list)
    #: true if its shapes, or a value that it reads, depend on tensor values
    by_value: bool = False
    #: true if an input is a slice of size 1, for which models may take shortcuts
    on_one: bool = False

    def is_like(self, other: Operation) -> bool:
        """Return True for the same call in the same module."""
        return (self.path, self.name) == (other.path, other.name)

    def difference(self, other: Operation) -> tuple[Part, Part] | None:
        """The first parts that differ; if strides led to other parts, only the last ones count."""
        mine, theirs = self.parts, other.parts
        if not self.is_like(other):
            return mine[-1], theirs[-1]
        # On other strides torch runs other operations for one function: a copy that a collective
        # makes is contiguous where one process has a view. Only the function's result counts then.
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
    """Tracks the torch function that a model is calling; passes on the values that it reads."""

    number, name = 0, ""

    def __init__(self, log: OperationLog) -> None:
        super().__init__()
        # Weak: a cycle would keep the log's process group alive after the run.
        self._log = weakref.ref(log)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number, self.name = self.number + 1, getattr(func, "__name__", "")
        out = func(*args, **(kwargs or {}))
        if func in _READS and (log := self._log()):
            log.read(self.name, args[0])
        self.name = ""
        return out


class OperationLog(TorchDispatchMode):
    """Records the operations of a model's forward pass in one process."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths, self.called = Paths(model), Calls(self)
        self.operations: list[Operation] = []
        self.quiet, self.is_complete = 0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or self.quiet:  # prim: an error would abort
            return func(*args, **kwargs)
        return (self.collective if func.namespace in RAW else self.operation)(func, args, kwargs)

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operation, and record it."""
        out = run(func, args, kwargs)
        self.note(func, args, kwargs, out, _shape)
        return out

    def collective(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result without communication."""
        tensors = tensors_in((args, kwargs))
        return raw_collective(func, args, kwargs, tensors, [PARTIAL_SUM] * len(tensors))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Skip operations in the block; the caller sets the placement."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def is_watching(self) -> bool:
        """Return True if operations reach this mode; modes are off during a graph capture."""
        return self in _get_current_dispatch_mode_stack()

    def run_unseen(self, step: Step, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of tensor parallelism without recording its operations."""
        with self.unseen():
            return function(*args, **kwargs)

    def note(
        self, func: Any, args: Any, kwargs: Any, out: Any, whole: Whole, on_one: bool = False
    ) -> None:
        """Record an operation of the forward pass, unless it computes nothing."""
        name = name_of(func)
        # A checkpoint recomputes its forward pass in the backward pass, where one process does not
        # run.
        if _in_backward():
            return
        if name in COPIES:
            _keep_number(name, args[0], out)
            return
        last = self._operation()
        numbers = _numbers(func, args, kwargs, whole)
        numbers += (out,) if isinstance(out, (int, float)) else ()
        if by_value := not _BY_VALUE.isdisjoint(func.tags):
            # A found row of size 1 is not constant along the rows: another input may give more
            # rows.
            whole = _shape
        last.parts.append((name, numbers, *map(whole, tensors_in(out))))
        last.by_value |= by_value
        last.on_one |= on_one

    def read(self, name: str, tensor: Tensor) -> None:
        """Record the values that Python reads from a tensor."""
        if self.quiet or _in_backward():
            return
        last = self._operation()
        last.parts.append((name, tuple(tensor.flatten().tolist())))
        last.by_value = True

    def _operation(self) -> Operation:
        """The torch function that runs now, as the last operation of the log."""
        now = self.paths.now()[0], self.called.name, self.called.number
        last = self.operations[-1] if self.operations else None
        if last is None or (last.path, last.name, last.number) != now:
            last = Operation(*now)
            self.operations.append(last)
        return last


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _shape(tensor: Tensor) -> Shape:
    return tuple(tensor.shape)


def _numbers(func: Any, args: Any, kwargs: Any, whole: Whole) -> tuple[Any, ...]:
    """Arguments to compare: the global start of a slice; otherwise factors and fractions."""
    if name_of(func).startswith(ATTENTION):  # number of key heads, which attention may repeat
        return (whole(argument(func, args, kwargs, "key"))[1],)
    if name_of(func) != "slice":
        # Other integers are sizes and dimensions: sizes differ by design, and shapes show wrong
        # ones.
        found = [value for value in tree_leaves((args, kwargs)) if type(value) is float]
        for name in _factors(func):
            value = argument(func, args, kwargs, name)
            if type(value) is int or hasattr(value, _NUMBER):
                found.append(getattr(value, _NUMBER, value))
        return tuple(found)
    dim = argument(func, args, kwargs, "dim", 0)
    size, size_of_all = args[0].shape[dim], whole(args[0])[dim]
    start = slice(argument(func, args, kwargs, "start"), None).indices(size)[0]
    return (ANY if size_of_all == ANY or not size else start * size_of_all // size,)


@functools.cache
def _factors(func: Any) -> list[str]:
    """Names of the arguments that may be an integer which is a value, not a size."""
    # The bounds of a range are sizes.
    arguments = [] if name_of(func) == "arange" else func._schema.arguments
    return [a.name for a in arguments if any(t in str(a.type) for t in ("number", "Tensor"))]


def _keep_number(name: str, given: Tensor, out: Tensor) -> None:
    """Keep the number that a tensor was made of, as by ``torch.tensor(number)``."""
    if name == "lift_fresh" and given.numel() == 1:
        with modes_off():
            setattr(out, _NUMBER, given.item())
    elif hasattr(given, _NUMBER):
        setattr(out, _NUMBER, getattr(given, _NUMBER))


Pair = tuple[Operation | None, Operation | None]


def first_difference(found: Sequence[Operation], alone: OperationLog) -> Pair | None:
    """The first operation that differs from one process, as a pair, or None."""
    wanted: Sequence[Operation] = alone.operations
    # Find the first difference; if it is excused, drop its module from both logs and look again. A
    # module with an excused difference cannot be compared at all, since its later operations follow
    # from it; each round drops at least one operation, so the search ends.
    readers: list[str] = []
    while True:
        pairs = zip_longest(found, wanted)
        pair = next(((a, b) for a, b in pairs if not (a and b) or a.difference(b)), None)
        # The run in one process ended early, as with local sizes in a graph: the rest is unknown.
        if pair is None or (pair[1] is None and not alone.is_complete):
            return None
        readers += [each.path for each in pair if each and each.by_value]
        path = _excused(found, pair, readers)
        if path is None:
            return pair
        found, wanted = ([o for o in log if not contains(path, o.path)] for log in (found, wanted))


def _excused(found: Sequence[Operation], pair: Pair, readers: list[str]) -> str | None:
    """A module whose operations may differ, or None."""
    here = [each for each in pair if each is not None]
    paths = [each.path for each in here if each.by_value]
    # Also siblings of a module that reads values, such as the experts of a router.
    around = [path.rpartition(".")[0] for path in readers if path]
    paths += [o.path for o in here if any(contains(path, o.path) for path in around)]
    if len(here) == 1 or not here[0].is_like(here[1]):
        # Models skip work for a size of 1, such as the repetition of a single head, so other calls
        # run.
        with_one = {each.path for each in found if each.on_one}
        paths += [each.path for each in here[::-1] if each.path in with_one]
    return paths[0] if paths else None
