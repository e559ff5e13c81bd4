"""Half precision with float32 copies, and gradients that are not finite, on real processes."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo
from tests.runtimes import contract
from tests.runtimes.alone import Alone, compare, of_this_rank, whole
from tests.runtimes.contract import (
    MICRO_BATCHES,
    TOLERANCE,
    alone,
    build,
    copied,
    data,
    halving,
    is_unchanged,
    make,
    seeded,
)
from tests.runtimes.ranks import on_ranks, on_ranks_by_rows

#: Sums of other orders, rounded to 8 or 11 bits on the way through the model.
CLOSE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.slow
@on_ranks_by_rows(
    [
        ("torch", (1, 1, 1), torch.bfloat16, {}),
        ("torch", (1, 1, 1), torch.float16, {}),
        ("torch", (2, 1, 1), torch.bfloat16, {}),
        ("torch", (2, 1, 1), torch.float16, {}),
        ("torch", (1, 2, 1), torch.bfloat16, {}),
        ("torch", (1, 2, 1), torch.bfloat16, {"data_parallel": "fsdp"}),
        ("torch", (2, 1, 1), torch.bfloat16, {"data_parallel": "fsdp"}),
        ("torch", (2, 2, 1), torch.bfloat16, {"data_parallel": "fsdp"}),
        ("deepspeed", (2, 1, 1), torch.bfloat16, {"clip_grad_norm": 0.1}),
        ("deepspeed", (1, 2, 1), torch.bfloat16, {"clip_grad_norm": 0.1}),
        ("deepspeed", (1, 2, 1), torch.bfloat16, {"zero": 2}),
        # Where the second tensor-parallel rank of the last stage has no gradient to count.
        ("deepspeed", (2, 1, 2), torch.bfloat16, {"cuts": [3], "clip_grad_norm": 0.1}),
    ]
)
def test_half_precision_with_copies_in_float32(
    target: str, layout: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Against parameters of half precision, with an optimizer and sums of gradients in float32."""
    engine = make(target, layout, dtype=dtype, **options)
    clip = options.get("clip_grad_norm")
    reference = alone(dtype=dtype, parts=MICRO_BATCHES * layout[1], clip=clip)
    found = compare(engine, reference, data(4))
    assert reference.losses != pytest.approx(alone(clip=clip).train(data(4)).losses, abs=1e-6)
    assert target != "torch" or next(engine.parameters()).dtype is torch.float32
    assert found["losses"] < 3 * CLOSE[dtype]  # of size 3
    assert found["state"] < CLOSE[dtype]
    assert found["norms"] < 3 * CLOSE[dtype]


@on_ranks(2)
def test_scripts_may_compute_in_float64() -> None:
    torch.set_default_dtype(torch.float64)  # until this process ends
    found = compare(make("torch", (1, 1, 2)), alone(), data(4))
    assert max(found["losses"], found["state"]) < 1e-12


@pytest.mark.slow
@on_ranks(1)
def test_small_steps_are_not_lost_in_a_model_of_half_precision(target: str) -> None:
    """In bfloat16 a step of 1e-5 moves no parameter of size 1e-2 and more."""
    moved: list[Tensor] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0)
        step = made.step

        def noted(*args: Any) -> Any:
            before = [whole(p).clone() for group in made.param_groups for p in group["params"]]
            result = step(*args)
            after = [whole(p) for group in made.param_groups for p in group["params"]]
            moves = zip(before, after, strict=True)
            moved.append(torch.cat([(b != a).float().flatten() for b, a in moves]))
            return result

        made.step = noted  # type: ignore[method-assign]
        return made

    model = seeded().to(torch.bfloat16)
    engine = build(model, target, loss_fn=contract.loss_fn, optimizer=optimizer)
    batches = data(20)
    for _ in range(20):
        engine.train_batch(batches)
    assert len(moved) == 20
    assert torch.stack(moved).mean().item() > 0.95


@pytest.mark.slow
@on_ranks(1)
def test_a_model_of_half_precision_computes_in_float32_if_asked(target: str) -> None:
    model = seeded().to(torch.bfloat16)
    reference = Alone(copy.deepcopy(model).float(), contract.loss_fn, contract.sgd)
    engine = build(model, target, loss_fn=contract.loss_fn, dtype=torch.float32)
    assert {p.dtype for p in engine.parameters()} == {torch.float32}
    found = compare(engine, reference, data(3))
    assert max(found["losses"], found["state"]) < TOLERANCE


# --- gradients that are not finite ---------------------------------------------------------------
def _batch(value: float) -> Any:
    return iter([(torch.full((2, 2), value), torch.zeros(2, 2))])


@pytest.mark.slow
@on_ranks_by_rows(
    [
        ("torch", (1, 1, 1), {}),
        ("torch", (2, 1, 1), {}),
        ("torch", (2, 1, 1), {"data_parallel": "fsdp"}),
        ("torch", (1, 1, 1), {"dtype": torch.bfloat16}),
        *[("deepspeed", (1, 1, 1), {"zero": zero}) for zero in range(4)],
        *[("deepspeed", (2, 1, 1), {"zero": zero}) for zero in range(2)],
        *[("deepspeed", (1, 1, 1), {"dtype": torch.bfloat16, "zero": zero}) for zero in (1, 2, 3)],
        ("deepspeed", (2, 1, 1), {"dtype": torch.bfloat16}),
        ("megatron", (1, 1, 1), {}),
        ("megatron", (2, 1, 1), {}),
        ("megatron", (1, 1, 1), {"dtype": torch.bfloat16}),
    ]
)
def test_a_step_with_a_gradient_that_is_not_finite(
    target: str, layout: Any, options: dict[str, Any]
) -> None:
    """Left out, or an error; nothing is left of them."""
    batch, spoilt = next(data()), [False]

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        return contract.loss_fn(output, targets) * (math.inf if spoilt[0] else 1)

    def step(engine: Any, is_spoilt: bool = False) -> None:
        spoilt[0] = is_spoilt
        engine.train_batch(iter([of_this_rank(engine.mesh, batch)]))

    given = {"loss_fn": loss_fn, "lr_scheduler": halving, **options}
    fresh = make(target, layout, **given)
    step(fresh)

    engine = make(target, layout, nonfinite="skip", **given)
    before = copied(engine)
    step(engine, is_spoilt=True)
    assert is_unchanged(engine, before)
    assert not engine.was_step_applied
    step(engine)
    assert engine.was_step_applied
    assert is_unchanged(engine, fresh.state_dict())
    assert engine.scheduler.get_last_lr() == fresh.scheduler.get_last_lr()

    engine = make(target, layout, nonfinite="error", **given)
    with pytest.raises(slapo.SlapoError, match=r"gradient norm is (nan|inf|not finite) at step 0"):
        step(engine, is_spoilt=True)
    assert engine.step_count == 0
    step(engine)
    assert is_unchanged(engine, fresh.state_dict())


def test_nobody_looks_unless_asked_to() -> None:
    engine = build(nn.Linear(2, 2))
    engine.train_batch(_batch(math.nan))
    assert engine.state_dict()["weight"].isnan().all()


def test_the_scale_of_the_loss_comes_down_until_gradients_fit() -> None:
    torch.manual_seed(0)
    steep = {"loss_fn": lambda output, target: 50 * (output - target).square().mean()}
    engine = build(nn.Linear(2, 2), dtype=torch.float16, **steep)
    before = whole(engine.module.weight).clone()
    engine.train_batch(_batch(30.0))
    assert torch.equal(before, whole(engine.module.weight))  # the step is left out
    for _ in range(20):
        engine.train_batch(_batch(30.0))
    assert not torch.equal(before, whole(engine.module.weight))
    assert whole(engine.module.weight).dtype == torch.float32
