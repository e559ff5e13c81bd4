"""Models of which a part is trained, or used, and by what names an optimizer gets their parameters.

Every job compares with one process, in which a parameter without a gradient has none.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from tests.distributed import run_distributed
from tests.runtimes import contract
from tests.runtimes.alone import Alone, compare, largest_difference, of_this_rank
from tests.runtimes.contract import MICRO_BATCHES, Model, data, loss_fn, make, prepare, sgd
from tests.runtimes.test_contract import RUNTIMES, TOLERANCE, run, target

__all__ = ["target"]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FIND_UNUSED = {"data_parallel_options": {"find_unused_parameters": True}}


# --- frozen below what is trained ----------------------------------------------------------------
#: What is trained of four blocks in four stages.
TRAINED: dict[str, Any] = {
    "upper blocks": lambda name: name.startswith(("h.2.", "h.3.")),
    "weights of the last": lambda name: name.startswith("h.3.") and name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
    "all but the first stage": lambda name: name.startswith(("h.1.", "h.2.", "h.3.")),
    "all but the third": lambda name: not name.startswith("h.2."),
}


def train_above_frozen(rank: int, world: int, schedule: str, options: dict[str, Any]) -> Any:
    mesh = slapo.init_mesh(pp=world, device="cpu")
    found = {}
    for what, is_trained in TRAINED.items():
        torch.manual_seed(0)
        model = Model().train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad = is_trained(name)
        reference = Alone(model, loss_fn, sgd)
        sch = slapo.create_schedule(model, group=mesh["tp"])
        sch.trace_until("")
        for block in range(3):
            sch[f"h.{block}"].cut_pipeline_stage()
        given = {"loss_fn": loss_fn, "optimizer": sgd, "micro_batches": MICRO_BATCHES}
        given = {**given, "pipeline_schedule": schedule, **options}
        engine, _ = slapo.build(sch, target="torch", mesh=mesh, **given)
        found[what] = max(compare(engine, reference, data(3)).values())
    return found


@pytest.mark.parametrize("options", [{}, {"data_parallel": "fsdp"}], ids=str)
@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "interleaved_1f1b"])
def test_stages_above_frozen_ones_train(schedule: str, options: dict[str, Any]) -> None:
    """A backward that is split finds parameters by what a stage has received."""
    for found in run_distributed(train_above_frozen, 2, schedule, options, timeout=200):
        assert max(found.values()) < TOLERANCE, found


# --- replicas that use different parameters ------------------------------------------------------
class Experts(nn.Module):
    """The sign of the first number says which of two layers a micro-batch goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.first if x[0, 0] > 0 else self.second
        return self.last(torch.tanh(chosen(x)))


#: For each step, the signs of the micro-batches of both replicas.
SIGNS = [(1, 1, -1, -1), (-1, 1, 1, 1), (1, -1, 1, -1), (1, 1, 1, 1)]


def expert_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for signs in SIGNS:
        x, y = torch.randn(2, 8, 3, generator=generator)
        x[:, 0] = torch.tensor(signs).repeat_interleave(2) * x[:, 0].abs()
        found.append((x, y))
    return found


def use_experts(
    rank: int, world: int, setup: str | None, target: str, options: dict[str, Any]
) -> tuple[list[float], str]:
    """How far off each step is, and the error that ends them."""
    prepare(setup)
    mesh = slapo.init_mesh(dp=world, device="cpu")
    torch.manual_seed(0)
    model = Experts()
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    reference = Alone(model, F.mse_loss, optimizer, parts=2 * world)
    sch = slapo.create_schedule(model, group=mesh["tp"])
    given = {"loss_fn": F.mse_loss, "optimizer": optimizer, "micro_batches": 2, **options}
    if given["micro_batches"] == 1:
        reference.parts = world
    engine, _ = slapo.build(sch, target=target, mesh=mesh, **given)
    apart: list[float] = []
    for batch in expert_batches():
        reference.step(batch)
        try:
            engine.train_batch(iter([of_this_rank(mesh, batch)]))
        except slapo.SlapoError as error:
            return apart, str(error)
        apart.append(largest_difference(engine, reference.state()))
    return apart, ""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torch", FIND_UNUSED),
        ("torch", {"data_parallel": "fsdp"}),
        ("torch", {"dtype": torch.bfloat16}),
        ("torch", {"dtype": torch.bfloat16, "micro_batches": 1}),
        ("deepspeed", {"zero": 0}),
        ("megatron", {}),
    ],
    ids=str,
)
def test_replicas_may_use_different_parameters(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip(RUNTIMES[name][1])
    # Steps of 0.1, of gradients that were rounded to 8 bits on the way.
    close = 2e-3 if "dtype" in options else 1e-6
    for apart, error in run(use_experts, 2, name, options):
        assert not error
        assert max(apart) < close


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_refuses_replicas_that_use_different_parameters(zero: int) -> None:
    pytest.importorskip("deepspeed")
    for apart, error in run(use_experts, 2, "deepspeed", {"zero": zero}):
        assert not apart
        assert "replicas use different parameters: ['first.bias', 'first.weight'" in error
        assert f"ZeRO stage {zero}" in error


def use_early_only(rank: int, world: int) -> tuple[str, list[float]]:
    """A layer that the first micro-batch uses, and the one that DDP reduces does not."""
    mesh = slapo.init_mesh(dp=world, device="cpu")
    torch.manual_seed(0)
    model, apart = Experts(), []
    batch = expert_batches()[0]
    batch[0][:, 0] = torch.tensor([1, 1, -1, -1, 1, 1, -1, -1]) * batch[0][:, 0].abs()
    given = {"loss_fn": F.mse_loss, "optimizer": sgd, "micro_batches": 2}
    for options in ({}, FIND_UNUSED):
        reference = Alone(model, F.mse_loss, sgd, parts=2 * world)
        sch = slapo.create_schedule(copy.deepcopy(model), group=mesh["tp"])
        engine, _ = slapo.build(sch, target="torch", mesh=mesh, **given, **options)
        before = largest_difference(engine, reference.state())
        if not options:
            with pytest.raises(slapo.SlapoError) as caught:
                engine.train_batch(iter([of_this_rank(mesh, batch)]))
            apart.append(largest_difference(engine, reference.state()) - before)
            continue
        for _ in range(2):
            reference.step(batch)
            engine.train_batch(iter([of_this_rank(mesh, batch)]))
        apart.append(largest_difference(engine, reference.state()))
    return str(caught.value), apart


def test_ddp_tells_of_parameters_that_the_last_micro_batch_does_not_use() -> None:
    for error, apart in run_distributed(use_early_only, 2):
        assert "DDP misses gradients of parameters that the last micro-batch did not use" in error
        assert max(apart) < 1e-6


def decay_unused(rank: int, world: int, setup: str | None, target: str, options: Any) -> float:
    """By how much a parameter that no loss depends on has shrunk."""
    prepare(setup)
    mesh = slapo.init_mesh(device="cpu")
    torch.manual_seed(0)
    sch = slapo.create_schedule(contract.WithUnused(), group=mesh["tp"])
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    given = {"loss_fn": F.mse_loss, "optimizer": optimizer, **options}
    engine, _ = slapo.build(sch, target=target, mesh=mesh, **given)
    before = engine.state_dict()["unused.weight"].clone()
    engine.train_batch(iter([(torch.randn(2, 3), torch.randn(2, 3))]))
    return float((engine.state_dict()["unused.weight"] / before).mean())


@pytest.mark.parametrize(
    ("name", "options", "shrinks"),
    [
        ("torch", {}, False),
        ("torch", {"data_parallel": "fsdp"}, True),
        ("deepspeed", {}, True),
        ("megatron", {}, True),
    ],
    ids=str,
)
def test_what_is_unused_everywhere_has_no_gradient_or_one_of_zero(
    name: str, options: dict[str, Any], shrinks: bool
) -> None:
    """As the guide says: where gradients lie in common buffers, it is one of zero."""
    pytest.importorskip(RUNTIMES[name][1])
    (ratio,) = run(decay_unused, 1, name, options)
    assert ratio == pytest.approx(0.95 if shrinks else 1.0, abs=1e-6)


# --- names ---------------------------------------------------------------------------------------
def decay_by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """None for tables, which one process knows as ``emb.weight`` where the head is tied to it."""
    groups = [
        {"params": [p], "weight_decay": 0.0 if name.startswith("emb") else 0.1}
        for name, p in named_parameters
    ]
    assert {name for name, _ in named_parameters} <= dict(Model().named_parameters()).keys()
    return torch.optim.SGD(groups, lr=0.1)


def train_by_name(
    rank: int, world: int, setup: str | None, target: str, options: dict[str, Any]
) -> dict[str, float]:
    prepare(setup)
    stages = 4 if "pipeline_schedule" in options else 2
    engine, _ = make(target, (2, 1, 1), stages, optimizer=decay_by_name, **options)
    reference = contract.alone(optimizer=decay_by_name, named=True)
    return compare(engine, reference, data(4))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torch", {}),
        ("torch", {"pipeline_schedule": "interleaved_1f1b"}),
        ("torch", {"data_parallel": "fsdp"}),
        ("deepspeed", {}),
        ("deepspeed", {"zero": 1}),
        ("megatron", {}),
    ],
    ids=str,
)
def test_optimizers_get_the_names_of_the_model(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip(RUNTIMES[name][1])
    for found in run(train_by_name, 2, name, options):
        assert max(found.values()) < TOLERANCE, found
