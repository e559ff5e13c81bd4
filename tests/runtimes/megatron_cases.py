"""Optimizers of target "megatron", and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.runtimes import layouts


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As Megatron-Core sets it up below. With so large an epsilon, steps are as good as linear in
    the gradient.
    """
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.0)


def megatron_adam(**fields: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    given = {"optimizer": "adam", "lr": 1e-2, "adam_eps": 1e-2, "weight_decay": 0.0, **fields}
    return OptimizerConfig(**given)


def megatron_sgd(**fields: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    given = {"optimizer": "sgd", "lr": layouts.LEARNING_RATE, "weight_decay": 0.0, **fields}
    return OptimizerConfig(**given)
