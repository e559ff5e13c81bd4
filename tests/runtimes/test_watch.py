"""Ranks that die, fail or end, in jobs of real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slapo.errors import SlapoError
from slapo.framework_dialect import peers
from slapo.framework_dialect.agreement import all_ranks_or_none
from slapo.framework_dialect.peers import Event, Peer, Silence, is_running, this_process
from slapo.framework_dialect.steps import Steps
from slapo.framework_dialect.watch import Watch, start_watch
from slapo.mesh import init_mesh
from tests.distributed import run_distributed

WORLD = 3


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def life(rank: int, port: int, folder: str, job: Callable[[int], None]) -> None:
    """One rank: an ordinary process whose standard error goes to a file."""
    # Left open: what ends the process is written after this function.
    sys.stderr = Path(folder, f"stderr{rank}").open("w", buffering=1)  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(environment(rank, port))
    job(rank)


class Outcome:
    """How the ranks of a job ended."""

    def __init__(self, codes: list[int | None], texts: list[str], seconds: list[float]) -> None:
        self.codes, self.texts, self.seconds = codes, texts, seconds


def run_job(folder: Path, job: Callable[[int], None], limit: float = 150) -> Outcome:
    """Run ``job(rank)`` in each process of a job with a TCPStore that rank 0 keeps."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest"])
    port = free_port()
    workers: list[Any] = [
        context.Process(target=life, args=(rank, port, str(folder), job)) for rank in range(WORLD)
    ]
    for worker in workers:
        worker.start()
    start, ended = time.monotonic(), [0.0] * WORLD
    while time.monotonic() < start + limit and not all(ended):
        for rank, worker in enumerate(workers):
            if not ended[rank] and worker.exitcode is not None:
                ended[rank] = time.monotonic() - start
        time.sleep(0.05)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
        worker.join()
    return Outcome(codes, [(folder / f"stderr{r}").read_text() for r in range(WORLD)], ended)


def start(seconds: float = 5.0) -> tuple[Watch, torch.Tensor]:
    mesh = init_mesh(pp=WORLD, device="cpu")
    watch = start_watch(mesh, seconds)
    return watch, torch.ones(1)


def killed(rank: int) -> None:
    watch, tensor = start()
    for step in range(1000):
        with watch.guard():
            if rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(tensor)


def killed_while_others_cannot_notice(rank: int) -> None:
    """The others wait for each other, not for the one that dies: no connection breaks."""
    watch, tensor = start()
    with watch.guard():
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            time.sleep(60)
        dist.recv(tensor, 0)


def store_keeper_killed(rank: int) -> None:
    watch, _ = start()
    with watch.guard():
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def store_keeper_killed_as_others_connect(rank: int) -> None:
    """Another is slow to connect to the store, which must be there until it has."""
    connect = peers.Bulletin.__init__

    def slowly(*args: Any) -> None:
        time.sleep(3 if rank == 1 else 0)
        connect(*args)

    peers.Bulletin.__init__ = slowly  # type: ignore[method-assign]
    store_keeper_killed(rank)


def raises_in_step(rank: int) -> None:
    watch, tensor = start()
    for step in range(1000):
        with watch.guard():
            if rank == 2 and step == 5:
                raise ValueError("no such token")
            dist.all_reduce(tensor)


def raises_between_steps(rank: int) -> None:
    watch, tensor = start()
    with watch.guard():
        dist.all_reduce(tensor)
    if rank == 2:
        raise KeyError("no such column")
    with watch.guard():
        dist.recv(tensor, (rank + 1) % 2)


def leaves_early(rank: int) -> None:
    watch, tensor = start()
    for step in range(3 if rank == 1 else 5):
        with watch.guard():
            if step == 3:
                dist.recv(tensor, 2 - rank)
            dist.all_reduce(tensor)


def killed_on_another_host(rank: int) -> None:
    """Each rank takes itself for alone on its host; the others wait for each other."""
    peers._host = lambda pid: f"host{rank}"
    watch, tensor = start(2.0)
    with watch.guard():
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.recv(tensor, 2 - rank)


def killed_out_of_sight(rank: int) -> None:
    """As above, but a connection breaks: much earlier than silence alone would tell."""
    peers._host = lambda pid: f"host{rank}"
    watch, tensor = start(100.0)
    for _ in range(1000):
        with watch.guard():
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(tensor)


def dies_outside_of_steps(rank: int) -> None:
    """The others are not in a step either, but wait for the rank all the same."""
    _, tensor = start(7.0)
    if rank == 1:
        os._exit(3)
    dist.recv(tensor, 2 - rank)


def ends_one_after_the_other(rank: int) -> None:
    watch, tensor = start(1.0)
    for _ in range(3):
        with watch.guard():
            dist.all_reduce(tensor)
    with watch.guard():
        dist.all_reduce(tensor)
        time.sleep(3.0 * rank)


def _fails_on_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("input_ids")


def all_raise(rank: int) -> None:
    """All meet the same error, at different times, and go on."""
    watch, tensor = start()
    for _ in range(2):
        with pytest.raises(ValueError, match="bad batch"), watch.guard():
            time.sleep(0.8 * rank)
            raise ValueError("bad batch")
    with pytest.raises((SlapoError, KeyError)), watch.guard():
        all_ranks_or_none("load", lambda: _fails_on_one(rank))
    time.sleep(3)
    with watch.guard():
        dist.all_reduce(tensor)


def busy(rank: int) -> None:
    """A rank is stopped for longer than the watch has patience."""
    watch, tensor = start(1.0)
    with watch.guard():
        if rank == 1:
            if os.fork() == 0:
                time.sleep(4)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(tensor)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [killed, killed_while_others_cannot_notice, killed_on_another_host, killed_out_of_sight],
)
def test_a_killed_rank_ends_the_job_and_is_named(
    tmp_path: Path, job: Callable[[int], None]
) -> None:
    outcome = run_job(tmp_path, job)
    assert outcome.codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert "rank 1 (pp 1, dp 0, tp 0) died" in outcome.texts[rank]
        assert outcome.seconds[rank] - outcome.seconds[1] < 15


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_dies_between_steps(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, dies_outside_of_steps)
    assert outcome.codes == [1, 3, 1]
    for rank in (0, 2):
        assert "rank 1 (pp 1, dp 0, tp 0) died" in outcome.texts[rank]
        assert (
            f"this process (rank {rank} (pp {rank}, dp 0, tp 0)) ends at its next step"
            in outcome.texts[rank]
        )
    # The other may lose its connection to the one that goes first, and raise.
    assert "ending this process" in outcome.texts[0] + outcome.texts[2]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("job", [store_keeper_killed, store_keeper_killed_as_others_connect])
def test_the_rank_that_keeps_the_store_is_named_too(
    tmp_path: Path, job: Callable[[int], None]
) -> None:
    outcome = run_job(tmp_path, job)
    assert outcome.codes == [-signal.SIGKILL, 1, 1]
    for rank in (1, 2):
        assert "rank 0 (pp 0, dp 0, tp 0) died" in outcome.texts[rank]
        assert outcome.seconds[rank] - outcome.seconds[0] < 10


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "error"),
    [
        (raises_in_step, "ValueError: no such token"),
        (raises_between_steps, "KeyError: 'no such column'"),
    ],
)
def test_a_rank_that_raises_is_named_with_its_error(
    tmp_path: Path, job: Callable[[int], None], error: str
) -> None:
    outcome = run_job(tmp_path, job)
    assert outcome.codes == [1, 1, 1]
    for rank in (0, 1):
        assert f"rank 2 (pp 2, dp 0, tp 0) failed with {error}" in outcome.texts[rank]
        assert outcome.seconds[rank] - outcome.seconds[2] < 10


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_takes_fewer_steps_is_named(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, leaves_early)
    assert outcome.codes == [1, 0, 1]
    for rank in (0, 2):
        assert "rank 1 (pp 1, dp 0, tp 0) ended after 3 steps" in outcome.texts[rank]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("job", [ends_one_after_the_other, all_raise, busy])
def test_no_alarm_when_nothing_is_wrong(tmp_path: Path, job: Callable[[int], None]) -> None:
    outcome = run_job(tmp_path, job)
    assert outcome.codes == [0, 0, 0], outcome.texts
    assert "slapo:" not in "".join(outcome.texts)


SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from slapo.framework_dialect.watch import start_watch
from slapo.mesh import init_mesh
torch.set_num_threads(1)
watch = start_watch(init_mesh(dp=2, device="cpu"), 5.0)
with watch.guard():
    dist.all_reduce(torch.ones(1))
if {fails} and dist.get_rank() == 1:
    {{}}["no such key"]
if {fails}:
    with watch.guard():
        dist.recv(torch.ones(1), 0 if dist.get_rank() else 1)
"""


def start_script(folder: Path, fails: bool, launcher: bool) -> list[subprocess.Popen[str]]:
    """Two ordinary interpreters, by themselves or below torchrun."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2]), fails=fails))
    settings = {"text": True, "stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    if launcher:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        torchrun += ["--master-port", str(free_port())]
        return [subprocess.Popen([*torchrun, str(script)], **settings)]  # type: ignore[call-overload]
    port = free_port()
    return [
        subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, str(script)],
            env={**os.environ, **environment(rank, port), "WORLD_SIZE": "2"},
            **settings,
        )
        for rank in range(2)
    ]


@pytest.mark.distributed
@pytest.mark.slow
def test_an_uncaught_error_of_an_ordinary_process(tmp_path: Path) -> None:
    first, second = start_script(tmp_path, fails=True, launcher=False)
    text = first.communicate(timeout=60)[1]
    second.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "rank 1 (pp 0, dp 1, tp 0) failed with KeyError: 'no such key'" in text


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("launcher", [False, True], ids=["by hand", "torchrun"])
def test_ordinary_processes_end_in_silence(tmp_path: Path, launcher: bool) -> None:
    for process in start_script(tmp_path, fails=False, launcher=launcher):
        text = process.communicate(timeout=90)[1]
        assert process.returncode == 0, text
        assert "slapo" not in text


def several_engines(rank: int, world_size: int) -> list[Any]:
    """Also with a store in a file, which no rank keeps."""
    first, second = start_watch(seconds=5.0), start_watch(seconds=7.0)
    threads = [t.name for t in threading.enumerate()].count("slapo-watch")
    off = start_watch(seconds=None)
    with first.guard(), second.guard(), off.guard():
        dist.all_reduce(torch.ones(1))
    first.close()
    again = start_watch(seconds=5.0)
    with again.guard():
        dist.all_reduce(torch.ones(1))
    begin = time.monotonic()
    again.close()
    return [first is second, threads, type(off).__name__, again is first, time.monotonic() - begin]


@pytest.mark.distributed
def test_engines_share_a_watch() -> None:
    for same, threads, off, again, seconds in run_distributed(several_engines, 2):
        assert (same, threads, off, again) == (True, 2, "Watch", False)
        assert seconds < 3


def different_settings(rank: int, world_size: int) -> str:
    with pytest.raises(SlapoError) as error:
        start_watch(seconds=None if rank else 30.0)
    return str(error.value)


@pytest.mark.distributed
def test_ranks_agree_whether_they_watch() -> None:
    texts = run_distributed(different_settings, 2)
    assert texts[0] == texts[1]
    assert texts[0].startswith("watch differs between ranks: 30.0 on rank 0, None on rank 1")


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_seconds_are_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match="pass seconds, or None to switch watching off"):
        start_watch(seconds=seconds)


def test_alone_nobody_is_watched() -> None:
    watch = start_watch()
    with pytest.raises(KeyError), watch.guard():
        raise KeyError("own")
    watch.report(KeyError("own"))
    watch.close()


def test_silence_counts_only_while_one_looks() -> None:
    silence = Silence(tick=1.0)
    assert silence.look(1, 5, now=10.0) == 0.0
    assert silence.look(1, 5, now=11.0) == 1.0
    assert silence.look(1, 5, now=100.0) == 3.0
    assert silence.look(2, 5, now=100.0) == 0.0
    assert silence.look(1, 6, now=101.0) == 0.0


def test_processes() -> None:
    me = this_process(0, "rank 0")
    assert is_running(me)
    assert not is_running(Peer(0, me.host, me.pid, "another time", "rank 0"))
    child = subprocess.Popen([sys.executable, "-c", ""])
    while Path(f"/proc/{child.pid}/stat").exists() and " Z " not in child_state(child.pid):
        time.sleep(0.01)
    # Not waited for: a process that has ended and that its parent has not yet noticed.
    assert not is_running(Peer(1, me.host, child.pid, "", "rank 1"))
    child.wait()
    assert not is_running(Peer(1, me.host, child.pid, "", "rank 1"))


def child_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text()


def test_events_that_hinder_a_step() -> None:
    steps = Steps()
    steps.begin()
    steps.finish()
    ended, failed = Event("ended", 1, 1, "ended"), Event("failed", 2, 2, "failed")
    steps.note([ended, failed])
    assert steps.obstacle() is failed
    steps.begin()
    assert steps.obstacle() is ended
    assert steps.obstacle_to_begin() is ended
    steps.fail()
    steps.finish()
    # Outside of steps nobody is needed, and the error is shared.
    assert steps.obstacle() is None
    died = Event("died", 3, 0, "died")
    steps.note([died])
    assert steps.obstacle() is died
    assert steps.gone() == {1, 3}
    assert steps.told() == {1, 2, 3}


def test_an_uncounted_step_needs_nobody() -> None:
    steps = Steps()
    steps.begin(counted=False)
    steps.note([Event("ended", 1, 0, "ended")])
    assert steps.obstacle() is None
    steps.begin()
    assert steps.count == 0
