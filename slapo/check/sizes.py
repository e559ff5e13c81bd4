"""What modules compute on: sizes that have to be those of the model in one process.

Half the size of a head where half the number of heads was meant fits every shape, and every slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slapo.check.call import name_of, run, tensors_in
from slapo.check.mixing import ATTENTION, REDUCTIONS
from slapo.check.moves import VIEWS
from slapo.check.paths import Paths
from slapo.check.place import PARTIAL_SUM
from slapo.check.raw import RAW, raw_collective

#: Operations whose sizes say what a module computes.
_SIZED = {"_softmax", "_safe_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm"}
_SIZED |= {"native_group_norm", "bmm", "pow", *REDUCTIONS}


#: In place of the size of a dimension along which a tensor is constant.
ANY = -1


@dataclass(frozen=True)
class Sized:
    """One operation of a module on tensors of these sizes, those of all ranks together."""

    path: str
    name: str
    shapes: tuple[tuple[int, ...], ...]

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
    return forward and (name in _SIZED or name.startswith(ATTENTION))


def sized(path: str, name: str, shapes: list[tuple[int, ...]], args: Any) -> Sized:
    """With what the shapes do not tell: how many channels a group has."""
    if name == "native_group_norm":
        channels, groups = args[4], args[6]
        shapes.append((channels // groups,))
    return Sized(path, name, tuple(shapes))


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
            shapes = [tuple(t.shape) for t in tensors_in((args, kwargs))]
            self.sized.append(sized(self.paths.now()[0], name, shapes, args))
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
    for path, before in _by_path(wanted).items():
        now = mine.get(path, [])
        if [each.name for each in now] == [each.name for each in before]:
            for pair in zip(now, before, strict=True):
                if not pair[0].fits(pair[1]):
                    return pair
    return None


def _by_path(sized: list[Sized]) -> dict[str, list[Sized]]:
    found: dict[str, list[Sized]] = {}
    for each in sized:
        found.setdefault(each.path, []).append(each)
    return found
