"""The contract of runtimes: every registered one passes the same tests, on real processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from slapo.framework_dialect.registry import _DIALECTS
from tests.distributed import run_distributed
from tests.runtimes import contract

#: Target -> what its processes run first, and packages that it needs.
RUNTIMES: dict[str, tuple[str | None, str]] = {
    "torch": (None, "torch"),
    "deepspeed": (None, "deepspeed"),
    "megatron": ("tests.runtimes.contract:stand_in_for_cuda", "megatron.core"),
}
#: Sums of float32 in other orders, of losses of about 3 and parameters of about 1.
TOLERANCE = 1e-5
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(params=sorted(RUNTIMES))
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(RUNTIMES[name][1])
    return name


def run(job: Any, world: int, target: str, *args: Any) -> list[Any]:
    return run_distributed(job, world, RUNTIMES[target][0], target, *args, timeout=200)


def test_every_runtime_is_listed() -> None:
    ours = {t for (kind, t), cls in _DIALECTS.items() if kind == "runtime"}
    assert {t for t in ours if t not in ("mine", "recorder")} == RUNTIMES.keys()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_training(target: str, layout: tuple[int, int, int]) -> None:
    options = {"clip_grad_norm": 0.1, "lr_scheduler": contract.halving}
    ranks = run(contract.learn, math.prod(layout), target, layout, options)
    for found in ranks:
        assert found["reported"] == ranks[0]["reported"]
        assert max(found["apart"].values()) < TOLERANCE, found["apart"]
        assert found["form"] == [(0, torch.float32, False)] * 4
        assert found["training"]
        assert found["optimizer"]
        assert f"mesh {layout}" in found["repr"]
    assert set().union(*(found["names"] for found in ranks)) == contract.Model().state_dict().keys()


def test_a_model_in_one_piece_is_called(target: str) -> None:
    (found,) = run(contract.call, 1, target)
    assert max(found.values()) < 1e-6


def test_mistakes_are_errors_on_every_rank(target: str) -> None:
    ranks = run(contract.make_mistakes, 2, target)
    for mistake, expected in contract.MISTAKES.items():
        for found, part in zip(ranks, expected, strict=True):
            assert part in found[mistake.__name__], (mistake.__name__, found[mistake.__name__])
    loss = contract.alone().step(next(contract.data()))
    for found in ranks:
        assert float(found["loss after all"]) == pytest.approx(loss, abs=TOLERANCE)


def test_refusals_before_anything_starts(target: str) -> None:
    ranks = run(contract.be_refused, 2, target)
    for found in ranks:
        for name, (_, part) in contract.REFUSED.items():
            assert part in found[name], (name, found[name])
        assert "a pipeline needs a loss" in found["no loss on one"]
        assert "ranks applied different schedules" in found["other cuts"]
    assert "failed on rank 1" in ranks[0]["no loss on one"]
