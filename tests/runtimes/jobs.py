"""Jobs of ordinary processes, whose ends and last words a test looks at."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.distributed import context, free_port, launched

WORLD = 3


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a job ended: exit codes, what they printed, and when."""

    codes: list[int | None]
    texts: list[str]
    seconds: list[float]


def _life(rank: int, port: int, folder: str, job: Callable[[int], None]) -> None:
    """One rank: an ordinary process whose standard error goes to a file."""
    # Left open: what ends the process is written after this function.
    sys.stderr = Path(folder, f"stderr{rank}").open("w", buffering=1)  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(launched(rank, WORLD, port))
    job(rank)


def run_job(
    folder: Path, job: Callable[[int], None], limit: float = 150, hanging: int | None = None
) -> Outcome:
    """Run ``job(rank)`` in each process of a job with a TCPStore that rank 0 keeps.

    One that is `hanging` is killed once the others have ended.
    """
    server = context()
    port = free_port()
    workers: list[Any] = [
        server.Process(target=_life, args=(rank, port, str(folder), job)) for rank in range(WORLD)
    ]
    for worker in workers:
        worker.start()
    start, ended = time.monotonic(), [0.0] * WORLD
    awaited = [rank for rank in range(WORLD) if rank != hanging]
    while time.monotonic() < start + limit and not all(ended[rank] for rank in awaited):
        for rank, worker in enumerate(workers):
            if not ended[rank] and worker.exitcode is not None:
                ended[rank] = time.monotonic() - start
        time.sleep(0.05)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
        worker.join()
    return Outcome(codes, [(folder / f"stderr{r}").read_text() for r in range(WORLD)], ended)
