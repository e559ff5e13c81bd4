"""Train, save, resume elsewhere, train on, and compare with one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.parallel_models import FAMILIES
from slapo.saving.steps import Step
from slapo.weights.pieces import box_of
from tests.runtimes import layouts
from tests.runtimes.alone import Alone, largest_difference, of_this_rank
from tests.runtimes.layouts import batches, model_of

Layout = tuple[int, int, int]

#: steps before a step is saved; the others come after it
BEFORE = 3


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With so large an epsilon, steps are as good as linear in the gradient."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.1)


halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)

#: name -> target, layout of two ranks, options
KINDS: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "tp 2": ("torch", (1, 1, 2), {}),
    "dp 2": ("torch", (1, 2, 1), {}),
    "fsdp": ("torch", (1, 2, 1), {"data_parallel": "fsdp"}),
    "pp 2": ("torch", (2, 1, 1), {}),
    "zero 1": ("deepspeed", (1, 2, 1), {"zero": 1}),
    "zero 2": ("deepspeed", (1, 2, 1), {"zero": 2}),
    "zero 3": ("deepspeed", (1, 2, 1), {"zero": 3}),
    "zero 1 tp 2": ("deepspeed", (1, 1, 2), {"zero": 1}),
    "pipe": ("deepspeed", (2, 1, 1), {}),
    "megatron tp 2": ("megatron", (1, 1, 2), {}),
    "megatron dp 2": ("megatron", (1, 2, 1), {}),
    "megatron pp 2": ("megatron", (2, 1, 1), {}),
}


def build(family: str, kind: str, seed: int = 0, dropout: float = 0.0, **options: Any) -> Any:
    """An engine; of another model than the others if there is a seed."""
    target, layout, given = KINDS[kind]
    model = model_of(family, dropout)
    if seed:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter)
    return layouts.build(family, target, layout, model, **{**given, "optimizer": adam, **options})


def alone(family: str, **options: Any) -> Alone:
    return layouts.alone(family, **{"optimizer": adam, **options})


def train(engine: Any, family: str, start: int, stop: int) -> list[float]:
    """Losses of some of the steps."""
    given = batches(FAMILIES[family])[start:stop]
    return [float(engine.train_batch(iter([of_this_rank(engine.mesh, b)]))) for b in given]


def apart(engine: Any, reference: Alone, losses: list[float], first: int = BEFORE) -> float:
    """The largest difference of losses after a step, and of values."""
    pairs = zip(losses, reference.losses[first:], strict=True)
    return max(*(abs(a - b) for a, b in pairs), largest_difference(engine, reference.state()))


def contents(step: Path) -> dict[str, Tensor]:
    """All tensors of a step, whole."""
    found, saved = {}, Step(step)
    for slot, named in saved.manifest.tensors.items():
        for name, tensor in named.items():
            found[f"{slot}:{name}"] = saved.read((slot, name), box_of(tensor.shape))
    saved.close()
    return found


def different(one: Path, other: Path) -> list[str]:
    """What two steps do not have alike, to the bit."""
    left, right = contents(one), contents(other)
    return sorted(left.keys() ^ right.keys()) + [
        name
        for name in left.keys() & right.keys()
        if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])
    ]
