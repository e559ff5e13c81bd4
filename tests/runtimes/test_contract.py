"""The contract of runtimes: every registered one passes the same tests, on real processes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import slapo
from slapo.agreement import gathered
from slapo.framework_dialect.registry import _DIALECTS
from tests.runtimes.alone import compare, compare_by_hand, of_this_rank
from tests.runtimes.contract import (
    TOLERANCE,
    Model,
    alone,
    data,
    make,
    seeded,
    sgd,
)
from tests.runtimes.ranks import RUNTIMES, error_of, on_ranks

pytestmark = pytest.mark.slow

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]


def test_every_runtime_is_listed() -> None:
    ours = {t for (kind, t), cls in _DIALECTS.items() if kind == "runtime"}
    assert {t for t in ours if t not in ("mine", "recorder")} == RUNTIMES.keys()


@on_ranks(1)
def test_a_model_in_one_piece_is_called(target: str) -> None:
    found = compare_by_hand(make(target, (1, 1, 1), micro_batches=1), alone(), data(3))
    assert max(found.values()) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=["pp", "dp"])
@on_ranks()
def test_an_engine_without_an_optimizer_evaluates(target: str, layout: Any) -> None:
    engine, batch = make(target, layout, optimizer=None), next(data())
    assert engine.optimizer is None
    mine = of_this_rank(engine.mesh, batch)
    wanted = alone().evaluate(batch)[0]
    assert abs(engine.eval_batch(iter([mine])).item() - wanted) < TOLERANCE
    with pytest.raises(slapo.SlapoError, match="train_batch needs an optimizer"):
        engine.train_batch(iter([mine]))
    with pytest.raises(slapo.SlapoError, match=r"step\(\) needs an opt|use train_batch"):
        engine.step()


# --- mistakes with a batch -----------------------------------------------------------------------
def one(batch: Any) -> Callable[[Any, int], Any]:
    return lambda engine, rank: engine.train_batch(iter([batch]))


IDS, TARGETS = next(data())
_OTHER = "the batch of data-parallel coordinate 0 differs between ranks: 'int64(8, 5), int64(8, 5)"
_TOKENS = "unexpected keyword argument 'tokens'; it takes ['ids']"

#: Mistake with a pipeline of two ranks -> part of the message on each of them.
MISTAKES: dict[str, tuple[Callable[[Any, int], Any], str, str]] = {
    "odd": (one((IDS[:3], TARGETS[:3])), *["cannot be split into micro_batches=4"] * 2),
    "no pair": (one({"ids": IDS}), *["pass the pair (inputs, targets)"] * 2),
    "no iterator": (
        lambda engine, rank: engine.train_batch([(IDS, TARGETS)]),
        *["data_iter is a list, not an iterator over batches; pass iter(data_loader)"] * 2,
    ),
    "ended": (
        lambda engine, rank: engine.train_batch(iter([])),
        *["data_iter has no more batches; pass a fresh iter(data_loader)"] * 2,
    ),
    "ended on one": (
        lambda engine, rank: engine.train_batch(iter([(IDS, TARGETS)] if rank else [])),
        "data_iter has no more batches",
        "failed on rank 0",
    ),
    "other batch": (
        lambda engine, rank: engine.train_batch(data(seed=rank)),
        *[_OTHER] * 2,
    ),
    "unknown argument": (one(({"tokens": IDS}, TARGETS)), *[_TOKENS] * 2),
    "called": (lambda engine, rank: engine(IDS), *["use train_batch or eval_batch"] * 2),
}


@on_ranks(2)
def test_mistakes_are_errors_on_every_rank(target: str) -> None:
    """The engine trains on after all of them, as if nothing had been."""
    engine, rank = make(target, (2, 1, 1)), torch.distributed.get_rank()
    for name, (mistake, *expected) in MISTAKES.items():
        text = error_of(partial(mistake, engine, rank))
        assert expected[rank] in text, (name, text)
    loss = engine.train_batch(data()).item()
    assert loss == pytest.approx(alone().step(next(data())), abs=TOLERANCE)


# --- refusals ------------------------------------------------------------------------------------
#: Arguments of a build with two ranks, and part of the message on each rank.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss_fn": None}, "a mesh with pp=2 needs a loss"),
    ({"stages": 1}, "has 1 stages, but pp=2"),
    ({"stages": 4}, "has 4 stages, but pp=2"),
    (
        {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)},
        "build replaces the parameters",
    ),
    ({"micro_batches": 0}, "micro_batches is 0"),
    ({"color": "red"}, "color"),
    ({"loss_fn": 3}, "loss_fn is 3; pass a function of (output, target)"),
]


@on_ranks(2)
def test_refusals_before_anything_starts(target: str) -> None:
    def attempt(**options: Any) -> str:
        return error_of(lambda: make(target, (2, 1, 1), **options))

    for options, part in REFUSED:
        text = attempt(**options)
        assert part in text, (options, text)
    rank = torch.distributed.get_rank()
    text = attempt(**({"loss_fn": None} if rank else {}))
    assert "a mesh with pp=2 needs a loss" in text
    assert rank or "failed on rank 1" in text
    assert "ranks applied different schedules" in attempt(stages=2 + rank)
    for wrong, text in ((lambda: "none", "returned a str"), (lambda: 1 / 0, "ZeroDivisionError")):
        found = attempt(optimizer=lambda p, wrong=wrong: wrong() if rank else sgd(p))
        assert (text if rank else "optimizer failed on rank 1") in found


# --- what must be alike --------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=["pp", "dp", "tp"])
@on_ranks()
def test_what_must_be_alike_is_compared(target: str, layout: Any) -> None:
    rank = torch.distributed.get_rank()

    def attempt(**options: Any) -> str:
        return error_of(lambda: make(target, layout, **options))

    text = "clip_grad_norm differs between ranks: 1.0 on rank 0, 2.0 on rank 1"
    assert text in attempt(clip_grad_norm=1.0 + rank)
    rate = partial(torch.optim.SGD, lr=0.1 * (1 + rank))
    assert "optimizer differs between ranks" in attempt(optimizer=rate)
    text = attempt(optimizer=lambda p, lr=0.1 * (1 + rank): torch.optim.SGD(p, lr))
    assert "[0.1], None) on rank 0" in text  # defaults of functions are compared
    torch.manual_seed(rank)
    assert "that must agree; use the same seed before" in attempt(model=Model().train())
    torch.manual_seed(rank)
    engine = make(target, layout, model=Model().train(), sync_replicated=True)
    if layout != (2, 1, 1):  # stages hold other parameters, but for the tied one
        shapes = {name: tensor.shape for name, tensor in Model().state_dict().items()}
        state = engine.state_dict().items()
        whole = [float(t.float().sum()) for n, t in state if t.shape == shapes[n]]
        found = gathered(whole, None)
        assert found[0] == found[1]


@on_ranks(2)
def test_partial_sums_that_nobody_adds_are_an_error(target: str) -> None:
    """The second layer of a block is sharded, and its partial sums are never added."""
    forgets = [f"h.{index}.down" for index in range(4)]
    # Past the placement check, which would say where.
    engine = make(target, (1, 1, 2), forgets=forgets, check=False)
    with pytest.raises(
        slapo.SlapoError, match="ranks computed different losses for the same batch"
    ):
        engine.train_batch(data())


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "pp", "dp", "tp"])
@on_ranks()
def test_parameters_that_the_optimizer_lacks_are_an_error(target: str, layout: Any) -> None:
    model = seeded()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" not in name)
    engine, batches = make(target, layout, model=model), data()
    engine.train_batch(batches)
    for parameter in engine.module.parameters():
        parameter.requires_grad_(True)
    with pytest.raises(slapo.SlapoError, match=r"\.bias, require gradients that they did not"):
        engine.train_batch(batches)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "pp", "dp", "tp"])
@on_ranks()
def test_parameters_frozen_after_the_build_stay_or_are_an_error(target: str, layout: Any) -> None:
    """Not moved by momentum and decay, as zeros for gradients would do."""
    optimizer = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    engine, reference = make(target, layout, optimizer=optimizer), alone(optimizer=optimizer)
    batches = list(data(3))
    compare(engine, reference, batches[:1])
    for model in (engine.module, reference.model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" not in name)
    if target == "torch" and layout != (1, 2, 1):
        found = compare(engine, reference, batches[1:])
        assert max(found["losses"], found["state"]) < TOLERANCE
    else:
        with pytest.raises(slapo.SlapoError, match=r"\.bias, were frozen after this engine"):
            engine.train_batch(iter([of_this_rank(engine.mesh, batches[1])]))
