"""Events and result of a search, printed as lines, a table and a plot."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo.autotune.space import Point
from slapo.autotune.trial import Trial

#: Number of trials in the table, and seconds between lines about predictions.
_ROWS, _PAUSE = 10, 10.0


@dataclass(frozen=True)
class Result:
    """The result of a search.

    Attributes
    ----------
    best
        Trial with the largest result; None without results.
    trials
        All trials of this space in the database, in order.
    size
        Number of points of the space; an estimate above a few thousand.
    refused
        Reason -> number of points or branches that the space refused.
    does_not_fit
        Number of points with a predicted memory above the capacity.
    command
        Shell command that runs the best point; empty without one.
    metric
        Name of the maximized figure.
    foreign
        Number of trials in the database with points of another space; they are not in `trials`.

    Examples
    --------
    >>> from slapo.autotune import tune
    >>> found = tune(lambda choose: {"a": choose("a", [1, 2])}, run=lambda point: point["a"])
    >>> found.size, found.best.result, found.refused
    (2, 2.0, {})
    """

    best: Trial | None
    trials: list[Trial]
    size: int
    refused: dict[str, int]
    does_not_fit: int
    command: str
    metric: str
    foreign: int = 0


class Progress:
    """Prints the events of a search to standard error."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def predicted(self, done: int, total: int) -> None:
        """Report the number of predicted points."""
        if done == total or time.monotonic() - self._last > _PAUSE:
            self._last = time.monotonic()
            self._say(f"predicted {done} of {total} points")

    def started(self, point: Point, done: int, total: int) -> None:
        """Report the start of a trial."""
        self._say(f"[{done + 1}/{total}] runs {_words(point.values)}")

    def ended(self, trial: Trial, best: Trial | None, done: int, total: int) -> None:
        """Report the end of a trial, or a point that is not run."""
        found = trial.outcome if trial.result is None else f"{trial.result:.4g}"
        why = f" ({trial.reason})" if trial.reason else ""
        top = "" if best is None or best.result is None else f"; best {best.result:.4g}"
        head = f"[{done}/{total}]" if trial.is_run else "[not run]"
        self._say(f"{head} {_words(trial.values)}: {found}{why}{top}")

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _words(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def summary(result: Result) -> str:
    """Return a table of the best trials, counts of the outcomes, and the best point's command."""
    measured = [trial for trial in result.trials if trial.result is not None]
    measured.sort(key=lambda trial: -(trial.result or 0.0))
    lines = [_table(measured[:_ROWS], result.metric)] if measured else []
    # For repeated points only the last trial counts.
    run = list({trial.key: trial for trial in result.trials if trial.is_run}.values())
    kinds = Counter(trial.outcome for trial in run)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    lines.append(f"{len(run)} trials of {result.size} points: {counts or 'none run'}")
    if result.does_not_fit:
        lines.append(f"{result.does_not_fit} points are predicted not to fit")
    for reason, number in Counter(result.refused).most_common(3):
        lines.append(f"{number} refused: {reason}")
    if result.foreign:
        lines.append(f"{result.foreign} trials of the database belong to another space")
    if not measured:
        firsts = {trial.outcome: trial for trial in reversed(run)}
        lines.append("no trial gave a result")
        lines += [f"{k}, trial {t.number}: {t.reason} {t.log}".rstrip() for k, t in firsts.items()]
    if result.command:
        lines += ["", "the best again:", result.command]
    return "\n".join(lines)


def _table(trials: Sequence[Trial], metric: str) -> str:
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    is_predicted = any(trial.predicted for trial in trials)
    rows = [["trial", metric, *(["predicted"] if is_predicted else []), *names]]
    for trial in trials:
        row = [str(trial.number), f"{trial.result:.4g}"]
        if is_predicted:
            row.append(f"{trial.predicted.throughput:.4g}" if trial.predicted else "")
        rows.append(row + [str(trial.values.get(name, "")) for name in names])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[text.rjust(n) for text, n in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(row) for row in aligned)


#: Outcome -> marker and color in the plot; other outcomes are gray.
_MARKS = {"ok": ("o", "tab:blue"), "out_of_memory": ("X", "tab:red")}


def save_plot(result: Result, path: str | Path) -> None:
    """Plot each trial's figure in order and, with predictions, against the predicted one."""
    from matplotlib.figure import Figure

    run = [trial for trial in result.trials if trial.is_run]
    pairs = [(t.predicted.throughput, t.result) for t in run if t.predicted and t.result]
    figure = Figure(figsize=(11 if pairs else 6, 4.5), layout="constrained")
    left, *right = figure.subplots(1, 2 if pairs else 1, squeeze=False)[0]
    for kind in dict.fromkeys(trial.outcome for trial in run):
        marks = [(n, t.result or 0.0) for n, t in enumerate(run, 1) if t.outcome == kind]
        marker, color = _MARKS.get(kind, ("x", "gray"))
        label = kind.replace("_", " ")
        left.scatter(*zip(*marks, strict=True), s=24, label=label, marker=marker, color=color)
    left.set(xlabel="trial", ylabel=result.metric)
    left.legend(fontsize="small", loc="lower right")
    for axes in right:
        axes.axline((0, 0), slope=1, color="lightgray")
        axes.scatter(*zip(*pairs, strict=True), s=16)
        axes.set(xlabel=f"predicted {result.metric}", ylabel=f"measured {result.metric}")
    figure.savefig(path, dpi=120)
