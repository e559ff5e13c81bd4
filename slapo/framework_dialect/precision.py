"""Half precision: the dtype that a model computes in, and the scale of its loss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from slapo.errors import SlapoError

#: By the names that DeepSpeed and Megatron-Core have for them.
HALF_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = tuple(HALF_NAMES.values())

#: Of the loss of a model in float16, to begin with.
INITIAL_SCALE = 2.0**16

_TWO_DTYPES = re.compile(r"same (d)?type|scalar type|dtype", re.IGNORECASE)


def half_of(module: nn.Module) -> torch.dtype | None:
    """The half precision of a model's parameters, as checkpoints are loaded; None without one.

    The model computes in it where nothing else is asked for, with an optimizer in float32 all the
    same: small steps are lost in parameters of half precision.
    """
    floating = [p for p in module.parameters() if p.is_floating_point()]
    # A frozen part may be of another dtype, as below adapters.
    found = {p.dtype for p in floating if p.requires_grad} or {p.dtype for p in floating}
    if len(found) > 1 and found & set(HALVES):
        raise SlapoError(
            f"parameters are of {', '.join(sorted(map(str, found)))}; say by dtype= what the model "
            "computes in"
        )
    return next((dtype for dtype in found if dtype in HALVES), None)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters of floating point another dtype; buffers, as of positions, keep theirs."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


@contextmanager
def buffers_named(module: nn.Module, half: torch.dtype) -> Iterator[None]:
    """Name the buffers that kept their dtype in an error about two dtypes inside the context."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SlapoError) or not _TWO_DTYPES.search(str(error)):
            raise
        buffers = module.named_buffers()
        kept = [n for n, b in buffers if b.is_floating_point() and b.dtype != half]
        if not kept:
            raise
        raise SlapoError(
            f"{error}. The model computes in {half}, to which parameters and inputs are "
            f"converted, and buffers are not: {kept[:5]}. Convert those that it computes with "
            "before the schedule is made, or where they are used: x + self.table.to(x.dtype)"
        ) from error


class LossScale:
    """A factor that keeps gradients of float16 from vanishing, lowered where they overflow.

    Micikevicius et al. 2018, "Mixed Precision Training": halved after a step with a gradient that
    is not finite, doubled after many without.
    """

    def __init__(self, value: float = INITIAL_SCALE, interval: int = 2000) -> None:
        self.value, self.interval = value, interval
        self.steps = 0

    def update(self, was_finite: bool) -> None:
        """Take note of a step."""
        if not was_finite:
            self.value, self.steps = max(self.value / 2, 1.0), 0
            return
        self.steps += 1
        if self.steps == self.interval:
            self.value, self.steps = self.value * 2, 0
