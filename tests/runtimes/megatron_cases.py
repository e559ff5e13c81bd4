"""What the tests of target "megatron" run in their processes, and the same in one process."""

from __future__ import annotations

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
from tests.runtimes.alone import Alone, compare, cut, largest_difference, of_this_rank
from tests.runtimes.layouts import MICRO_BATCHES, batches, model_of

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


def train_case(case: Case, layout: Layout) -> dict[str, float]:
    """Largest differences to the run in one process."""
    options = dict(case.options)
    if case.make_optimizer is not None:
        options["optimizer"] = case.make_optimizer()
    engine = layouts.build(case.family, "megatron", layout, **options)
    reference = layouts.alone(
        case.family,
        optimizer=case.optimizer,
        clip=case.clip,
        lr_scheduler=halving if case.scheduled else None,
    )
    found = compare(engine, reference, batches(FAMILIES[case.family]))
    assert case.clip is None or min(reference.norms) > case.clip, "each step is clipped"
    return found


# --- by hand -------------------------------------------------------------------------------------
def drive(layout: Layout, overlap: bool) -> dict[str, float]:
    """Call, backward and step; every batch goes back in two halves."""
    engine = layouts.build("gpt2", "megatron", layout, overlap_grad_reduce=overlap)
    family, reference, apart = FAMILIES["gpt2"], layouts.alone("gpt2"), 0.0
    for batch in batches(family):
        total = torch.zeros(())
        for inputs, targets in cut(of_this_rank(engine.mesh, batch), 2):
            loss = family.loss(engine(**inputs), targets) / 2
            engine.backward(loss)
            total += loss.detach()
        engine.step()
        torch.distributed.all_reduce(total)
        mean = total.item() / torch.distributed.get_world_size()
        apart = max(apart, abs(mean - reference.step(batch)))
    return {"losses": apart, "state": largest_difference(engine, reference.state())}


# --- half precision ------------------------------------------------------------------------------
def half(layout: Layout) -> dict[str, Any]:
    """bfloat16 in this layout against one process.

    There the model is traced, too: it always masks attention, and others only where they must.
    """
    mesh = slapo.init_mesh(*layout, device="cpu")
    sch = slapo.create_schedule(model_of("llama").bfloat16(), group=mesh["tp"])
    schedule(sch, FAMILIES["llama"], stages=2)
    traced = generate_pipeline_partition(sch).mod
    # The mean of micro-batches, so that roundings are the same.
    loss_fn = FAMILIES["llama"].loss
    reference = Alone(traced, loss_fn, layouts.sgd, parts=MICRO_BATCHES)
    given = {"dtype": torch.bfloat16, "loss_fn": loss_fn}
    engine = layouts.build("llama", "megatron", layout, model_of("llama").bfloat16(), **given)
    return {
        **compare(engine, reference, batches(FAMILIES["llama"])),
        "dtypes": {parameter.dtype for parameter in engine.parameters()},
        "kind": type(engine.optimizer).__name__,
    }


def mixed(layout: Layout) -> float:
    """Losses in bfloat16 with the distributed optimizer and overlap, against float32."""
    config = megatron_adam(bf16=True, use_distributed_optimizer=True, clip_grad=0.1)
    given = {"optimizer": config, "overlap_grad_reduce": True}
    engine = layouts.build("gpt2", "megatron", layout, model_of("gpt2").bfloat16(), **given)
    reference = layouts.alone("gpt2", optimizer=adam, clip=0.1)
    return compare(engine, reference, batches(FAMILIES["gpt2"]))["losses"]


def scaled(layout: Layout) -> dict[str, Any]:
    """float16, beginning with so large a scale that gradients overflow."""
    config = megatron_sgd(fp16=True, initial_loss_scale=2.0**18, hysteresis=1)
    given = {"optimizer": config, "lr_scheduler": halving}
    engine = layouts.build("gpt2", "megatron", layout, model_of("gpt2").half(), **given)
    batch = of_this_rank(engine.mesh, batches(FAMILIES["gpt2"])[0])
    losses, rates = [], []
    for _ in range(12):
        losses.append(engine.train_batch(iter([batch])).item())
        rates.append(engine.optimizer.param_groups[0]["lr"])
    return {"losses": losses, "rates": rates, "scale": engine.optimizer.get_loss_scale().item()}


# --- evaluation, forms of batches ----------------------------------------------------------------
def evaluate(layout: Layout) -> dict[str, Any]:
    """Loss in eval mode, of batches of two forms; nothing changes by it."""
    engine = layouts.build("bert", "megatron", layout, model_of("bert", dropout=0.5))
    family, reference = FAMILIES["bert"], layouts.alone("bert")
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    apart = 0.0
    for length in (8, 5, 8):
        inputs, targets = batches(family)[0]
        batch = {key: t[:, :length] for key, t in inputs.items()}, targets[:, :length]
        loss = engine.eval_batch(iter([of_this_rank(engine.mesh, batch)])).item()
        apart = max(apart, abs(loss - reference.evaluate(batch)[0]))
    after = engine.state_dict()
    return {
        "loss": apart,
        "modes": {module.training for module in engine.module.modules()},
        "same": all(torch.equal(before[name], after[name]) for name in before),
        "forms": len(engine._boundaries._known),
    }


def repeats(layout: Layout) -> bool:
    """Dropout: two runs with one seed are equal to the bit."""
    return layouts.repeats("llama", "megatron", layout)


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
        alone = Alone(Row(last), square, reference)
        sch = slapo.create_schedule(Row(last), group=mesh["tp"])
        sch.trace_until([""])
        sch["b"].cut_pipeline_stage()
        given = {"loss_fn": square, "optimizer": kind, "lr_scheduler": halving, "micro_batches": 2}
        engine, _ = slapo.build(sch, target="megatron", mesh=mesh, **given)
        # The scheduler changes nothing before the third.
        apart = max(apart, *compare(engine, alone, [(x, y)] * 2).values())
    return apart
