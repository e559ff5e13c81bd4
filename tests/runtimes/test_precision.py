"""Half precision with float32 copies, and gradients that are not finite, on real processes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from tests.distributed import run_distributed
from tests.runtimes import contract
from tests.runtimes.contract import BATCH, MICRO_BATCHES, Model, data, make

RATE = 1e-5


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_in_half_alone(dtype: torch.dtype, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """By hand: parameters of half precision, the optimizer's and sums of gradients in float32."""
    torch.manual_seed(0)
    model = Model().train()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(dtype)
    optimizer = sgd(masters)
    losses = []
    for ids, targets in data(steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        total = 0.0
        parts = zip(ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)
        for part, wanted in parts:
            loss = contract.loss_fn(model(part), wanted).float() / MICRO_BATCHES
            loss.backward()
            total += loss.item()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert master.grad is not None
                assert parameter.grad is not None
                master.grad += parameter.grad.float()
                parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(total)
    names = [name for name, _ in model.named_parameters()]
    return losses, dict(zip(names, [m.detach().clone() for m in masters], strict=True))


def train_in_half(
    rank: int, world: int, target: str, layout: Any, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    engine, _ = make(target, layout, dtype=dtype, optimizer=sgd, **options)
    dp, size = layout[1] and engine.mesh.get_local_rank("dp"), layout[1]
    mine = slice(dp * BATCH // size, (dp + 1) * BATCH // size)
    batches = ((ids[mine], targets[mine]) for ids, targets in data(4))
    losses = [engine.train_batch(batches).item() for _ in range(4)]
    state = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float().clone()
        for name, p in engine.state_dict().items()
    }
    return losses, state


#: Sums of other orders, rounded to 8 or 11 bits on the way through the model.
CLOSE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "layout", "dtype", "options"),
    [
        ("torch", (1, 1, 1), torch.bfloat16, {}),
        ("torch", (1, 1, 1), torch.float16, {}),
        ("torch", (2, 1, 1), torch.bfloat16, {}),
        ("torch", (2, 1, 1), torch.float16, {}),
        ("torch", (1, 2, 1), torch.bfloat16, {}),
        ("torch", (1, 2, 1), torch.bfloat16, {"data_parallel": "fsdp"}),
        ("torch", (2, 1, 1), torch.bfloat16, {"data_parallel": "fsdp"}),
        ("torch", (2, 2, 1), torch.bfloat16, {"data_parallel": "fsdp"}),
        ("deepspeed", (2, 1, 1), torch.bfloat16, {}),
        ("deepspeed", (1, 2, 1), torch.bfloat16, {"zero": 2}),
    ],
    ids=str,
)
def test_half_precision_with_copies_in_float32(
    target: str, layout: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    if target == "deepspeed":
        pytest.importorskip("deepspeed")
    losses, state = train_in_half_alone(dtype, 4)
    world = math.prod(layout)
    for found, values in run_distributed(train_in_half, world, target, layout, dtype, options):
        assert found == pytest.approx(losses, rel=CLOSE[dtype])
        for name, value in values.items():
            if name in state and target == "torch":  # DeepSpeed shows the half precision
                torch.testing.assert_close(value, state[name], atol=CLOSE[dtype], rtol=0)


def small_steps(rank: int, world: int, target: str) -> float:
    """Share of the elements that 20 steps have moved, of a model that is loaded in bfloat16."""
    mesh = slapo.init_mesh(dp=world, device="cpu")
    torch.manual_seed(0)
    sch = slapo.create_schedule(Model().train().to(torch.bfloat16), group=mesh["tp"])
    engine, _ = slapo.build(
        sch,
        target=target,
        mesh=mesh,
        loss_fn=contract.loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0),
    )
    before = {name: _whole(p).clone() for name, p in engine.module.named_parameters()}
    batches = data(20)
    for _ in range(20):
        engine.train_batch(batches)
    moved = [(before[name] != _whole(p)).float() for name, p in engine.module.named_parameters()]
    return torch.cat([m.flatten() for m in moved]).mean().item()


def _whole(parameter: Any) -> Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


@pytest.mark.distributed
def test_small_steps_are_not_lost_in_a_model_of_half_precision() -> None:
    """In bfloat16 a step of 1e-5 moves no parameter of size 1e-2 and more."""
    (moved,) = run_distributed(small_steps, 1, "torch")
    assert moved > 0.95


# --- gradients that are not finite ---------------------------------------------------------------
def _build(**options: Any) -> Any:
    mesh = slapo.init_mesh(device="cpu")
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Linear(2, 2).train(), group=mesh["tp"])
    given = {"loss_fn": F.mse_loss, "optimizer": contract.sgd, **options}
    return slapo.build(sch, target="torch", mesh=mesh, **given)[0]


def _batch(value: float) -> Any:
    return iter([(torch.full((2, 2), value), torch.zeros(2, 2))])


def test_a_step_with_a_gradient_that_is_not_finite() -> None:
    engine = _build(nonfinite="skip")
    before = copy.deepcopy(engine.state_dict())
    engine.train_batch(_batch(math.inf))
    assert not engine.grad_norm.isfinite()
    assert all(torch.equal(before[n], t) for n, t in engine.state_dict().items())
    engine.train_batch(_batch(1.0))
    assert engine.grad_norm.isfinite()
    assert not torch.equal(before["weight"], engine.state_dict()["weight"])

    engine = _build(nonfinite="error")
    with pytest.raises(slapo.SlapoError, match=r"norm of the gradient is (nan|inf) at step 0"):
        engine.train_batch(_batch(math.nan))
    assert all(torch.equal(before[n], t) for n, t in engine.state_dict().items())
    engine.train_batch(_batch(1.0))  # nothing of the refused step is left
    fresh = _build()
    fresh.train_batch(_batch(1.0))
    assert torch.equal(engine.state_dict()["weight"], fresh.state_dict()["weight"])

    engine = _build()
    engine.train_batch(_batch(math.nan))
    assert engine.state_dict()["weight"].isnan().all()


def test_a_norm_that_is_measured_only() -> None:
    measured, free = _build(clip_grad_norm=math.inf), _build()
    for _ in range(2):
        measured.train_batch(_batch(3.0))
        free.train_batch(_batch(3.0))
    assert float(measured.grad_norm) > 1
    assert free.grad_norm is None
    assert torch.equal(measured.state_dict()["weight"], free.state_dict()["weight"])


def test_the_scale_of_the_loss_comes_down_until_gradients_fit() -> None:
    engine = _build(dtype=torch.float16, loss_fn=lambda out, target: 50 * F.mse_loss(out, target))
    before = _whole(engine.module.weight).clone()
    engine.train_batch(_batch(30.0))
    assert torch.equal(before, _whole(engine.module.weight))  # the step is left out
    for _ in range(20):
        engine.train_batch(_batch(30.0))
    assert not torch.equal(before, _whole(engine.module.weight))
    assert _whole(engine.module.weight).dtype == torch.float32
