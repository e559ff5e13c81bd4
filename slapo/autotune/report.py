"""The output of a search: progress, table, plot."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from slapo.autotune.database import Trial
from slapo.autotune.search import Result
from slapo.autotune.space import Point

_ROWS = 10
_COLOURS = {
    "ok": "tab:blue",
    "out_of_memory": "tab:red",
    "crash": "black",
    "timeout": "tab:orange",
    "wrong_schedule": "tab:purple",
    "no_result": "tab:gray",
    "garbage": "tab:brown",
    "refused": "tab:pink",
}


class Progress:
    """A line for each trial, and on a terminal a bar with the best result so far."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar = _bar(self._stream)
        self._task: Any = None
        self._best = ""

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def predicted(self, done: int, total: int) -> None:
        """`done` of `total` points have their prediction."""
        self._show("predicting", done, total)
        if done == total:
            self._say(f"predicted {total} points")

    def started(self, point: Point, done: int, total: int) -> None:
        """A trial starts."""
        self._show(f"{self._best}running {words(point.values)}", done, total)

    def ended(self, trial: Trial, best: Trial | None, done: int, total: int) -> None:
        """A trial ended, or a point was judged that does not run."""
        what = trial.outcome if trial.result is None else f"{trial.result:.4g}"
        why = f" ({trial.reason})" if trial.reason else ""
        top = "" if best is None or best.result is None else f"; best {best.result:.4g}"
        head = f"[{done}/{total}]" if trial.is_run else "[not run]"
        self._say(f"{head} {words(trial.values)}: {what}{why}{top}")
        self._best = f"{top[2:]}, " if top else ""
        self._show(top[2:], done, total)

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            # The reader may leave, as head does; the search continues.
            with contextlib.suppress(BrokenPipeError):
                print(line, file=self._stream, flush=True)

    def _show(self, text: str, done: int, total: int) -> None:
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(text, total=total)
        self._bar.update(self._task, description=text[:60], completed=done, total=total)


def _bar(stream: TextIO) -> Any:
    if not stream.isatty():
        return None
    with contextlib.suppress(ImportError):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        return Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream),
        )
    return None


def words(values: Mapping[str, Any]) -> str:
    """A point in a line."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def summary(result: Result) -> str:
    """Table of the best trials, counts of the outcomes, and the command of the best point."""
    measured = [trial for trial in result.trials if trial.result is not None]
    measured.sort(key=lambda trial: -(trial.result or 0.0))
    lines = [_table(measured[:_ROWS], result.metric)] if measured else []
    # The last trial of a point that ran again.
    run = list({trial.key: trial for trial in result.trials if trial.is_run}.values())
    kinds = Counter(trial.outcome for trial in run)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    lines.append(f"{len(run)} trials of {result.size} points: {counts or 'none run'}")
    if result.does_not_fit:
        lines.append(f"{result.does_not_fit} points do not fit by their prediction")
    for reason, number in Counter(result.refused).most_common(3):
        lines.append(f"{number} refused: {reason}")
    if result.foreign:
        lines.append(f"{result.foreign} trials of the database are of points of another space")
    if not measured:
        lines += ["no trial gave a result", *_failures(run)]
    if result.command:
        lines += ["", "the best again:", result.command]
    return "\n".join(lines)


def _failures(run: Sequence[Trial]) -> list[str]:
    """One trial of each kind of failure."""
    firsts = {trial.outcome: trial for trial in reversed(run)}
    return [f"{kind}, trial {t.number}: {t.reason} {t.log}".rstrip() for kind, t in firsts.items()]


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


def save_plot(result: Result, path: Path) -> None:
    """Draw the results in order and, with predictions, predicted against measured figures."""
    from matplotlib.figure import Figure

    run = [trial for trial in result.trials if trial.is_run]
    pairs = [(t.predicted.throughput, t.result) for t in run if t.predicted and t.result]
    figure = Figure(figsize=(11 if pairs else 6, 4.5), layout="constrained")
    axes = figure.subplots(1, 2 if pairs else 1, squeeze=False)[0]
    _draw_order(axes[0], run, result.metric)
    if pairs:
        top = max(max(pair) for pair in pairs) * 1.05
        axes[1].plot([0, top], [0, top], color="lightgray")
        axes[1].scatter(*zip(*pairs, strict=True), s=16)
        axes[1].set(xlabel=f"predicted {result.metric}", ylabel=f"measured {result.metric}")
    figure.savefig(path, dpi=120)


def _draw_order(axes: Any, run: Sequence[Trial], metric: str) -> None:
    for kind in dict.fromkeys(trial.outcome for trial in run):
        marks = [(n, t.result or 0.0) for n, t in enumerate(run, 1) if t.outcome == kind]
        style = {"s": 16, "color": _COLOURS[kind], "marker": "o" if kind == "ok" else "x"}
        axes.scatter(*zip(*marks, strict=True), label=kind, **style)
    best, line = math.nan, []
    for trial in run:
        if trial.result is not None and not best >= trial.result:
            best = trial.result
        line.append(best)
    axes.plot(
        range(1, len(line) + 1), line, color="tab:green", drawstyle="steps-post", label="best"
    )
    axes.set(xlabel="trial", ylabel=metric)
    axes.legend(fontsize="small")
