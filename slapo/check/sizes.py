"""What modules compute on: sizes that have to be those of the model in one process.

Half the size of a head where half the number of heads was meant fits every shape, and every slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slapo.check.call import argument, name_of, run, tensors_in
from slapo.check.mixing import ATTENTION, REDUCTIONS
from slapo.check.moves import VIEWS
from slapo.check.paths import Paths
from slapo.check.place import PARTIAL_SUM
from slapo.check.raw import RAW, raw_collective

#: Operations whose sizes say what a module computes.
_SIZED = {"_softmax", "_safe_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm"}
_SIZED |= {"native_group_norm", "bmm", "pow", *REDUCTIONS}


#: Of which numbers are noted: bounds, factors.
_NUMBERED = ("slice", "mul", "div")

#: In place of the size of a dimension along which a tensor is constant.
ANY = -1


@dataclass(frozen=True)
class Sized:
    """One operation of a module on tensors of these sizes, those of all ranks together."""

    path: str
    name: str
    shapes: tuple[tuple[Any, ...], ...]

    def fits(self, other: Sized) -> bool:
        """Whether the sizes are those of `other`."""
        pairs = zip(self.shapes, other.shapes, strict=False)
        return len(self.shapes) == len(other.shapes) and all(
            len(a) == len(b) and all(m in (n, ANY) for m, n in zip(a, b, strict=True))
            for a, b in pairs
        )


#: Module -> shapes that its views have in one process, in order.
Views = dict[str, list[tuple[int, ...]]]


def is_sized(name: str) -> bool:
    """Whether the sizes of an operation, which runs forward, are noted."""
    forward = torch._C._current_graph_task_id() == -1
    return forward and (name in _SIZED or name in _NUMBERED or name.startswith(ATTENTION))


def sized(
    path: str,
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    whole_shape: Callable[[Tensor], tuple[int, ...]],
) -> Sized:
    """What is noted of an operation: sizes, or else numbers that were made of sizes perhaps.

    Parameters
    ----------
    whole_shape
        Of a tensor, over all ranks.
    """
    name = name_of(func)
    shapes: list[tuple[Any, ...]] = []
    if name == "slice":
        shapes.append(_bounds(func, args, kwargs, whole_shape))
    elif name in _NUMBERED:
        shapes.append(tuple(value for value in args[:2] if isinstance(value, (int, float))))
    else:
        shapes += map(whole_shape, tensors_in((args, kwargs)))
    if name == "native_group_norm":  # how many channels a group has
        shapes.append((args[4] // args[6],))
    return Sized(path, name, tuple(shapes))


def _bounds(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    whole_shape: Callable[[Tensor], tuple[int, ...]],
) -> tuple[int, ...]:
    """Where a slice begins and ends, over all ranks."""
    tensor = args[0]
    dim = argument(func, args, kwargs, "dim", 0) % tensor.ndim
    size, whole = tensor.shape[dim], whole_shape(tensor)[dim]
    start, end = (argument(func, args, kwargs, name) for name in ("start", "end"))
    start, stop, _ = slice(start, end).indices(size)
    if whole == ANY or size == 0:
        return (ANY, ANY)
    return (start * whole // size, stop * whole // size)


class SizeMode(TorchDispatchMode):
    """Notes the sizes that a model runs on in one process."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths = Paths(model)
        self.sized: list[Sized] = []
        self.views: Views = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note its sizes."""
        name = name_of(func)
        if is_sized(name):
            path = self.paths.now()[0]
            self.sized.append(sized(path, func, args, kwargs or {}, lambda t: tuple(t.shape)))
        if func.namespace in RAW:  # nothing is communicated
            tensors = tensors_in((args, kwargs))
            return raw_collective(func, args, kwargs or {}, tensors, [PARTIAL_SUM] * len(tensors))
        result = run(func, args, kwargs or {})
        if name in VIEWS:
            self.views.setdefault(self.paths.now()[0], []).append(tuple(result.shape))
        return result

    def forget(self, paths: set[str]) -> None:
        """What ran in these modules was not as in one process."""
        self.sized = [each for each in self.sized if each.path not in paths]
        self.views = {path: shapes for path, shapes in self.views.items() if path not in paths}


def first_difference(found: list[Sized], wanted: list[Sized]) -> tuple[Sized, Sized] | None:
    """The first operation on other sizes, in a module that runs the same ones on both sides."""
    mine = _by_path(found)
    for key, before in _by_path(wanted).items():
        now = mine.get(key, [])
        if [each.name for each in now] == [each.name for each in before]:
            for pair in zip(now, before, strict=True):
                if not pair[0].fits(pair[1]):
                    return pair
    return None


def _by_path(sized: list[Sized]) -> dict[tuple[str, str], list[Sized]]:
    """By the module and what was noted: a slice more leaves the sizes to be compared."""
    found: dict[tuple[str, str], list[Sized]] = {}
    for each in sized:
        kind = each.name if each.name in _NUMBERED else ""
        found.setdefault((each.path, kind), []).append(each)
    return found
