"""Half precision: what a model computes in, and the scale of its loss."""

from __future__ import annotations

import torch
from torch import nn

from slapo.errors import SlapoError
from slapo.graph.trace.module import TracedModule

HALVES = (torch.bfloat16, torch.float16)


def half_of(module: nn.Module, dtype: torch.dtype | None) -> torch.dtype | None:
    """The half precision that a model is to compute in; None for float32.

    A model whose parameters are of half precision already, as checkpoints are loaded, computes in
    it when nothing else is asked for.

    Examples
    --------
    >>> half_of(nn.Linear(2, 2).bfloat16(), None)
    torch.bfloat16
    """
    if dtype is None:
        found = {p.dtype for p in module.parameters() if p.dtype in HALVES}
        return found.pop() if len(found) == 1 else None
    return dtype if dtype in HALVES else None


def check_dtype(dtype: torch.dtype | None, target: str) -> None:
    """Refuse what no engine computes in.

    Raises
    ------
    ValueError
        Naming what there is.

    Examples
    --------
    >>> check_dtype(torch.bfloat16, "torch")
    """
    if dtype not in (None, torch.float32, *HALVES):
        raise ValueError(
            f"dtype is {dtype}; target {target!r} takes None, torch.float32, torch.bfloat16 and "
            "torch.float16"
        )


def check_traces(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Refuse graphs that hold for another dtype than the model is to compute in.

    Raises
    ------
    SlapoError
        Naming the module.
    """
    if dtype is None:
        return
    for path, child in module.named_modules():
        traced = child.contract.dtype if isinstance(child, TracedModule) else None
        if traced not in (None, dtype):
            raise SlapoError(
                f"{path or 'the model'!r} was traced with parameters of {traced}, and is to run "
                f"with {dtype}; convert the model by model.to({dtype}) before it is traced"
            )


class LossScale:
    """A factor that keeps gradients of float16 from vanishing, lowered where they overflow.

    Micikevicius et al. 2018, "Mixed Precision Training": halved after a step with a gradient that
    is not finite, doubled after many without.

    Parameters
    ----------
    value
        To begin with.
    interval
        Steps after which it is doubled.

    Examples
    --------
    >>> scale = LossScale(4.0, interval=2)
    >>> scale.update(False), scale.value
    (None, 2.0)
    >>> scale.update(True), scale.update(True), scale.value
    (None, None, 4.0)
    """

    def __init__(self, value: float = 2.0**16, interval: int = 2000) -> None:
        self.value, self.interval = value, interval
        self._steps = 0

    def update(self, was_finite: bool) -> None:
        """Take note of a step."""
        if not was_finite:
            self.value, self._steps = max(self.value / 2, 1.0), 0
            return
        self._steps += 1
        if self._steps == self.interval:
            self.value, self._steps = self.value * 2, 0
