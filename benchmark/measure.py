"""Clocks, and what a benchmark hands back."""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slapo.cost.meter import Meter

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
    """Call `run`; with `collect`, garbage of earlier measurements is collected before it.

    Its own collections do not search the objects of torch and other packages then, which a long
    run would do and a short one would not.
    """
    if collect:
        gc.collect()
        gc.freeze()
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        value = run()
        return Times(time.process_time() - cpu, time.perf_counter() - wall), value
    finally:
        if collect:
            gc.unfreeze()


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Agreement of two orders, from -1 to 1: pairs in the same order less others, over all pairs.

    Kendall 1938, "A New Measure of Rank Correlation".

    >>> kendall_tau([1, 2, 3], [10, 30, 20])
    0.3333333333333333
    """
    pairs = list(combinations(zip(one, other, strict=True), 2))
    products = [(a - c) * (b - d) for (a, b), (c, d) in pairs]
    return sum((p > 0) - (p < 0) for p in products) / len(pairs)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what schedules tell; the process is another's too, which has its log back then."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


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
    world: int,
    main: Callable[..., None],
    arguments: tuple[Any, ...],
    say: Progress,
    modules: Sequence[str] = (),
) -> Any:
    """Run ``main(rank, *arguments, store, pipe)`` in so many processes.

    Parameters
    ----------
    world, arguments
        Number of processes, and what they get.
    main
        A function at the top level of a module. `store` is the path of a file for a ``FileStore``;
        through `pipe` rank 0 sends lines of text, which are shown, and at the end its result.
    say
        Gets the lines.
    modules
        That ranks need, and are imported once for all of them.

    Returns
    -------
    The result.
    """
    context = forkserver(*modules)
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


# --- memory --------------------------------------------------------------------------------------
def peak_of(step: Callable[[], Any], *modules: nn.Module) -> int:
    """Peak bytes of tensors in a step, on any device: what is there before it counts too.

    What code that is compiled makes within is not seen; for that see :func:`profiled_peak_of`.

    Parameters
    ----------
    step
        Is called twice: what the first call meets, such as an optimizer's state and the buckets of
        gradients, is there when the second one starts.
    modules
        Whose parameters and buffers are there all the time.
    """
    with _Alive(*modules, kernels=False) as alive:
        step()
        gc.collect()
        alive.peak = alive.alive
        step()
    return alive.peak


class _Alive(Meter):
    """Counts what operators take, too: what was made before is met when it is used."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Meet the operands, and run the operator."""
        self.hold(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        return super().__torch_dispatch__(func, types, args, kwargs)


def profiled_peak_of(step: Callable[[], Any], *modules: nn.Module) -> int:
    """As :func:`peak_of`, by what the allocator of the CPU says: for code that is compiled.

    It does not see what other threads free.
    """
    # Code that a mode of dispatch has kept from being compiled would stay so.
    with torch.compiler.set_stance("force_eager"), _Alive(*modules, kernels=False) as alive:
        step()
    gc.collect()
    step()
    return alive.alive + allocated(step)


def allocated(run: Callable[[], Any]) -> int:
    """Bytes that the CPU's allocator hands out in a run, at their most, less those given back."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    profiler: Any = found.profiler
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda each: each.start_ns())]
    return int(max(itertools.accumulate(changes, initial=0)))
