"""How to search, who is told of it, and what was found."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from slapo.autotune.space import Point, TuneError
from slapo.autotune.study import Trial

_STOPS = ("none", "symbol", "all")


class Watcher(Protocol):
    """Is told how a search goes on."""

    def predicted(self, done: int, total: int) -> None:
        """So many points have their prediction."""

    def started(self, point: Point, done: int, total: int) -> None:
        """A trial runs now."""

    def ended(self, trial: Trial, best: Trial | None, done: int, total: int) -> None:
        """A trial, or the look at a point that is not run, ended."""


@dataclass(frozen=True)
class Result:
    """What a search found.

    Attributes
    ----------
    best
        The trial with the largest result; None if no trial has one.
    trials
        All of the database that are of this space, in order.
    size
        Points of the space; an estimate for more than some thousands.
    refused
        Reason -> how many points or branches of the space it left out.
    does_not_fit
        Points, of those looked at, that need more memory than there is, by their prediction.
    command
        What to type in a shell to run the best point; empty without one, or without a command.
    metric
        What was made large.
    foreign
        Trials in the database of points that are not of this space, and not in `trials`.
    """

    best: Trial | None
    trials: list[Trial]
    size: int
    refused: dict[str, int]
    does_not_fit: int
    command: str
    metric: str
    foreign: int = 0


@dataclass(frozen=True)
class Options:
    """How to search; see :func:`slapo.autotune.tune`."""

    trials: int | None = None
    timeout: float = 1800.0
    seed: int = 0
    metric: str = "throughput"
    error_stop: str = "none"
    grows: Collection[str] | None = None
    retry: bool = False

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise TuneError(f"trials={self.trials}: a search needs at least 1")
        if not 0 < self.timeout < math.inf:
            raise TuneError(f"timeout={self.timeout}: give the seconds that a trial may take")
        if self.seed < 0:
            raise TuneError(f"seed={self.seed}: give a whole number of at least 0")
        if self.error_stop not in _STOPS:
            raise TuneError(f"error_stop={self.error_stop!r}; choose one of {', '.join(_STOPS)}")
