"""``slapo.env``: process groups for tutorials."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slapo import env


@pytest.fixture(autouse=True)
def left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def meet(rank: int, args: Any) -> None:
    """Write what a process finds."""
    env.setup(rank, args.world_size)
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    Path(args.folder, str(rank)).write_text(f"{dist.get_world_size()} {total.item()}")
    env.cleanup()


def fail(rank: int, args: Any) -> None:
    raise ValueError(f"rank {rank} does not like it")


def test_one_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env.execute(meet, argparse.Namespace(world_size=1, folder=str(tmp_path)))
    assert (tmp_path / "0").read_text() == "1 1.0"
    assert not dist.is_initialized()
    assert "MASTER_ADDR" not in os.environ
    if not torch.cuda.is_available():
        assert "gloo" in caplog.messages[0]
    seen: list[Any] = []
    env.execute(lambda rank, *given: seen.append((rank, given)), (1, "folder"))
    assert seen == [(0, (1, "folder"))]  # a tuple is unpacked


@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    env.execute(meet, argparse.Namespace(world_size=2, folder=str(tmp_path)))
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["2 3.0"] * 2
    assert "MASTER_PORT" not in os.environ


@pytest.mark.distributed
def test_a_process_that_fails_ends_the_job() -> None:
    with pytest.raises(Exception, match="does not like it"):
        env.execute(fail, {"world_size": 2})


def test_within_torchrun_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "7", "RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    seen: list[tuple[int, int]] = []
    env.execute(lambda rank, n: seen.append((rank, n)), 4)
    assert seen == [(3, 4)]
    with pytest.raises(ValueError, match="world_size is 2, but torchrun started 4"):
        env.execute(print, 2)


def test_a_rank_outside_and_a_second_group() -> None:
    with pytest.raises(ValueError, match="rank 2 is invalid for 2 processes"):
        env.setup(2, 2)
    env.setup(0, 1, "gloo")
    with pytest.raises(ValueError, match="twice"):
        env.setup(0, 1, "gloo")
    env.cleanup()
