"""Optimizers of target "megatron", and the same in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.runtimes import layouts


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As Megatron-Core sets it up below. With so large an epsilon, steps are as good as linear in
    the gradient.
    """
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.0)


def _config(**fields: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(**{"weight_decay": 0.0, **fields})


megatron_adam = partial(_config, optimizer="adam", lr=1e-2, adam_eps=1e-2)
megatron_sgd = partial(_config, optimizer="sgd", lr=layouts.LEARNING_RATE)
