"""Ranks that die or fail in the middle of training, in real engines with pipelines."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.runtimes.contract import data, loss_fn, make
from tests.runtimes.test_watch import run_job

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def train_until_killed(rank: int, target: str) -> None:
    engine, _ = make(target, (3, 1, 1), stages=3)
    batches = data(steps=50)
    for step in range(50):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_batch(batches)


class FailsLater:
    """A loss that fails at its 10th micro-batch, on the last stage's rank only."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        self.count += 1
        if self.count == 10:
            raise ValueError("the loss is not to be had")
        return loss_fn(output, targets)


def train_until_error(rank: int, target: str) -> None:
    engine, _ = make(target, (3, 1, 1), stages=3, loss_fn=FailsLater())
    batches = data(steps=50)
    for _ in range(50):
        engine.train_batch(batches)


def torch_killed(rank: int) -> None:
    train_until_killed(rank, "torch")


def deepspeed_killed(rank: int) -> None:
    train_until_killed(rank, "deepspeed")


def torch_error(rank: int) -> None:
    train_until_error(rank, "torch")


def deepspeed_error(rank: int) -> None:
    train_until_error(rank, "deepspeed")


@pytest.mark.parametrize("job", [torch_killed, deepspeed_killed])
def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path, job: Any) -> None:
    if "deepspeed" in job.__name__:
        pytest.importorskip("deepspeed")
    outcome = run_job(tmp_path, job, limit=150)
    assert outcome.codes[1] == -signal.SIGKILL
    for rank in (0, 2):
        assert outcome.codes[rank] not in (0, None), outcome.texts[rank]
        assert "rank 1 (pp 1, dp 0, tp 0)" in outcome.texts[rank]
        assert outcome.seconds[rank] - outcome.seconds[1] < 20


@pytest.mark.parametrize("job", [torch_error, deepspeed_error])
def test_a_rank_that_raises_ends_the_job(tmp_path: Path, job: Any) -> None:
    if "deepspeed" in job.__name__:
        pytest.importorskip("deepspeed")
    outcome = run_job(tmp_path, job, limit=150)
    assert all(code not in (0, None) for code in outcome.codes)
    assert "ValueError: the loss is not to be had" in outcome.texts[2]
    for rank in (0, 1):
        assert "rank 2 (pp 2, dp 0, tp 0)" in outcome.texts[rank]
        assert "the loss is not to be had" in outcome.texts[rank]
