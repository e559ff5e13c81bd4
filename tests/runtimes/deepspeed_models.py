"""A small model with everything that is hard to send from stage to stage, and its reference."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import slapo
import slapo.framework_dialect.deepspeed.runtime  # registers the target

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


@dataclass
class Output:
    logits: Tensor


class OpaqueModel(nn.Module):
    """Returns an object of a class that DeepSpeed does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, ids: Tensor, flags: Tensor) -> Output:
        return Output(self.model(ids, flags)["logits"])


def loss_fn(output: Any, targets: dict[str, Any]) -> Tensor:
    logits = output.logits if isinstance(output, Output) else output["logits"]
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


def batches(dp: int, steps: int, size: int = 4) -> list[list[Any]]:
    """For each step a batch for each replica; sequences get longer halfway."""
    generator = torch.Generator().manual_seed(1)

    def one(length: int) -> Any:
        shape = (size, length)
        ids = torch.randint(0, VOCAB, shape, generator=generator)
        flags = torch.rand(shape, generator=generator) > 0.7
        labels = torch.randint(0, VOCAB, shape, generator=generator)
        weight = torch.rand(shape, generator=generator) + 0.5
        return (ids, flags), {"labels": labels, "more": [weight]}

    return [[one(5 if step < steps // 2 else 7) for _ in range(dp)] for step in range(steps)]


class Reference:
    """The same training on one process, in bfloat16 with float32 copies if asked for."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        micro_batches: int,
        clip: float | None = None,
        dtype: torch.dtype = torch.float32,
        lr_scheduler: Any = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.optimizer = optimizer(self.masters)
        self.scheduler = lr_scheduler(self.optimizer) if lr_scheduler else None
        self.micro_batches, self.clip = micro_batches, clip

    def step(self, replicas: list[Any]) -> float:
        sums = [torch.zeros_like(master) for master in self.masters]
        total = 0.0
        parts = [part for batch in replicas for part in split(batch, self.micro_batches)]
        for inputs, targets in parts:
            loss = loss_fn(self.model(*inputs), targets).float()
            (loss / self.micro_batches).backward()
            total += loss.item()
            for added, param in zip(sums, self.params, strict=True):
                if param.grad is not None:
                    added += param.grad.float()
                param.grad = None
        for master, added in zip(self.masters, sums, strict=True):
            master.grad = added / len(replicas)
        if self.clip:
            self.norm = nn.utils.clip_grad_norm_(self.masters, self.clip)
            assert self.norm > self.clip, "the test is about gradients that are clipped"
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.data.copy_(master.data)
        return total / len(parts)


def split(batch: Any, count: int) -> list[Any]:
    (ids, flags), targets = batch
    labels, (weight,) = targets["labels"], targets["more"]
    pieces = [t.chunk(count) for t in (ids, flags, labels, weight)]
    return [((i, f), {"labels": y, "more": [w]}) for i, f, y, w in zip(*pieces, strict=True)]


def state_error(state: dict[str, Tensor], reference: nn.Module, mesh: DeviceMesh) -> float:
    """Largest difference of this rank's tensors from the reference's."""
    whole = reference.state_dict()
    tp, place = mesh["tp"].size(), mesh.get_local_rank("tp")
    errors = []
    for name, tensor in state.items():
        wanted = whole[name].float()
        for axis, size in enumerate(tensor.shape):
            if wanted.shape[axis] != size:
                wanted = wanted.chunk(tp, axis)[place]
        assert tensor.shape == wanted.shape, name
        errors.append((tensor.float() - wanted).abs().max().item())
    return max(errors)
