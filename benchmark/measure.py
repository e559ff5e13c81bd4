"""Clocks, and what a benchmark hands back."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeVar

T = TypeVar("T")

#: Called with a line of text after each measurement.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """A figure that a benchmark promises.

    Parameters
    ----------
    what
        The figure in words.
    value, limit
        Measured, and at most.
    unit
        Of both; empty for a ratio.
    """

    what: str
    value: float
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        unit = f" {self.unit}" if self.unit else ""
        return f"{verdict:6} {self.what}: {self.value:.3g}{unit}, at most {self.limit:.3g}{unit}"


@dataclass
class Result:
    """What a benchmark measured.

    Parameters
    ----------
    rows
        Lines of its CSV file, all with the same columns.
    targets
        Figures derived from them.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


@dataclass(frozen=True)
class Times:
    """Seconds of processor time and of time passed. Others on the machine disturb the second."""

    cpu: float
    wall: float


def timed(run: Callable[[], T], collect: bool = True) -> tuple[Times, T]:
    """Call `run`; with `collect`, garbage of earlier measurements is collected before it."""
    if collect:
        gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    value = run()
    return Times(time.process_time() - cpu, time.perf_counter() - wall), value


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Agreement of two orders, from -1 to 1: pairs in the same order less others, over all pairs.

    Kendall 1938, "A New Measure of Rank Correlation".

    >>> kendall_tau([1, 2, 3], [10, 30, 20])
    0.3333333333333333
    """
    pairs = list(combinations(zip(one, other, strict=True), 2))
    products = [(a - c) * (b - d) for (a, b), (c, d) in pairs]
    return sum((p > 0) - (p < 0) for p in products) / len(pairs)


def forkserver(*modules: str) -> multiprocessing.context.ForkServerContext:
    """Processes out of one that has imported what this has: else each takes seconds.

    Parameters
    ----------
    modules
        Others that they need.
    """
    packages = ("torch.distributed", "transformers", "slapo", "deepspeed")
    here = [name for name in sys.modules if name.startswith(packages)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", *modules, *here])
    return context


def on_ranks(
    world: int, main: Callable[..., None], arguments: tuple[Any, ...], say: Progress
) -> Any:
    """Run ``main(rank, *arguments, store, pipe)`` in so many processes.

    Parameters
    ----------
    world
        Number of processes.
    main
        A function at the top level of a module. `store` is the path of a file for a ``FileStore``;
        through `pipe` rank 0 sends lines of text, which are shown, and at the end its result.
    arguments
        Passed on.
    say
        Gets the lines.

    Returns
    -------
    The result.
    """
    context = forkserver()
    reader, writer = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [
            context.Process(
                target=main, args=(rank, *arguments, f"{scratch}/store", writer), daemon=True
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        writer.close()
        try:
            while isinstance(message := reader.recv(), str):
                say(message)
            for process in ranks:
                process.join()
        except EOFError:
            raise RuntimeError("a rank ended without a result; see what it printed") from None
        finally:
            for process in ranks:
                process.kill()
    return message
