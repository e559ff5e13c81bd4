"""The ranks of ``python -m benchmark train``: start, measure, say how it ended."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import slapo
from benchmark.measure import forkserver, peak_of, profiled_peak_of
from benchmark.train_options import Refused, TrainOptions
from benchmark.train_side import Side
from benchmark.train_sides import make_side

OK, OUT_OF_MEMORY, REFUSED, FAILED, TIMEOUT = "ok", "out_of_memory", "refused", "failed", "timeout"
#: Of several ranks' words, the first of these says why the others ended.
_FIRST = (OUT_OF_MEMORY, REFUSED, FAILED)
#: For which a rank's peers may still say how they ended.
_GRACE = 2.0
_NO_FIGURES = dict.fromkeys(
    ("step_ms", "throughput", "tokens_s", "peak_mib", "parameters", "loss"), ""
)
#: What a rank imports anyway, once for all that are started.
_PRELOADED = ("benchmark.train_ranks", "transformers.modeling_layers")

Row = dict[str, Any]


def without_figures(outcome: str, reason: str) -> Row:
    """Of a point that did not end well."""
    return {"outcome": outcome, "reason": reason, **_NO_FIGURES}


# --- one rank ------------------------------------------------------------------------------------
def measured(options: TrainOptions) -> Row:
    """Outcome, reason and figures of this rank's job; what fails is a row too."""
    if options.device == "cpu":
        torch.set_num_threads(_threads(options))
    stage = "making"
    try:
        with _memory_limit(options):
            mesh = slapo.init_mesh(
                pp=options.pp, dp=options.dp, tp=options.tp, device=options.device
            )
            side = make_side(options, mesh)
            stage = "stepping"
            return {"outcome": OK, "reason": "", **_figures(options, side)}
    except Exception as error:
        refusals = (Refused, ValueError, slapo.SlapoError) if options.is_ours else (Refused,)
        is_refusal = isinstance(error, refusals) and (stage == "making")
        return _ended(error, REFUSED if is_refusal else FAILED)


def _threads(options: TrainOptions) -> int:
    """A share of the cores; small products are faster on one, and others use the machine too."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", options.gpus))
    return 1 if options.small else max(1, (os.cpu_count() or 1) // ranks_here)


def _ended(error: BaseException, otherwise: str) -> Row:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    found = f"{text} {error.__cause__!r}"
    words = ("out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc")
    is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    outcome = OUT_OF_MEMORY if is_memory or any(w in found for w in words) else otherwise
    return without_figures(outcome, text[:400])


@contextlib.contextmanager
def _memory_limit(options: TrainOptions) -> Iterator[None]:
    """So many MiB for this rank, over what it has: its card's share, or the process's data."""
    if not options.memory_limit:
        yield
        return
    size = options.memory_limit * 2**20
    if options.device == "cuda":
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))
        yield
        return
    lines = Path("/proc/self/status").read_text().splitlines()
    taken = 1024 * int(next(line for line in lines if line.startswith("VmData")).split()[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _figures(options: TrainOptions, side: Side) -> Row:
    """Of a rank; step time and loss are rank 0's, peak and parameters of the rank with most."""
    for _ in range(options.warmup):
        side.step()
    is_cuda = options.device == "cuda"
    gc.collect()
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(options.steps):
        dist.barrier()
        start = time.perf_counter()
        loss = side.step()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = _peak(options, side)
    most = torch.tensor([peak, side.parameters], dtype=torch.float64, device=options.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    step = statistics.median(seconds)
    rate = options.batch_size * options.dp / step
    return {
        "step_ms": round(1e3 * step, 3),
        "throughput": round(rate, 3),
        "tokens_s": round(rate * options.seq_len, 1) if options.spec.cls else "",
        "peak_mib": round(most[0].item() / 2**20, 3),
        "parameters": int(most[1].item()),
        "loss": round(_number(loss), 5),
    }


def _peak(options: TrainOptions, side: Side) -> float:
    """CUDA keeps count; on a CPU it takes a step more."""
    if options.device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    is_compiled = options.compile or options.impl == "compile"
    return (profiled_peak_of if is_compiled else peak_of)(side.step, *side.modules)


def _number(loss: Any) -> float:
    if hasattr(loss, "full_tensor"):
        loss = loss.full_tensor()
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


# --- all ranks -----------------------------------------------------------------------------------
def launch(options: TrainOptions, timeout: float, quiet: bool = False) -> Row:
    """Run a point in processes of its own.

    Parameters
    ----------
    options
        Checked ones.
    timeout
        Seconds after which all ranks are ended.
    quiet
        What ranks print is kept for the reason of a rank that dies, and not shown.

    Returns
    -------
    dict
        Outcome, reason and figures.
    """
    context = forkserver(*_PRELOADED)
    with tempfile.TemporaryDirectory() as scratch:
        ends, ranks = [], []
        for rank in range(options.gpus):
            reader, writer = context.Pipe(duplex=False)
            log = f"{scratch}/rank{rank}.log" if quiet else ""
            ranks.append(
                context.Process(target=_rank_main, args=(rank, options, scratch, log, writer))
            )
            ranks[-1].start()
            writer.close()
            ends.append(reader)
        try:
            return _outcome(_words_of(ends, ranks, timeout), timeout, scratch)
        finally:
            for process in ranks:
                process.join(1.0)
                process.kill()


def _words_of(
    ends: list[Connection], ranks: list[multiprocessing.process.BaseProcess], timeout: float
) -> dict[int, Row | int | None]:
    """Each rank's row; the exit code of one that died; None of one that was not heard of."""
    found: dict[int, Row | int | None] = dict.fromkeys(range(len(ends)))
    deadline = time.monotonic() + timeout
    waiting = dict(zip(ends, found, strict=True))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for end in wait(list(waiting), left):
            rank = waiting.pop(end)  # type: ignore[arg-type]
            try:
                found[rank] = end.recv()  # type: ignore[union-attr]
            except EOFError:
                ranks[rank].join(5.0)
                found[rank] = ranks[rank].exitcode or 0
            word = found[rank]
            if not isinstance(word, dict) or word["outcome"] != OK:
                deadline = min(deadline, time.monotonic() + _GRACE)
    return found


def _outcome(found: Mapping[int, Row | int | None], timeout: float, scratch: str) -> Row:
    rows = [word for word in found.values() if isinstance(word, dict)]
    for outcome in _FIRST:
        for row in rows:
            if row["outcome"] == outcome:
                return row
    for rank, word in found.items():
        if isinstance(word, int):
            log = Path(scratch, f"rank{rank}.log")
            tail = " ".join(log.read_text(errors="replace")[-200:].split()) if log.exists() else ""
            killed = "; the kernel kills so where memory is short" if word == -9 else ""
            reason = f"rank {rank} ended with exit code {word}{killed}; {tail}".rstrip("; ")
            return without_figures(FAILED, reason)
    if None in found.values():
        silent = [rank for rank, word in found.items() if word is None]
        reason = f"no response from ranks {silent} for {timeout:.0f} s"
        return without_figures(TIMEOUT, reason)
    return rows[0]


def _rank_main(rank: int, options: TrainOptions, scratch: str, log: str, pipe: Connection) -> None:
    if log:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, sys.stdout.fileno())
        os.dup2(file, sys.stderr.fileno())
    logging.disable(logging.WARNING)
    world = str(options.gpus)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, (str(rank), str(rank), world, world), strict=True))
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo",
        store=dist.FileStore(f"{scratch}/store", options.gpus),
        rank=rank,
        world_size=options.gpus,
        timeout=timedelta(seconds=300),
    )
    row = measured(options)
    pipe.send(row)
    if row["outcome"] == OK:
        dist.barrier()  # of a job in which one has failed, all are ended
    pipe.close()
    # Neither groups nor libraries have anything to say at their end that a figure needs.
    sys.stdout.flush()
    os._exit(0)
