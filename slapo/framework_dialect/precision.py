"""Half precision: the dtype that a model computes in, and its loss scale."""

from __future__ import annotations

import torch
from torch import nn

from slapo.errors import SlapoError

#: Names of half precisions in DeepSpeed and Megatron-Core.
HALF_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = tuple(HALF_NAMES.values())

#: Initial loss scale of a model in float16.
INITIAL_SCALE = 2.0**16


def half_of(module: nn.Module) -> torch.dtype | None:
    """Half precision of a model's parameters, as checkpoints are loaded; None without one.

    The model computes in it by default. The optimizer still uses float32, since parameters in half
    precision would lose small steps.
    """
    floating = [p for p in module.parameters() if p.is_floating_point()]
    # A frozen part may have another dtype, for example below adapters.
    found = {p.dtype for p in floating if p.requires_grad} or {p.dtype for p in floating}
    if len(found) > 1 and found & set(HALVES):
        raise SlapoError(
            f"parameter dtypes are {', '.join(sorted(map(str, found)))}; pass the compute dtype "
            "as dtype="
        )
    return next((dtype for dtype in found if dtype in HALVES), None)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters to a dtype; buffers, such as positions, keep theirs."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


class LossScale:
    """Factor on the loss that keeps float16 gradients from vanishing, lowered on overflow.

    Micikevicius et al. 2018, "Mixed Precision Training": halved after a step with a non-finite
    gradient, doubled after `interval` steps without one.
    """

    def __init__(self, value: float = INITIAL_SCALE, interval: int = 2000) -> None:
        self.value, self.interval = value, interval
        self.steps = 0

    def update(self, was_finite: bool) -> None:
        """Adjust the scale after a step."""
        if not was_finite:
            self.value, self.steps = max(self.value / 2, 1.0), 0
            return
        self.steps += 1
        if self.steps == self.interval:
            self.value, self.steps = self.value * 2, 0
