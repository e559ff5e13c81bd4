"""A small model with everything that is hard to send from stage to stage, and its reference."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import slapo
import slapo.framework_dialect.deepspeed.runtime  # registers the target
from tests.runtimes.alone import Alone

VOCAB, HIDDEN, BLOCKS = 16, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x)))) * scale


class Model(nn.Module):
    """Crossing every cut: a hidden state, a second one that needs a gradient too, a float mask

    that needs none, an integer and a bool tensor. The head is tied to the embedding.
    """

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-1, 1, HIDDEN))
        if frozen:
            self.blocks[2].norm.bias.requires_grad_(False)

    def forward(self, ids: Tensor, flags: Tensor) -> dict[str, Tensor]:
        first = self.embed(ids) * self.temperature
        scale = ((ids > 3).float().unsqueeze(-1) + 0.5).to(first.dtype)
        x = first + self.shift.to(first.dtype)
        for block in self.blocks:
            x = block(x, scale)
        x = (
            x.masked_fill(flags.unsqueeze(-1), 0.0)
            + 0.1 * first
            + (0.01 * ids[..., None]).to(x.dtype)
        )
        return {"logits": self.head(x)}


def loss_fn(output: Any, targets: dict[str, Any]) -> Tensor:
    logits = output["logits"]
    labels, (weight,) = targets["labels"], targets["more"]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * weight.flatten()).mean()


SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def shard(sch: Any, prefix: str = "") -> None:
    """Tensor parallelism of the blocks."""
    for index in range(BLOCKS):
        block = sch[f"{prefix}blocks.{index}"]
        block["up"].shard("weight", axis=0)
        block["up"].shard("bias", axis=0)
        block["up"].sync("bwd_post", "all_reduce")
        block["down"].shard("weight", axis=1)
        block["down"].sync("fwd_post", "all_reduce")


def cut(sch: Any, stages: int) -> None:
    """Stages of equal numbers of blocks."""
    if stages > 1:
        sch.trace_until("")
    for index in range(stages - 1):
        sch[f"blocks.{(index + 1) * BLOCKS // stages - 1}"].cut_pipeline_stage()


def scheduled(mesh: DeviceMesh, model: nn.Module, late: bool = False) -> Any:
    """The model's schedule for a mesh; `late`: two stages, the second with the head alone."""
    sch = slapo.create_schedule(model, group=mesh["tp"])
    if mesh["tp"].size() > 1:
        shard(sch)
    if late:
        sch.trace_until("")
        sch[f"blocks.{BLOCKS - 1}"].cut_pipeline_stage()
    else:
        cut(sch, mesh["pp"].size())
    return sch


def batches(dp: int, steps: int, size: int = 4) -> list[Any]:
    """For each step the batch of all replicas, each with `size` of it; sequences get longer."""
    generator = torch.Generator().manual_seed(1)

    def one(length: int) -> Any:
        shape = (dp * size, length)
        ids = torch.randint(0, VOCAB, shape, generator=generator)
        flags = torch.rand(shape, generator=generator) > 0.7
        labels = torch.randint(0, VOCAB, shape, generator=generator)
        weight = torch.rand(shape, generator=generator) + 0.5
        return (ids, flags), {"labels": labels, "more": [weight]}

    return [one(5 if step < steps // 2 else 7) for step in range(steps)]


def alone(model: nn.Module, optimizer: Any = SGD, parts: int = 1, **options: Any) -> Alone:
    """The model in one process."""
    return Alone(model, loss_fn, optimizer, parts=parts, **options)
