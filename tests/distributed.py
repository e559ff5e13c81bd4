"""Runs a function on several processes that form a gloo group.

The processes are forked from a server that has imported torch once, so a job of eight starts in
about a second. Whatever goes wrong on a rank, the job ends: with the results of all ranks, or with
a :class:`RankFailure` that carries the traceback of the first rank to fail.
"""

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Seconds that a rank may need for saying goodbye once it has reported its result.
_EXIT_GRACE = 10.0
# What ranks ask of packages that tests have imported: dynamo traces pipelines, say. It takes
# seconds on each rank. Not the tests themselves: a module of theirs may set up its process.
_COSTLY = {
    "torch": [
        "networkx",
        "sympy.combinatorics",
        "torch._dynamo.backends.debugging",
        "torch._functorch.aot_autograd",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "torch.export",
    ],
    "slapo": [
        "slapo._build",
        "slapo.framework_dialect.pytorch.pipeline",
        "slapo.framework_dialect.pytorch.runtime",
        "slapo.graph.trace.capture",
        "slapo.model_schedule",
        "slapo.saving",
    ],
    "transformers": ["transformers.generation", "transformers.modeling_utils"],
    "deepspeed": ["deepspeed.pipe", "deepspeed.runtime.engine"],
    "megatron": [
        "megatron.core.distributed",
        "megatron.core.optimizer",
        "megatron.core.parallel_state",
        "megatron.core.pipeline_parallel",
        "megatron.core.transformer.multi_token_prediction",
    ],
}


class RankFailure(AssertionError):
    """A rank that raised, died or did not finish.

    Attributes
    ----------
    rank : int
        The first rank to fail, or the lowest of those that did not finish.
    error : str
        Name of the exception's type; ``"TimeoutError"`` for a job that did not finish,
        ``"ProcessDied"`` for a process that ended without a word.
    """

    def __init__(self, rank: int, error: str, message: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


@dataclass(frozen=True)
class _Report:
    """What a rank says at its end; ``at`` is on the clock that all processes share."""

    rank: int
    at: float
    result: Any = None
    error: str = ""
    text: str = ""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` processes of one gloo group.

    Parameters
    ----------
    fn : Callable
        A function at the top level of an importable module.
    world_size : int
        Number of processes.
    *args : Any
        Passed on; they and the results must be picklable.
    timeout : float
        Seconds until the processes are killed.

    Returns
    -------
    list
        The results, in the order of the ranks.

    Raises
    ------
    RankFailure
        When a rank raises, dies, or has not finished in time.
    """
    deadline = time.monotonic() + timeout
    server = context()
    with tempfile.TemporaryDirectory(prefix="slapo-test-") as scratch:
        readers: list[connection.Connection] = []
        workers: list[ForkServerProcess] = []
        try:
            for rank in range(world_size):
                reader, writer = server.Pipe(duplex=False)
                worker = server.Process(
                    target=_work,
                    args=(
                        writer,
                        scratch,
                        timeout,
                        list(warnings.filters),
                        rank,
                        world_size,
                        fn,
                        args,
                    ),
                    name=f"rank{rank}",
                    daemon=True,
                )
                worker.start()
                # Only the worker holds the writing end now: its death closes the pipe.
                writer.close()
                readers.append(reader)
                workers.append(worker)
            results = _collect(readers, workers, deadline, Path(scratch), timeout)
            for worker in workers:
                worker.join(_EXIT_GRACE)
            return results
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
            for reader in readers:
                reader.close()


class Job:
    """Named cases that one job of processes runs in turn: processes start slower than cases run.

    Parameters
    ----------
    world_size : int
        Number of processes.
    timeout : float
        Seconds until the processes are killed.
    """

    def __init__(self, world_size: int, timeout: float = 200) -> None:
        self.world_size, self.timeout = world_size, timeout
        self.cases: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(self, fn: Callable[..., None]) -> Callable[..., None]:
        """Add a case: ``fn(rank, world_size)``, whose asserts hold on each rank."""
        return self.each(())(fn)

    def each(self, *rows: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Add a case ``fn(rank, world_size, *row)`` for each of the rows."""

        def add(fn: Callable[..., None]) -> Callable[..., None]:
            self.cases.update({f"{fn.__name__}{row or ''}": (fn, row) for row in rows})
            return fn

        return add

    def run(self) -> None:
        """Run all; where that fails, each one in a job of its own, to name every wrong one."""
        assert self.cases
        try:
            run_distributed(_in_turn, self.world_size, self.cases, timeout=self.timeout)
        except RankFailure:
            failures = {name: self._failure_of(name) for name in self.cases}
            wrong = [f"{name}: {text}" for name, text in failures.items() if text]
            if not wrong:
                raise
            raise AssertionError("\n".join(wrong)) from None

    def _failure_of(self, name: str) -> str:
        try:
            run_distributed(_in_turn, self.world_size, {name: self.cases[name]})
        except RankFailure as failure:
            return str(failure)
        return ""


def _in_turn(
    rank: int, world_size: int, cases: dict[str, tuple[Callable[..., None], tuple[Any, ...]]]
) -> None:
    """Cases one after the other, each with the random numbers of a new process."""
    for fn, row in cases.values():
        random.seed(0)
        torch.manual_seed(0)
        fn(rank, world_size, *row)


def run_script(
    script: Path,
    arguments: Sequence[str],
    processes: int,
    where: Path,
    warn_by: Any = "default",
    timeout: float = 200,
) -> subprocess.CompletedProcess[str]:
    """Run a script as ``torchrun`` does, or as ``python`` does for 0 processes; but forked.

    The first rank that fails ends the others. Gives the status, and what all of them printed.
    """
    port = free_port()
    workers: list[ForkServerProcess] = []
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="slapo-script-") as scratch:
        out, err = Path(scratch, "out"), Path(scratch, "err")
        environments = [launched(rank, processes, port) for rank in range(processes)]
        try:
            for environment in environments or [{}]:
                given = (
                    str(script),
                    list(arguments),
                    environment,
                    str(where),
                    warn_by,
                    str(out),
                    str(err),
                )
                workers.append(context().Process(target=_be_script, args=given))
                workers[-1].start()
            waiting = list(workers)
            status = 0
            while waiting and status == 0 and time.monotonic() < deadline:
                connection.wait([worker.sentinel for worker in waiting], 1.0)
                status = next((w.exitcode for w in waiting if w.exitcode), 0)
                waiting = [worker for worker in waiting if worker.exitcode is None]
            if waiting and status == 0:
                raise TimeoutError(f"{script.name} did not end in {timeout} s: {err.read_text()}")
            for worker in waiting:
                worker.join(1.0)  # the others may have something to say of it
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        command = [str(script), *arguments]
        return subprocess.CompletedProcess(command, status, out.read_text(), err.read_text())


def _be_script(
    script: str,
    arguments: list[str],
    environment: dict[str, str],
    where: str,
    warn_by: Any,
    out: str,
    err: str,
) -> None:
    """Life of one process of a script."""
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(where)
    os.environ.update(environment)
    warnings.resetwarnings()
    warnings.simplefilter(warn_by)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def launched(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher sets in the environment of a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_PORT": str(port),
        "MASTER_ADDR": "127.0.0.1",
    }


def free_port() -> int:
    """A port for a store that starts later.

    It lies below those that the system gives away, since another socket would get one of these
    before the ranks have started.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def context() -> multiprocessing.context.ForkServerContext:
    """Return the context whose server has imported what the ranks need."""
    found = multiprocessing.get_context("forkserver")
    preload = ["pytest"]
    # In a run of the whole suite, what any test needs: conftest.py starts the server before all.
    is_whole = "PYTEST_XDIST_WORKER" in os.environ
    for package, parts in _COSTLY.items():
        if package in sys.modules or (is_whole and importlib.util.find_spec(package)):
            preload += [package, *parts]
    preload += sorted(name for name in sys.modules if name.startswith("transformers.models."))
    preload += ["tests.warm"] if "transformers" in preload else []
    # Has an effect until the server runs, at the latest from the first job on.
    found.set_forkserver_preload(preload)
    return found


def _collect(
    readers: list[connection.Connection],
    workers: list[ForkServerProcess],
    deadline: float,
    scratch: Path,
    timeout: float,
) -> list[Any]:
    """Wait for a report of every rank; raise at the first failure."""
    waiting = {id(reader): rank for rank, reader in enumerate(readers)}
    results: dict[int, Any] = {}
    while waiting:
        pending = [readers[rank] for rank in waiting.values()]
        ready = connection.wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise _timed_out(sorted(waiting.values()), scratch, timeout)
        ranks = [waiting.pop(id(reader)) for reader in ready]
        reports = [_receive(rank, readers[rank], workers[rank]) for rank in ranks]
        _raise_first_failure(reports)
        results.update({report.rank: report.result for report in reports})
    return [results[rank] for rank in range(len(readers))]


def _receive(rank: int, reader: connection.Connection, worker: ForkServerProcess) -> _Report:
    """Return what ``rank`` has sent, or a report of its death."""
    try:
        return pickle.loads(reader.recv_bytes())  # type: ignore[no-any-return]
    except EOFError:
        worker.join(_EXIT_GRACE)
        text = f"the process ended with exit code {worker.exitcode} and without a report"
        return _Report(rank, time.monotonic(), error="ProcessDied", text=text)


def _raise_first_failure(reports: list[_Report]) -> None:
    """Raise for the failure that came first; those after it are often its consequences."""
    failures = [report for report in reports if report.error]
    if failures:
        first = min(failures, key=lambda report: report.at)
        raise RankFailure(first.rank, first.error, f"rank {first.rank} failed:\n{first.text}")


def _timed_out(ranks: list[int], scratch: Path, timeout: float) -> RankFailure:
    """Return the failure that says where the ranks hung."""
    # A rank that started late, as on a busy machine, leaves its note late too.
    patience = time.monotonic() + 0.2 * timeout + _EXIT_GRACE
    while time.monotonic() < patience and not all(_stack(scratch, rank) for rank in ranks):
        time.sleep(0.05)
    stacks = [f"rank {rank}:\n{_stack(scratch, rank)}" for rank in ranks]
    message = f"ranks {ranks} did not finish within {timeout} s\n" + "\n".join(stacks)
    return RankFailure(ranks[0], "TimeoutError", message)


def _stack(scratch: Path, rank: int) -> str:
    """Where a rank stood, once it has written all of it; else nothing."""
    text = _stack_file(scratch, rank).read_text()
    return text if text.endswith("\n") else ""


def _stack_file(scratch: Path, rank: int) -> Path:
    path = scratch / f"stack{rank}"
    path.touch()
    return path


def _work(
    writer: connection.Connection,
    scratch: str,
    timeout: float,
    filters: list[Any],
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Life of one rank."""
    # The test's own: a warning that is an error there is one here.
    warnings.resetwarnings()
    warnings.filters.extend(filters)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    with _stack_file(Path(scratch), rank).open("w") as stack:
        # Shortly before the parent gives up, leave a note of where this rank stands.
        faulthandler.dump_traceback_later(0.9 * timeout, file=stack)
        try:
            store = dist.FileStore(f"{scratch}/store", world_size)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            result = fn(rank, world_size, *args)
            # By value: `Connection.send` would pass tensors as handles that die with this process.
            writer.send_bytes(pickle.dumps(_Report(rank, time.monotonic(), result)))
            # A rank that leaves early can abort the others' connections.
            dist.barrier()
            dist.destroy_process_group()
        except BaseException as error:
            report = _Report(
                rank, time.monotonic(), None, type(error).__name__, traceback.format_exc()
            )
            # The pipe is broken when the parent has given up on the job already.
            with contextlib.suppress(OSError):
                writer.send_bytes(pickle.dumps(report))
        finally:
            faulthandler.cancel_dump_traceback_later()
            writer.close()
