"""Ranks that are killed while they save, disks that are full, folders that vanish."""

import errno
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo
from slapo.saving.steps import Step
from slapo.weights.files import TensorFile
from slapo.weights.folders import Folder
from tests.runtimes.jobs import WORLD, run_job
from tests.runtimes.ranks import error_of, on_ranks

#: Seconds until the others have ended.
SOON = 15


def engine_of(width: int = 8, **options: Any) -> Any:
    ranks = dist.get_world_size() if dist.is_initialized() else WORLD
    mesh = slapo.init_mesh(dp=ranks, device="cpu", timeout=60)
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(4)]
    given = {"loss_fn": nn.functional.mse_loss, "data_parallel": "fsdp", **options}
    return slapo.build(
        slapo.create_schedule(nn.Sequential(*layers), group=mesh["tp"]),
        target="torch",
        mesh=mesh,
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        **given,
    )[0]


def batch(width: int = 8) -> Any:
    return iter([(torch.ones(2, width), torch.zeros(2, width))])


# --- killed --------------------------------------------------------------------------------------
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(number: int) -> None:
    """At one of the calls by which files are written."""
    left = iter(range(number))

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                die()
            return function(*args, **kwargs)

        return call

    for name in ("posix_fallocate", "pwritev", "fsync", "rename"):
        setattr(os, name, counted(getattr(os, name)))


def save_until_killed(run: str, wait: bool, after: float | int, victim: int, rank: int) -> None:
    """Resume from the last step, and save step after step; `after` is seconds, or calls."""
    engine = engine_of(width=128)
    if slapo.checkpoints(run):
        engine.load(run)
    engine.train_batch(batch(128))
    engine.save(run)
    if rank == victim and isinstance(after, float):
        threading.Timer(after, die).start()
    elif rank == victim:
        die_at_call(after)
    began = time.monotonic()
    while time.monotonic() < began + 60:
        engine.train_batch(batch(128))
        engine.save(run, wait=wait)
    raise AssertionError("no rank was killed")


def export_until_killed(where: str, after: int, victim: int, rank: int) -> None:
    engine = engine_of(width=128)
    if rank == victim:
        die_at_call(after)
    for number in range(1000):
        slapo.save_pretrained(engine, f"{where}/{after}_{victim}_{number}", max_shard_size="70KB")


def run_until_killed(folder: Path, job: Callable[[int], None], victim: int) -> list[str]:
    """Run a job in which one rank is killed; what the others say when they end."""
    outcome = run_job(folder, job)
    assert outcome.codes[victim] == -signal.SIGKILL
    others = [rank for rank in range(WORLD) if rank != victim]
    for rank in others:
        assert outcome.codes[rank] == 1, outcome.texts[rank]
        assert outcome.seconds[rank] - outcome.seconds[victim] < SOON
    return [outcome.texts[rank] for rank in others]


def check_steps(paths: list[Path]) -> None:
    """All checksums match."""
    for path in paths:
        step = Step(path)
        assert all(step.checked(rank) for rank in range(step.world))
        step.close()


def few_or_many(few: int) -> list[Any]:
    """How often a rank is killed."""
    return [
        pytest.param(few, marks=pytest.mark.slow, id="few"),
        pytest.param(20, marks=pytest.mark.wide, id="many"),
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("times", few_or_many(2))
def test_a_killed_rank_leaves_whole_folders(tmp_path: Path, times: int) -> None:
    chance, where = random.Random(0), tmp_path / "out"
    for _ in range(times):
        victim, after = chance.randrange(WORLD), chance.randrange(60)
        run_until_killed(tmp_path, partial(export_until_killed, str(where), after, victim), victim)
        for path in (path for path in where.iterdir() if path.suffix != ".tmp"):
            with Folder(path) as folder:
                assert len(folder.leaves()) == 8
            shutil.rmtree(path)


@pytest.mark.distributed
@pytest.mark.parametrize("times", few_or_many(3))
@pytest.mark.parametrize("wait", [True, False])
def test_a_killed_rank_leaves_the_last_complete_step(
    tmp_path: Path, wait: bool, times: int
) -> None:
    run, chance = tmp_path / "run", random.Random(int(wait))
    for number in range(times):
        before = slapo.checkpoints(run)
        victim, after = chance.randrange(WORLD), chance.uniform(0.0, 0.2)
        given = after if number % 2 else int(after * 200)
        job = partial(save_until_killed, str(run), wait, given, victim)
        texts = run_until_killed(tmp_path, job, victim)
        # One that comes late may find that the first rank has ended, too.
        assert any(f"rank {victim}" in text for text in texts), texts
        listed = slapo.checkpoints(run)
        assert len(listed) > len(before), "the first of this job is complete"
        check_steps(listed[len(before) :])


def save_until_terminated(run: str, is_handled: bool, rank: int) -> None:
    """All ranks are told to end while a step is written beside training."""
    engine = engine_of(width=256)
    if is_handled:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    engine.train_batch(batch(256))
    engine.save(run)
    engine.train_batch(batch(256))
    engine.save(run, wait=False)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.distributed
@pytest.mark.parametrize("is_handled", [True, False])
def test_a_job_that_is_terminated(tmp_path: Path, is_handled: bool) -> None:
    """One that leaves in its own way finishes the step."""
    run = tmp_path / "run"
    outcome = run_job(tmp_path, partial(save_until_terminated, str(run), is_handled))
    wanted = 3 if is_handled else -signal.SIGTERM
    assert outcome.codes == [wanted] * WORLD, outcome.texts
    assert max(outcome.seconds) < 60
    listed = slapo.checkpoints(run)
    assert len(listed) == 2 if is_handled else listed
    check_steps(listed)


# --- disks and folders ---------------------------------------------------------------------------
def full(path: Any, *args: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(path: Path, *args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.EROFS, "Read-only file system", str(path))


def vanish(run: Path) -> Callable[..., Any]:
    create = TensorFile.create.__func__  # type: ignore[attr-defined]

    def removed(*args: Any) -> Any:
        shutil.rmtree(run, ignore_errors=True)
        return create(TensorFile, *args)

    return removed


@on_ranks(2)
def test_disks_and_folders(tmp_path: Path) -> None:
    """Every rank gets the error, with the path; training and saving go on."""
    rank = dist.get_rank()
    engine, run = engine_of(), tmp_path / "run"
    engine.train_batch(batch())
    first = engine.save(run).path
    wanted = "step_00000002.tmp"
    for failing in range(2):
        engine.train_batch(batch())
        engine.step_count = 2
        for function in ("posix_fallocate", "pwritev", "fsync"):
            with mock.patch.object(
                os, function, full if rank == failing else getattr(os, function)
            ):
                told = error_of(lambda: engine.save(run))
            assert "No space left on device" in told, told
            assert wanted in told or "checkpoint.json" in told, told
            assert slapo.checkpoints(run) == [first]
    with mock.patch.object(os, "posix_fallocate", full):
        told = error_of(lambda: slapo.save_pretrained(engine, tmp_path / "out"))
    assert "No space left on device" in told
    dist.barrier()
    assert not (tmp_path / "out.tmp").exists()
    with mock.patch.object(TensorFile, "create", vanish(run / wanted)):
        told = error_of(lambda: engine.save(run))
    assert "No such file" in told
    assert wanted in told
    with mock.patch.object(Path, "mkdir", read_only):
        told = error_of(lambda: engine.save(run))
        assert f"Read-only file system: '{run / wanted}'" in told, told
        told = error_of(lambda: slapo.save_pretrained(engine, tmp_path / "out"))
        assert f"Read-only file system: '{tmp_path / 'out'}" in told, told
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "file" in error_of(lambda: engine.save(blocked))
    assert engine.save(run).result() == run / "step_00000002"
    assert engine_of().load(run).step == 2


class Raises:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> Any:
        if dist.get_rank() == self.rank:
            raise KeyError("no state here")
        return {}

    def load_state_dict(self, state: Any) -> None:
        if dist.get_rank() == self.rank:
            raise KeyError("not to be had")


@on_ranks(2)
def test_what_one_rank_meets_alone(tmp_path: Path) -> None:
    rank = dist.get_rank()
    engine = engine_of()
    assert "no state here" in error_of(lambda: engine.save(tmp_path / "run", data=Raises(1)))
    told = error_of(lambda: engine.save(tmp_path / f"run{rank}"))
    assert "run differs between ranks" in told
    assert "step differs between" in error_of(lambda: other_step(engine, rank, tmp_path / "run"))
    engine.step_count = 0
    assert not (tmp_path / "run").exists()
    engine.train_batch(batch())
    step = engine.save(tmp_path / "run", data=Raises(5)).path
    before = locals_of(engine)
    again = engine_of()
    assert "not to be had" in error_of(lambda: again.load(step, data=Raises(1)))
    assert "keep differs between" in error_of(lambda: engine.save(tmp_path / "n", keep=1 + rank))
    assert "only differs" in error_of(lambda: again.load(step, only="weights" if rank else None))
    again.load(step)
    assert all(
        torch.equal(p.to_local(), b) for p, b in zip(again.parameters(), before, strict=True)
    )


def locals_of(engine: Any) -> list[torch.Tensor]:
    return [parameter.to_local().clone() for parameter in engine.parameters()]


def other_step(engine: Any, rank: int, run: Path) -> None:
    engine.step_count = rank
    engine.save(run)


@on_ranks(2)
def test_an_error_while_values_change(tmp_path: Path) -> None:
    """The engine says that it cannot be trained any more."""
    engine = engine_of()
    engine.train_batch(batch())
    engine.save(tmp_path)
    with mock.patch.object(Step, "read", full):
        assert "engine.load failed midway" in error_of(lambda: engine.load(tmp_path))
    assert "build a new" in error_of(lambda: engine.train_batch(batch()))
    assert "build a new" in error_of(lambda: engine.save(tmp_path))
    assert "build a new" in error_of(lambda: slapo.load_pretrained(engine, tmp_path))
