"""What every runtime must do, as jobs for the processes of a test. See test_contract.py."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from tests.runtimes.alone import Alone, compare, largest_difference, of_this_rank

VOCABULARY, SIZE, LENGTH, BATCH, MICRO_BATCHES = 24, 8, 5, 8, 4


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


class WithUnused(nn.Module):
    """A model with parameters that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


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


def make(
    target: str,
    layout: tuple[int, int, int],
    stages: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """The engine of a model in a layout, with as many stages as pipeline ranks."""
    mesh = slapo.init_mesh(*layout, device="cpu")
    torch.manual_seed(seed)
    sch = slapo.create_schedule(Model().train(), group=mesh["tp"])
    if sch.world_size > 1:
        for block in sch.select("h.*"):
            block["up"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
            block["down"].shard("weight", 1).sync("fwd_post", "all_reduce")
    stages = layout[0] if stages is None else stages
    if stages > 1:
        sch.trace_until("")
        for stage in range(1, stages):
            sch[f"h.{stage * 4 // stages - 1}"].cut_pipeline_stage()
    base = {"loss_fn": loss_fn, "optimizer": sgd, "micro_batches": MICRO_BATCHES}
    return slapo.build(sch, target=target, mesh=mesh, **{**base, **options})


def alone(**options: Any) -> Alone:
    """The model that `make` schedules, in one process."""
    torch.manual_seed(0)
    return Alone(Model().train(), **{"loss_fn": loss_fn, "optimizer": sgd, **options})


def prepare(setup: str | None) -> None:
    """Make ready what a runtime needs in this process, named as ``module:function``."""
    if setup is not None:
        module, _, function = setup.partition(":")
        getattr(importlib.import_module(module), function)()


_for_life = contextlib.ExitStack()


def stand_in_for_cuda() -> None:
    """For runtimes that need CUDA: until the process ends, the CPU answers in its place."""
    from tests.runtimes.cuda_standin import cuda_on_cpu

    _for_life.enter_context(cuda_on_cpu())


# --- jobs ----------------------------------------------------------------------------------------
def learn(
    rank: int, world: int, setup: str | None, target: str, layout: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """Three steps and an evaluation."""
    prepare(setup)
    engine, optimizer = make(target, layout, **options)
    batches, forms, losses = data(), [], []
    train_batch = engine.train_batch

    def noted(data_iter: Iterator[Any]) -> Tensor:
        loss: Tensor = train_batch(data_iter)
        forms.append((loss.dim(), loss.dtype, loss.requires_grad))
        losses.append(loss.item())
        return loss

    engine.train_batch = noted
    reference = alone(clip=options.get("clip_grad_norm"), lr_scheduler=options.get("lr_scheduler"))
    found: dict[str, Any] = dict(compare(engine, reference, itertools.islice(batches, 3)))
    engine.train()
    batch = next(batches)
    evaluated = engine.eval_batch(iter([of_this_rank(engine.mesh, batch)]))
    forms.append((evaluated.dim(), evaluated.dtype, evaluated.requires_grad))
    return {
        "apart": {**found, "evaluated": abs(evaluated.item() - reference.evaluate(batch)[0])},
        "reported": [*losses, evaluated.item()],
        "form": forms,
        "training": all(m.training for m in engine.module.modules()),
        "names": list(engine.state_dict()),
        "optimizer": optimizer is engine.optimizer and optimizer is not None,
        "repr": repr(engine),
    }


def call(rank: int, world: int, setup: str | None, target: str) -> dict[str, float]:
    """Without a pipeline: call, backward and step instead of train_batch."""
    prepare(setup)
    engine, _ = make(target, (1, 1, 1), micro_batches=1)
    reference, apart = alone(), 0.0
    for ids, targets in data(3):
        loss = loss_fn(engine(ids), targets)
        engine.backward(loss)
        engine.step()
        apart = max(apart, abs(loss.item() - reference.step((ids, targets))))
    return {"losses": apart, "state": largest_difference(engine, reference.state())}


def _odd(engine: Any, rank: int) -> None:
    ids, targets = next(data())
    engine.train_batch(iter([(ids[:7], targets[:7])]))


def _no_pair(engine: Any, rank: int) -> None:
    engine.train_batch(iter([{"ids": next(data())[0]}]))


def _no_iterator(engine: Any, rank: int) -> None:
    engine.train_batch([next(data())])


def _ended(engine: Any, rank: int) -> None:
    engine.train_batch(iter([]))


def _ended_on_one(engine: Any, rank: int) -> None:
    engine.train_batch(iter([next(data())] if rank else []))


def _other_batch(engine: Any, rank: int) -> None:
    engine.train_batch(data(seed=rank))


def _unknown_argument(engine: Any, rank: int) -> None:
    ids, targets = next(data())
    engine.train_batch(iter([({"tokens": ids}, targets)]))


def _called(engine: Any, rank: int) -> None:
    engine(next(data())[0])


_OTHER = "the batch of data-parallel coordinate 0 differs between ranks: 'int64(8, 5), int64(8, 5)"

_TOKENS = "unexpected keyword argument 'tokens'; it takes ['ids']"
#: Mistake with a pipeline of two ranks -> part of the message on each of them.
MISTAKES: dict[Callable[[Any, int], None], tuple[str, str]] = {
    _odd: ("not divisible by micro_batches=4", "not divisible by micro_batches=4"),
    _no_pair: ("make it the pair (inputs, targets)", "make it the pair (inputs, targets)"),
    _no_iterator: ("is a list and no iterator", "is a list and no iterator"),
    _ended: ("data_iter has no further batch", "data_iter has no further batch"),
    _ended_on_one: ("data_iter has no further batch", "failed on rank 0"),
    _other_batch: (_OTHER, _OTHER),
    _unknown_argument: (_TOKENS, _TOKENS),
    _called: ("use train_batch or eval_batch", "use train_batch or eval_batch"),
}


def make_mistakes(rank: int, world: int, setup: str | None, target: str) -> dict[str, str]:
    """Each mistake's error; the engine trains on after all of them, as if nothing had been."""
    prepare(setup)
    engine, _ = make(target, (2, 1, 1))
    found = {}
    for mistake in MISTAKES:
        try:
            mistake(engine, rank)
            found[mistake.__name__] = "no error"
        except Exception as error:
            found[mistake.__name__] = f"{type(error).__name__}: {error}"
    found["loss after all"] = str(engine.train_batch(data()).item())
    return found


#: What may be wrong in a build with two ranks -> arguments, and part of the message on each rank.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no loss": ({"loss_fn": None}, "a pipeline needs a loss"),
    "too few stages": ({"stages": 1}, "cut in 1 stages, and pp=2"),
    "too many stages": ({"stages": 4}, "cut in 4 stages, and pp=2"),
    "an optimizer that exists": (
        {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)},
        "build changes which parameters there are",
    ),
    "no micro-batches": ({"micro_batches": 0}, "micro_batches is 0"),
    "an unknown option": ({"colour": "red"}, "colour"),
    "no function": ({"loss_fn": 3}, "loss_fn is 3; pass a function of (output, target)"),
}


def be_refused(rank: int, world: int, setup: str | None, target: str) -> dict[str, str]:
    """Each refusal's error, and what a build gives whose mistake is on one rank only."""
    prepare(setup)
    found = {}
    for name, (options, _) in REFUSED.items():
        try:
            make(target, (2, 1, 1), **options)
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    for name, options in {
        "no loss on one": {"loss_fn": None} if rank == 1 else {},
        "other cuts": {"stages": 2 + rank},
    }.items():
        try:
            make(target, (2, 1, 1), **options)
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
