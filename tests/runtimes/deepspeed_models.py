"""The contract's model with everything that is hard to send from stage to stage."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtimes import contract
from tests.runtimes.alone import Alone
from tests.runtimes.contract import SIZE, VOCABULARY


class Block(contract.Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.norm(super().forward(x, scale)) * scale.unsqueeze(-1)


class Model(contract.Model):
    """Crossing every cut: a hidden state, a second one that needs a gradient too, a float mask

    that needs none, an integer and a bool tensor. The head is tied to the embedding.
    """

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.temperature = nn.Parameter(torch.full(() if scalar else (1,), 1.3))
        self.register_buffer("shift", torch.linspace(-1, 1, SIZE))
        self.h[2].norm.bias.requires_grad_(False)

    def forward(self, ids: Tensor, flags: Tensor) -> dict[str, Tensor]:
        first = self.emb(ids) * self.temperature
        scale = ((ids > 3).float() + 0.5).to(first.dtype)
        x = first + self.shift.to(first.dtype)
        for block in self.h:
            x = block(x, scale)
        x = x.masked_fill(flags.unsqueeze(-1), 0.0) + 0.1 * first
        return {"logits": self.head(x + (0.01 * ids[..., None]).to(x.dtype))}


def seeded(scalar: bool = True) -> Model:
    """The same on all ranks, which may have drawn other numbers before."""
    torch.manual_seed(0)
    return Model(scalar)


def loss_fn(output: Any, targets: dict[str, Any]) -> Tensor:
    logits = output["logits"]
    labels, (weight,) = targets["labels"], targets["more"]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * weight.flatten()).mean()


SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def make(layout: tuple[int, int, int], model: nn.Module, **options: Any) -> Any:
    """The engine of a model in a layout."""
    given = {"loss_fn": loss_fn, "optimizer": SGD, "micro_batches": 2, **options}
    return contract.make("deepspeed", layout, model=model, **given)


def batches(dp: int, steps: int, size: int = 4) -> list[Any]:
    """For each step the batch of all replicas, each with `size` of it; sequences get longer."""
    generator = torch.Generator().manual_seed(1)

    def one(length: int) -> Any:
        shape = (dp * size, length)
        ids = torch.randint(0, VOCABULARY, shape, generator=generator)
        flags = torch.rand(shape, generator=generator) > 0.7
        labels = torch.randint(0, VOCABULARY, shape, generator=generator)
        weight = torch.rand(shape, generator=generator) + 0.5
        return (ids, flags), {"labels": labels, "more": [weight]}

    return [one(5 if step < steps // 2 else 7) for step in range(steps)]


def alone(model: nn.Module, optimizer: Any = SGD, parts: int = 1, **options: Any) -> Alone:
    """The model in one process."""
    return Alone(model, loss_fn, optimizer, parts=parts, **options)
