"""Ranks that are killed, raise or hang in the middle of training, and what the others say."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import slapo
from slapo.errors import SlapoError
from slapo.framework_dialect.failures import naming_failures
from slapo.mesh import init_mesh
from tests.distributed import free_port, launched
from tests.runtimes.contract import copied, data, is_unchanged, loss_fn, make
from tests.runtimes.jobs import WORLD, Outcome, run_job
from tests.runtimes.ranks import on_ranks, on_ranks_by_rows, stand_in_for_cuda

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

#: Seconds until the others have ended: they look for who failed first, and Python ends.
SOON = 15
#: Seconds for which collectives wait where a rank hangs.
PATIENCE = 5

#: What is said of a rank that reports nothing itself.
SILENT = "no response from {name}, which may be hanging, killed"


def check_that_others_name(outcome: Outcome, failed: int, text: str) -> None:
    name = f"rank {failed} (pp {failed}, dp 0, tp 0)"
    said = text.format(name=name)
    for rank in set(range(WORLD)) - {failed}:
        assert outcome.codes[rank] == 1, outcome.texts[rank]
        assert f"SlapoError: {said}" in outcome.texts[rank], outcome.texts[rank]
        if outcome.codes[failed] is not None:  # it does not hang
            assert outcome.seconds[rank] - outcome.seconds[failed] < SOON


# --- engines -------------------------------------------------------------------------------------
def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(PATIENCE + SOON)


class FailsLater:
    """A loss that fails at its 10th micro-batch, on the last stage's rank only."""

    def __init__(self, fails: bool = True, error: type[BaseException] = ValueError) -> None:
        self.count, self.fails, self.error = 0, fails, error

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        self.count += 1
        if self.count == 10 and self.fails:
            raise self.error("the loss is not to be had")
        return loss_fn(output, targets)


def train_until(fault: Callable[[], None] | None, target: str, rank: int) -> None:
    """Three stages: the one in the middle fails between two steps, or the loss of the last."""
    if target == "megatron":
        stand_in_for_cuda()
    init_mesh(pp=WORLD, device="cpu", timeout=PATIENCE)
    engine = make(target, (WORLD, 1, 1), loss_fn=FailsLater(fails=fault is None))
    batches = data(steps=50)
    for step in range(50):
        if rank == 1 and step == 3 and fault is not None:
            fault()
        engine.train_batch(batches)


@pytest.mark.parametrize(
    ("fault", "code"), [(kill, -signal.SIGKILL), (hang, None)], ids=["killed", "hangs"]
)
def test_a_rank_that_is_killed_or_hangs_is_named(
    tmp_path: Path, target: str, fault: Callable[[], None], code: int | None
) -> None:
    hanging = None if code else 1
    outcome = run_job(tmp_path, partial(train_until, fault, target), hanging=hanging)
    assert outcome.codes[1] == code, "the others end before it wakes up"
    check_that_others_name(outcome, 1, SILENT)


def test_a_rank_that_raises_is_named_with_its_error(tmp_path: Path, target: str) -> None:
    outcome = run_job(tmp_path, partial(train_until, None, target))
    assert "ValueError: the loss is not to be had" in outcome.texts[2]
    check_that_others_name(outcome, 2, "{name} failed with ValueError: the loss is not to be had")


# --- without an engine ---------------------------------------------------------------------------
def hear_from(source: int, rank: int) -> None:
    """Each of the others waits for `source`, and for no other that might wait in turn."""
    if rank != source:
        dist.recv(torch.ones(1), source)
        return
    for other in set(range(WORLD)) - {source}:
        dist.send(torch.ones(1), other)


def killed(late: float, rank: int) -> None:
    """Rank 0, which keeps the store, notices at once; it stays until a late one has read."""
    failures = naming_failures(init_mesh(pp=WORLD, device="cpu"))
    for step in range(6):
        with failures("step"):
            if rank == 1 and step == 5:
                kill()
            if rank == 2 and step == 5:
                time.sleep(late)
            hear_from(1, rank)


def keeper_of_the_store_killed(rank: int) -> None:
    failures = naming_failures(init_mesh(pp=WORLD, device="cpu"))
    for step in range(1000):
        with failures("step"):
            if rank == 0 and step == 5:
                kill()
            dist.all_reduce(torch.ones(1))


def raises_between_steps(rank: int) -> None:
    failures = naming_failures(init_mesh(pp=WORLD, device="cpu"))
    with failures("step"):
        dist.all_reduce(torch.ones(1))
    if rank == 2:
        raise KeyError("no such column")
    with failures("step"):
        dist.recv(torch.ones(1), (rank + 1) % WORLD)


def meets_an_error_that_all_have(rank: int) -> None:
    """Every rank raises by itself, at another time, and goes on; no rank is blamed later."""
    failures = naming_failures(init_mesh(pp=WORLD, device="cpu"))
    for _ in range(2):
        with pytest.raises(ValueError, match="bad batch"), failures("step"):
            time.sleep(0.3 * rank)
            raise ValueError("bad batch")
    with failures("step"):
        hear_from(1, rank)
    if rank == 1:
        kill()
    with failures("step"):
        hear_from(1, rank)


def saves_alone(folder: str, rank: int) -> None:
    """As many scripts do that write from one process."""
    mesh = init_mesh(dp=WORLD, device="cpu", timeout=PATIENCE)
    engine = make("torch", tuple(mesh.shape))
    if rank == 0:
        slapo.save_pretrained(engine, folder)
    engine.train_batch(data())


def test_ranks_that_wait_for_each_other_say_where(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, partial(saves_alone, str(tmp_path / "out")))
    said = "1 in save_pretrained, such as rank 0; 2 in train_batch, such as rank 1; call each on"
    for rank in range(WORLD):
        assert f"all ranks wait for each other: {said}" in outcome.texts[rank]


@pytest.mark.parametrize(
    ("job", "failed", "text"),
    [
        (partial(killed, 0.0), 1, SILENT),
        (partial(killed, 1.5), 1, SILENT),
        (raises_between_steps, 2, "{name} failed with KeyError: 'no such column'"),
        (meets_an_error_that_all_have, 1, SILENT),
    ],
    ids=["killed", "one is late", "between steps", "an error that all have"],
)
def test_the_first_to_fail_is_named(
    tmp_path: Path, job: Callable[[int], None], failed: int, text: str
) -> None:
    check_that_others_name(run_job(tmp_path, job), failed, text)


def test_the_keeper_of_the_store_is_named(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, keeper_of_the_store_killed)
    for rank in (1, 2):
        assert outcome.codes[rank] == 1
        text = "SlapoError: rank 0 (pp 0, dp 0, tp 0), which hosts the job's store, is gone"
        assert text in outcome.texts[rank]
        assert outcome.seconds[rank] - outcome.seconds[0] < SOON


@on_ranks(2)
def test_engines_share_one_and_start_no_thread() -> None:
    """Also with a store in a file, which no rank keeps."""
    mesh = init_mesh(pp=2, device="cpu")
    before = threading.active_count()
    first, second = naming_failures(mesh), naming_failures(mesh)
    with first("a"), second("b"):
        dist.all_reduce(torch.ones(1))
    assert first == second  # methods of one object
    assert threading.active_count() == before


def gloo_threads() -> int:
    """Those of groups that still live; a process that ends beside one may abort."""
    names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux")
@on_ranks(2)
def test_an_engine_leaves_no_group_behind() -> None:
    """DeepSpeed and Megatron keep theirs in globals of their own."""
    engine = make("torch", (1, 2, 1))
    engine.train_batch(data())
    del engine
    assert gloo_threads() > 0
    dist.destroy_process_group()
    gc.collect()
    deadline = time.monotonic() + SOON  # a thread that has been joined is listed for a moment
    while gloo_threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gloo_threads() == 0


@on_ranks_by_rows(
    [
        (target, (1, 2, 1), options, error)
        for target, options in [
            ("torch", {}),
            ("torch", {"data_parallel": "fsdp"}),
            *[("deepspeed", {"zero": zero}) for zero in range(4)],
            ("megatron", {}),
            ("megatron", {"overlap_grad_reduce": True}),
        ]
        for error in (ValueError, KeyboardInterrupt)
    ]
)
def test_no_further_step_is_taken_after_one_that_failed(
    target: str, layout: Any, options: dict[str, Any], error: type[BaseException]
) -> None:
    """Gradients of the failed step are in buffers of the library: they would count in the next."""
    loss = FailsLater(error=error)
    engine, batches = make(target, layout, loss_fn=loss, **options), data(steps=9)
    engine.train_batch(batches)
    engine.train_batch(batches)
    before = copied(engine)
    with pytest.raises(error, match="the loss is not to be had"):
        engine.train_batch(batches)  # in its second micro-batch
    text = f"an earlier step failed with {error.__name__}: the loss is n"
    with pytest.raises(SlapoError, match=text):
        engine.train_batch(batches)
    assert engine.step_count == 2
    if options.get("zero") != 3:  # which is still gathered for the step that failed
        assert is_unchanged(engine, before)


SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from slapo.framework_dialect.failures import naming_failures
from slapo.mesh import init_mesh
torch.set_num_threads(1)
failures = naming_failures(init_mesh(dp=2, device="cpu", timeout=5))
with failures("step"):
    dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1 and {fault!r} == "raises":
    {{}}["no such key"]
if dist.get_rank() == 1 and {fault!r} == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if dist.get_rank() == 1 and {fault!r} == "hangs":
    time.sleep(30)
if {fault!r}:
    with failures("step"):
        dist.recv(torch.ones(1), 0 if dist.get_rank() else 1)
"""


def start(folder: Path, fault: str, launcher: bool) -> list[subprocess.Popen[str]]:
    """Two ordinary interpreters, by themselves or below torchrun."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(slapo.__file__).parents[1]), fault=fault))
    settings = {"text": True, "stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    if launcher:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        torchrun += ["--master-port", str(free_port())]
        return [subprocess.Popen([*torchrun, str(script)], **settings)]  # type: ignore[call-overload]
    port = free_port()
    return [
        subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, str(script)],
            env={**os.environ, **launched(rank, 2, port)},
            **settings,
        )
        for rank in range(2)
    ]


NAMED = r"rank 1 \(pp 0, dp 1, tp 0\)"
BY_TORCHRUN = r"rank\s*: 1 \(local_rank: 1\)"


@pytest.mark.parametrize(
    ("launcher", "fault", "text"),
    [
        (False, "raises", rf"{NAMED} failed with KeyError: 'no such key'"),
        (True, "raises", BY_TORCHRUN),
        (True, "killed", BY_TORCHRUN),
        # It ends the others as soon as one has timed out.
        pytest.param(True, "hangs", rf"no response from {NAMED}", marks=pytest.mark.wide),
    ],
)
def test_ordinary_processes(tmp_path: Path, launcher: bool, fault: str, text: str) -> None:
    begin = time.monotonic()
    first, *others = start(tmp_path, fault, launcher)
    for other in others:
        other.communicate(timeout=60)  # as a launcher does: a process is gone once that has waited
    said = first.communicate(timeout=90)[1]
    assert first.returncode == 1
    assert re.search(text, said), said
    # With two interpreters that import torch, of which one would sleep for a minute.
    assert time.monotonic() - begin < 45


@pytest.mark.parametrize("launcher", [False, True], ids=["by hand", "torchrun"])
def test_processes_without_a_fault_end_in_silence(tmp_path: Path, launcher: bool) -> None:
    for process in start(tmp_path, "", launcher=launcher):
        said = process.communicate(timeout=90)[1]
        assert process.returncode == 0, said
        assert "slapo" not in said
