"""Does a recorded run depend on train or eval mode? Only if somebody asked for the mode.

A recording in which no code read ``module.training`` holds in both modes, and the second recording
that would compare them can be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class ModeReads:
    """Whether a recording has seen a read of ``module.training`` that may matter."""

    def __init__(self) -> None:
        self.asked = False

    def note(self) -> None:
        """Somebody has asked."""
        self.asked = True

    @contextmanager
    def apart(self) -> Iterator[ModeReads]:
        """Reads within the block count in what is yielded instead."""
        before, self.asked = self.asked, False
        inside = ModeReads()
        try:
            yield inside
        finally:
            inside.asked, self.asked = self.asked, before


def training_flag(asked: Any) -> property:
    """A property ``training`` of modules that keeps the flag where it was and tells of reads.

    Parameters
    ----------
    asked
        Called without arguments at each read.
    """

    def read(module: nn.Module) -> Any:
        asked()
        try:
            return vars(module)["training"]
        except KeyError:
            raise AttributeError("training") from None  # modules of TorchScript look elsewhere

    def write(module: nn.Module, flag: Any) -> None:
        vars(module)["training"] = flag

    return property(read, write)


def mode_is_a_flag(root: nn.Module) -> bool:
    """True when ``.train()`` and ``.eval()`` change nothing but the flags of `root` and below.

    Modules may define ``train`` to do more (merge weights, freeze a part), and ``training`` as a
    property, whose reads nobody sees.
    """
    kinds = {type(module) for module in root.modules()}
    if any(isinstance(getattr(kind, "training", None), property) for kind in kinds):
        return False
    if all(kind.train is nn.Module.train for kind in kinds):
        return True
    flags = [(module, module.training) for module in root.modules()]
    before = [_other_attributes(module) for module, _ in flags]
    try:
        root.train(not root.training)
        return all(
            _same_items(_other_attributes(module), attributes)
            for (module, _), attributes in zip(flags, before, strict=True)
        )
    finally:
        root.train(not root.training)
        for module, flag in flags:
            module.training = flag


def _other_attributes(module: nn.Module) -> dict[str, Any]:
    state = vars(module)
    tensors = {**state.get("_parameters", {}), **state.get("_buffers", {})}
    return {**state, **tensors, **state.get("_modules", {}), "training": None}


def _same_items(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[k] is before[k] for k in now)
