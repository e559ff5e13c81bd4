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
from tests.runtimes.alone import compare, of_this_rank, whole
from tests.runtimes.contract import MICRO_BATCHES, Model, data, make, prepare
from tests.runtimes.test_contract import RUNTIMES, TOLERANCE, run, target

__all__ = ["target"]

RATE = 1e-5


def train_in_half(
    rank: int, world: int, target: str, layout: Any, dtype: torch.dtype, options: dict[str, Any]
) -> dict[str, float]:
    """Against parameters of half precision, with an optimizer and sums of gradients in float32."""
    engine, _ = make(target, layout, dtype=dtype, **options)
    parts = MICRO_BATCHES * layout[1]
    return compare(engine, contract.alone(dtype=dtype, parts=parts), data(4))


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
    for found in run_distributed(
        train_in_half, math.prod(layout), target, layout, dtype, options, timeout=200
    ):
        # Losses are of size 3.
        assert found["losses"] < 3 * CLOSE[dtype]
        assert found["state"] < CLOSE[dtype]


def small_steps(rank: int, world: int, setup: str | None, target: str) -> float:
    """Share of the elements that 20 steps have moved, of a model that is loaded in bfloat16."""
    prepare(setup)
    mesh = slapo.init_mesh(dp=world, device="cpu")
    torch.manual_seed(0)
    sch = slapo.create_schedule(Model().train().to(torch.bfloat16), group=mesh["tp"])
    moved_by: list[Tensor] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
        step = made.step

        def noted(*args: Any) -> Any:
            before = [whole(p).clone() for group in made.param_groups for p in group["params"]]
            result = step(*args)
            after = [whole(p) for group in made.param_groups for p in group["params"]]
            moves = zip(before, after, strict=True)
            moved_by.append(torch.cat([(b != a).float().flatten() for b, a in moves]))
            return result

        made.step = noted  # type: ignore[method-assign]
        return made

    engine, _ = slapo.build(
        sch, target=target, mesh=mesh, loss_fn=contract.loss_fn, optimizer=optimizer
    )
    batches = data(20)
    for _ in range(20):
        engine.train_batch(batches)
    assert len(moved_by) == 20
    return torch.stack(moved_by).mean().item()


@pytest.mark.distributed
@pytest.mark.slow
def test_small_steps_are_not_lost_in_a_model_of_half_precision(target: str) -> None:
    """In bfloat16 a step of 1e-5 moves no parameter of size 1e-2 and more."""
    (moved,) = run(small_steps, 1, target)
    assert moved > 0.95


def made_whole(rank: int, world: int, setup: str | None, target: str) -> dict[str, Any]:
    """A model that was loaded in half precision, and is to compute in float32."""
    prepare(setup)
    mesh = slapo.init_mesh(device="cpu")
    torch.manual_seed(0)
    model = Model().train().to(torch.bfloat16)
    reference = contract.Alone(copy.deepcopy(model).float(), contract.loss_fn, contract.sgd)
    given = {"loss_fn": contract.loss_fn, "optimizer": contract.sgd, "dtype": torch.float32}
    sch = slapo.create_schedule(model, group=mesh["tp"])
    engine, _ = slapo.build(sch, target=target, mesh=mesh, **given)
    dtypes = {p.dtype for p in engine.parameters()}
    return {"dtypes": dtypes, **compare(engine, reference, data(3))}


@pytest.mark.distributed
@pytest.mark.slow
def test_a_model_of_half_precision_computes_in_float32_if_asked(target: str) -> None:
    (found,) = run(made_whole, 1, target)
    assert found["dtypes"] == {torch.float32}
    assert max(found["losses"], found["state"]) < TOLERANCE


# --- gradients that are not finite ---------------------------------------------------------------
def _build(**options: Any) -> Any:
    mesh = slapo.init_mesh(device="cpu")
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Linear(2, 2).train(), group=mesh["tp"])
    given = {"loss_fn": F.mse_loss, "optimizer": contract.sgd, **options}
    return slapo.build(sch, target="torch", mesh=mesh, **given)[0]


def _batch(value: float) -> Any:
    return iter([(torch.full((2, 2), value), torch.zeros(2, 2))])


def steps_not_finite(
    rank: int, world: int, setup: str | None, target: str, options: dict[str, Any]
) -> None:
    """Left out, or an error; nothing is left of them."""
    prepare(setup)
    ids, targets = next(data())
    spoilt = [False]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return contract.loss_fn(output, target) * (math.inf if spoilt[0] else 1)

    def step(engine: Any, is_spoilt: bool = False) -> None:
        spoilt[0] = is_spoilt
        engine.train_batch(iter([of_this_rank(engine.mesh, (ids, targets))]))

    given = {"loss_fn": loss_fn, "lr_scheduler": contract.halving, **options}
    layout = (2, 1, 1) if world == 2 else (1, 1, 1)
    fresh, _ = make(target, layout, **given)
    step(fresh)

    engine, _ = make(target, layout, nonfinite="skip", **given)
    before = copy.deepcopy(engine.state_dict())
    step(engine, is_spoilt=True)
    assert all(torch.equal(before[n], t) for n, t in engine.state_dict().items())
    step(engine)
    assert all(torch.equal(fresh.state_dict()[n], t) for n, t in engine.state_dict().items())
    assert engine.scheduler.get_last_lr() == fresh.scheduler.get_last_lr()

    engine, _ = make(target, layout, nonfinite="error", **given)
    with pytest.raises(slapo.SlapoError, match=r"gradient is (nan|inf|not finite) at step 0"):
        step(engine, is_spoilt=True)
    assert engine.step_count == 0
    step(engine)
    assert all(torch.equal(fresh.state_dict()[n], t) for n, t in engine.state_dict().items())


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "options"),
    [
        *[("torch", 1, {}), ("torch", 2, {}), ("torch", 2, {"data_parallel": "fsdp"})],
        *[("torch", 1, {"dtype": torch.bfloat16})],
        *[("deepspeed", 1, {"zero": zero}) for zero in range(4)],
        *[("deepspeed", 2, {"zero": zero}) for zero in range(2)],
        *[("deepspeed", 1, {"dtype": torch.bfloat16, "zero": zero}) for zero in range(1, 4)],
        *[("deepspeed", 2, {"dtype": torch.bfloat16})],
        *[("megatron", 1, {}), ("megatron", 2, {}), ("megatron", 1, {"dtype": torch.bfloat16})],
    ],
    ids=str,
)
def test_a_step_with_a_gradient_that_is_not_finite(
    name: str, world: int, options: dict[str, Any]
) -> None:
    pytest.importorskip(RUNTIMES[name][1])
    run(steps_not_finite, world, name, options)


def test_nobody_looks_unless_asked_to() -> None:
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
    before = whole(engine.module.weight).clone()
    engine.train_batch(_batch(30.0))
    assert torch.equal(before, whole(engine.module.weight))  # the step is left out
    for _ in range(20):
        engine.train_batch(_batch(30.0))
    assert not torch.equal(before, whole(engine.module.weight))
    assert whole(engine.module.weight).dtype == torch.float32
