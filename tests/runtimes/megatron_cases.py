"""What the tests of target "megatron" run in their processes, and the same in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import slapo
from examples.parallel_models import FAMILIES, schedule
from slapo.pipeline import generate_pipeline_partition
from tests.runtimes import layouts
from tests.runtimes.layouts import MICRO_BATCHES, STEPS, batches, largest_difference, model_of, rows

Layout = tuple[int, int, int]


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


halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


@dataclass(frozen=True)
class Case:
    """One way to train, and its like in one process.

    Parameters
    ----------
    options
        For build, besides the usual; callables called ``make_...`` make them late, in the process.
    clip, optimizer, scheduled
        For the run in one process.
    """

    family: str = "gpt2"
    options: dict[str, Any] = field(default_factory=dict)
    make_optimizer: Callable[[], Any] | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = layouts.sgd
    clip: float | None = None
    scheduled: bool = False


CASES = {
    "clipped": Case(options={"clip_grad_norm": 0.1}, clip=0.1),
    "clipped-t5": Case("t5", {"clip_grad_norm": 0.1}, clip=0.1),
    "megatron-sgd": Case(
        make_optimizer=partial(megatron_sgd, clip_grad=0.1),
        options={"lr_scheduler": halving},
        clip=0.1,
        scheduled=True,
    ),
    "scheduled": Case(options={"lr_scheduler": halving}, scheduled=True),
    "overlapped": Case(
        "llama", {"overlap_grad_reduce": True, "data_parallel_options": {"bucket_size": 2000}}
    ),
    "distributed": Case(
        options={"distributed_optimizer": True, "clip_grad_norm": 0.1},
        make_optimizer=megatron_adam,
        optimizer=adam,
        clip=0.1,
    ),
    "distributed-overlapped": Case(
        "t5",
        {"overlap_grad_reduce": True, "data_parallel_options": {"bucket_size": 2000}},
        make_optimizer=partial(megatron_adam, use_distributed_optimizer=True, clip_grad=0.0),
        optimizer=adam,
    ),
}


@dataclass
class Alone:
    """What a run in one process came to."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def train_alone(case: Case) -> Alone:
    family, model = FAMILIES[case.family], model_of(case.family)
    optimizer = case.optimizer(list(model.parameters()))
    scheduler = halving(optimizer) if case.scheduled else None
    found = Alone([], [], {})
    for inputs, targets in batches(family):
        loss = family.loss(model(**inputs), targets)
        loss.backward()
        limit = float("inf") if case.clip is None else case.clip
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    found.state = copy.deepcopy(model.state_dict())
    return found


def start(
    name: str, layout: Layout, model: nn.Module | None = None, **options: Any
) -> tuple[Any, Any, int]:
    """Engine and optimizer of a family, and this rank's data-parallel coordinate."""
    family = FAMILIES[name]
    mesh = slapo.init_mesh(*layout, device="cpu")
    sch = slapo.create_schedule(model or model_of(name), group=mesh["tp"])
    schedule(sch, family, layout[0])
    given = {
        "loss_fn": family.token_loss,
        "optimizer": layouts.sgd,
        "micro_batches": MICRO_BATCHES,
        **options,
    }
    engine, optimizer = slapo.build(sch, target="megatron", mesh=mesh, **given)
    return engine, optimizer, mesh.get_local_rank("dp")


def train_case(case: Case, layout: Layout, alone: Alone) -> dict[str, float]:
    """Largest differences to the run in one process."""
    options = dict(case.options)
    if case.make_optimizer is not None:
        options["optimizer"] = case.make_optimizer()
    engine, optimizer, dp = start(case.family, layout, **options)
    assert optimizer is engine.optimizer
    data = (rows(batch, dp, layout[1]) for batch in batches(FAMILIES[case.family]))
    found = {"loss": 0.0, "norm": 0.0}
    for step in range(STEPS):
        loss = engine.train_batch(data).item()
        found["loss"] = max(found["loss"], abs(loss - alone.losses[step]))
        if case.clip is not None:
            apart = abs(engine.grad_norm.item() / alone.norms[step] - 1)
            found["norm"] = max(found["norm"], apart)
    found["parameters"] = largest_difference(engine, alone.state)
    return found


# --- by hand -------------------------------------------------------------------------------------
def drive(layout: Layout, alone: Alone, overlap: bool) -> dict[str, float]:
    """Call, backward and step; every batch goes back in two halves."""
    engine, _, dp = start("gpt2", layout, overlap_grad_reduce=overlap)
    family, apart = FAMILIES["gpt2"], 0.0
    for step, batch in enumerate(batches(family)):
        inputs, targets = rows(batch, dp, layout[1])
        total = torch.zeros(())
        size = len(targets) // 2
        for part in (slice(0, size), slice(size, None)):
            output = engine(**{key: tensor[part] for key, tensor in inputs.items()})
            loss = family.loss(output, targets[part]) / 2
            engine.backward(loss)
            total += loss.detach()
        engine.step()
        torch.distributed.all_reduce(total)
        apart = max(
            apart, abs(total.item() / torch.distributed.get_world_size() - alone.losses[step])
        )
    return {"loss": apart, "parameters": largest_difference(engine, alone.state)}


# --- half precision ------------------------------------------------------------------------------
def half_alone(layout: Layout) -> tuple[list[float], dict[str, Tensor]]:
    """Parameters of bfloat16, with gradients and an optimizer of float32.

    The model is traced: it always masks attention, and others only where they must.
    """
    mesh = slapo.init_mesh(*layout, device="cpu")
    sch = slapo.create_schedule(model_of("llama").bfloat16(), group=mesh["tp"])
    schedule(sch, FAMILIES["llama"], stages=2)
    model = generate_pipeline_partition(sch).mod
    parameters = list(model.parameters())
    mains = [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = layouts.sgd(mains)
    losses = []
    for batch in batches(FAMILIES["llama"]):
        for main in mains:
            main.grad = torch.zeros_like(main)
        losses.append(accumulate(model, batch, list(zip(mains, parameters, strict=True))))
        optimizer.step()
        for main, parameter in zip(mains, parameters, strict=True):
            parameter.data.copy_(main.data)
    return losses, copy.deepcopy(model.state_dict())


def accumulate(
    model: nn.Module, batch: Any, pairs: list[tuple[nn.Parameter, nn.Parameter]]
) -> float:
    """Add gradients of all micro-batches up in float32; the mean of their losses."""
    family, (inputs, targets), total = FAMILIES["llama"], batch, 0.0
    for part in torch.arange(len(targets)).chunk(MICRO_BATCHES):
        output = model(**{name: tensor[part] for name, tensor in inputs.items()})
        loss = family.loss(output, targets[part]) / MICRO_BATCHES
        loss.backward()
        total += loss.item()
        for main, parameter in pairs:
            if main.grad is not None and parameter.grad is not None:
                main.grad += parameter.grad
                parameter.grad = None
    return total


def half(layout: Layout) -> dict[str, Any]:
    """bfloat16 in this layout against one process."""
    losses, state = half_alone(layout)
    model = model_of("llama").bfloat16()  # before it is traced
    # The mean of micro-batches, so that roundings are the same.
    loss_fn = FAMILIES["llama"].loss
    engine, _, dp = start("llama", layout, model, dtype=torch.bfloat16, loss_fn=loss_fn)
    data = (rows(batch, dp, layout[1]) for batch in batches(FAMILIES["llama"]))
    found = [engine.train_batch(data).item() for _ in range(STEPS)]
    return {
        "loss": max(abs(a - b) for a, b in zip(found, losses, strict=True)),
        "parameters": largest_difference(engine, state),
        "dtypes": {parameter.dtype for parameter in engine.parameters()},
        "kind": type(engine.optimizer).__name__,
    }


def mixed(layout: Layout) -> list[float]:
    """Losses in bfloat16 with the distributed optimizer and overlap."""
    config = megatron_adam(bf16=True, use_distributed_optimizer=True, clip_grad=0.1)
    given = {"optimizer": config, "overlap_grad_reduce": True}
    engine, _, dp = start("gpt2", layout, model_of("gpt2").bfloat16(), **given)
    data = (rows(batch, dp, layout[1]) for batch in batches(FAMILIES["gpt2"]))
    return [engine.train_batch(data).item() for _ in range(STEPS)]


def scaled(layout: Layout) -> dict[str, Any]:
    """float16, beginning with so large a scale that gradients overflow."""
    config = megatron_sgd(fp16=True, initial_loss_scale=2.0**18, hysteresis=1)
    given = {"optimizer": config, "lr_scheduler": halving}
    engine, optimizer, dp = start("gpt2", layout, model_of("gpt2").half(), **given)
    batch = rows(batches(FAMILIES["gpt2"])[0], dp, layout[1])
    losses, rates = [], []
    for _ in range(12):
        losses.append(engine.train_batch(iter([batch])).item())
        rates.append(optimizer.param_groups[0]["lr"])
    return {"losses": losses, "rates": rates, "scale": optimizer.get_loss_scale().item()}


# --- evaluation, forms of batches ----------------------------------------------------------------
def evaluate(layout: Layout) -> dict[str, Any]:
    """Loss in eval mode, of batches of two forms; nothing changes by it."""
    engine, _, dp = start("bert", layout, model_of("bert", dropout=0.5))
    family, whole = FAMILIES["bert"], model_of("bert", dropout=0.5).eval()
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    apart = 0.0
    for length in (8, 5, 8):
        inputs, targets = batches(family)[0]
        batch = {key: t[:, :length] for key, t in inputs.items()}, targets[:, :length]
        expected = family.loss(whole(**batch[0]), batch[1]).item()
        loss = engine.eval_batch(iter([rows(batch, dp, layout[1])])).item()
        apart = max(apart, abs(loss - expected))
    after = engine.state_dict()
    return {
        "loss": apart,
        "modes": {module.training for module in engine.module.modules()},
        "same": all(torch.equal(before[name], after[name]) for name in before),
        "forms": len(engine._boundaries),
    }


def repeats(layout: Layout) -> bool:
    """Dropout: two runs with one seed are equal to the bit."""
    runs = [layouts.train_laid_out("llama", "megatron", layout, dropout=0.1) for _ in range(2)]
    states = [engine.state_dict() for _, engine in runs]
    same = all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    return same and runs[0][0] == runs[1][0]


# --- stages with nothing to train ----------------------------------------------------------------
class Row(nn.Module):
    """Two stages, of which one has all that is trained; no gradient crosses if that is the last."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3).requires_grad_(not last), nn.Tanh()
        self.c = nn.Linear(3, 3) if last else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def idle_stages(layout: Layout) -> float:
    """Largest difference of losses to one process, for all kinds of optimizers."""
    mesh, apart = slapo.init_mesh(*layout, device="cpu"), 0.0
    kinds = [
        (layouts.sgd, layouts.sgd),
        (megatron_sgd(clip_grad=0.0), layouts.sgd),
        (megatron_adam(clip_grad=0.0, use_distributed_optimizer=True), adam),
    ]
    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.ones(4, 3)
    for (kind, reference), last in itertools.product(kinds, (False, True)):
        alone, sch = Row(last), slapo.create_schedule(Row(last), group=mesh["tp"])
        optimizer = reference([p for p in alone.parameters() if p.requires_grad])
        sch.trace_until([""])
        sch["b"].cut_pipeline_stage()
        given = {"loss_fn": square, "optimizer": kind, "lr_scheduler": halving, "micro_batches": 2}
        engine, _ = slapo.build(sch, target="megatron", mesh=mesh, **given)
        for _ in range(2):  # the scheduler changes nothing before the third
            loss = square(alone(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            apart = max(apart, abs(engine.train_batch(iter([(x, y)])).item() - loss.item()))
    return apart
