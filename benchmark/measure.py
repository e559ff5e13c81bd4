"""Clocks, and what a benchmark hands back."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
