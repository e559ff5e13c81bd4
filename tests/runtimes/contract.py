"""The model that tests of every runtime train, scheduled for a layout or in one process."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from tests.graph.served import make as module_of
from tests.runtimes.alone import Alone

VOCABULARY, SIZE, LENGTH, BATCH, MICRO_BATCHES = 24, 8, 5, 8, 4

#: Sums of float32 in other orders, of losses of about 3 and parameters of about 1.
TOLERANCE = 1e-5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * mask.unsqueeze(-1).to(x.dtype)


class Mode(nn.Module):
    """Tells the modes apart: evaluation in train mode would show."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else 2 * x


class Model(nn.Module):
    """A mask crosses the stages beside the hidden states, and the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, SIZE)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.mode = Mode()
        self.head = nn.Linear(SIZE, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.emb(ids), ids > 3
        for block in self.h:
            x = block(x, mask)
        return self.head(self.mode(x))


def with_unused() -> nn.Module:
    """A model with parameters that no loss depends on."""
    layers = {"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)}
    return module_of(lambda self, x: self.used(x), **layers)


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def data(steps: int = 6, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        pair = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
        yield pair[0], pair[1]


def seeded(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().train()


def build(model: nn.Module, target: str = "torch", layout: Any = (1, 1, 1), **options: Any) -> Any:
    """The engine of a small model that is not split; its loss is a mean of squares."""
    mesh = slapo.init_mesh(*layout, device="cpu")
    sch = slapo.create_schedule(model, group=mesh["tp"])
    base = {"loss_fn": F.mse_loss, "optimizer": sgd}
    return slapo.build(sch, target=target, mesh=mesh, **{**base, **options})[0]


def scheduled(
    model: nn.Module,
    group: Any,
    stages: int = 1,
    cuts: Sequence[int] | None = None,
    forgets: Sequence[str] = (),
) -> slapo.Schedule:
    """Blocks over a group, in stages of as many blocks each, or cut behind those of `cuts`.

    The layers that it `forgets` have no collective.
    """
    sch = slapo.create_schedule(model, group=group)
    for block in sch.select("h.*") if sch.world_size > 1 else ():
        block["up"].shard("weight", 0).shard("bias", 0)
        block["down"].shard("weight", 1)
        for name, mode in (("up", "bwd_post"), ("down", "fwd_post")):
            if block[name].path not in forgets:
                block[name].sync(mode, "all_reduce")
    if cuts is None:
        cuts = [stage * 4 // stages - 1 for stage in range(1, stages)]
    if cuts:
        sch.trace_until("")
        for cut in cuts:
            sch[f"h.{cut}"].cut_pipeline_stage()
    return sch


def make(
    target: str,
    layout: tuple[int, int, int],
    stages: int | None = None,
    model: nn.Module | None = None,
    cuts: Sequence[int] | None = None,
    forgets: Sequence[str] = (),
    **options: Any,
) -> Any:
    """The engine of a model in a layout, with as many stages as pipeline ranks."""
    mesh = slapo.init_mesh(*layout, device="cpu")
    stages = layout[0] if stages is None else stages
    sch = scheduled(model or seeded(), mesh["tp"], stages, cuts, forgets)
    base = {"loss_fn": loss_fn, "optimizer": sgd, "micro_batches": MICRO_BATCHES}
    return slapo.build(sch, target=target, mesh=mesh, **{**base, **options})[0]


def alone(**options: Any) -> Alone:
    """The model that `make` schedules, in one process."""
    return Alone(seeded(), **{"loss_fn": loss_fn, "optimizer": sgd, **options})


def copied(engine: Any) -> dict[str, Tensor]:
    """Values of an engine that its next steps do not change."""
    return {name: tensor.detach().clone() for name, tensor in engine.state_dict().items()}


def is_unchanged(engine: Any, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[name], t) for name, t in engine.state_dict().items())
