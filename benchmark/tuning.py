"""The tuner on this machine: all points of a space measured, and what a search finds among them.

Every point of ``tuning_space.py`` is trained in processes of its own, and again if other programs
took much of the machine meanwhile; the run that they disturbed least counts. The searches then
look values up in place of running processes, so that each of their trials can be set against the
best point that there is. Runs are kept as they end, in ``tuning_points.csv``, until all is written:
a benchmark that was cut off goes on.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import report
from benchmark.measure import Progress, Result, Target, kendall_tau, on_ranks, quiet
from benchmark.tuning_ranks import Run, busy_seconds, train_main
from benchmark.tuning_space import TINY, WORK, Work, machines, predict_for, ranks_of, space
from slapo.autotune import point_key, tune
from slapo.autotune.space import Point, survey
from slapo.cost import Machine

#: A point is run again, so often at most, until others take less than this share of the cores.
PASSES, QUIET = 3, 0.05
#: Seconds that a run waits for others to be done.
PATIENCE = 30.0
SEEDS = range(5)
#: Share of the space that a search may run, and how far from the best point it may end.
SHARE, NEAR = 0.1, 0.05
#: 1 - Kendall's tau between predicted and measured speed.
DISORDER = 0.3
POINTS, SEARCHES = "tuning_points.csv", "tuning_searches"
WAYS = {"predictions": True, "sampler alone": False}


@dataclass(frozen=True)
class _RecipeRun:
    """What to run, and where to keep it."""

    space: Callable[..., dict[str, Any]]
    work: Work
    passes: int
    seeds: Sequence[int]
    calibration: float
    folder: Path
    patience: float = PATIENCE


def quick_space(choose: Callable[[str, list[Any]], Any]) -> dict[str, Any]:
    """Four of the points."""
    wanted = {"layout": ["one", "replicas"], "attention": ["eager", "sdpa"]}
    return space(lambda name, values: choose(name, wanted.get(name, values[:1])))


def run(quick: bool, progress: Progress, folder: Path = report.RESULTS) -> Result:
    """Measure all points, then search them.

    Parameters
    ----------
    quick
        Four points of a tiny model, which are not kept.
    progress
        Gets a line for each point.
    folder
        Where runs and the machine's numbers are kept.
    """
    result = Result()
    missing = [name for name in ("transformers", "optuna") if not importlib.util.find_spec(name)]
    if missing:
        progress(f"left out: {' and '.join(missing)} not installed")
        return result
    if not quick:
        return _run(_RecipeRun(space, WORK, PASSES, SEEDS, 20.0, folder), progress, result)
    with tempfile.TemporaryDirectory() as scratch:
        job = _RecipeRun(quick_space, TINY, 1, SEEDS[:1], 0.5, Path(scratch), patience=0.0)
        return _run(job, progress, result)


def _run(job: _RecipeRun, progress: Progress, result: Result) -> Result:
    with quiet():
        return _searched(job, progress, result)


def _searched(job: _RecipeRun, progress: Progress, result: Result) -> Result:
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401  # so that processes start with it

    points = survey(job.space).points
    here = machines(job.folder / "tuning_machines.json", progress, job.calibration)
    measured = measure_all(points, job, progress)
    predicted = predict_all(points, job, here, progress)
    for point in points:
        found, guess = measured[point.key], predicted[point.key]
        result.rows.append(
            {
                **_columns(point, points),
                "predicted": round(guess.throughput, 3),
                "predicted_memory_mib": round(guess.memory / 2**20, 1),
                "samples_per_s": round(found, 3),
                "error": round(guess.throughput / found - 1, 4),
            }
        )
    searches = [
        row
        for way, with_predictions in WAYS.items()
        for seed in job.seeds
        for row in search(points, job, measured, predicted if with_predictions else None, way, seed)
    ]
    runs = job.folder / POINTS
    for name, table in {SEARCHES: searches, "tuning_runs": _read(runs)}.items():
        report.write(name, Result(table), "python -m benchmark tuning", job.folder)
    runs.unlink()  # it is complete: the next run measures anew
    result.targets += _targets(result.rows, searches, progress)
    return result


def _columns(point: Point, points: Sequence[Point]) -> dict[str, Any]:
    """The values of a point; empty where it has none, as all rows have the same columns."""
    names = dict.fromkeys(name for each in points for name in each.values)
    return {name: point.values.get(name, "") for name in names}


# --- every point ---------------------------------------------------------------------------------
def predict_all(
    points: Sequence[Point], job: _RecipeRun, here: Mapping[int, Machine], progress: Progress
) -> dict[str, Any]:
    """Key of a point -> its dry run."""
    start = time.perf_counter()
    found = {}
    for number, point in enumerate(points, 1):
        found[point.key] = predict_for(point.values, job.work, here)
        if number % 20 == 0 or number == len(points):
            spent = time.perf_counter() - start
            progress(f"{number} of {len(points)} points predicted in {spent:.0f} s")
    return found


def measure_all(points: Sequence[Point], job: _RecipeRun, progress: Progress) -> dict[str, float]:
    """Key of a point -> samples per second, of its quietest run; rows are kept one by one."""
    path = job.folder / POINTS
    kept = read_points(path)
    if kept:
        count = sum(map(len, kept.values()))
        progress(f"{count} runs are kept in {path}; delete it to measure them again")
    for turn in range(job.passes):
        left = [p for p in _shuffled(points, turn) if _is_missing(kept.get(p.key, []), turn)]
        start = time.perf_counter()
        for number, point in enumerate(left, 1):
            ranks = ranks_of(point.values)
            _wait_for_others(job.patience)
            run = on_ranks(ranks, train_main, (ranks, point.values, job.work), progress)
            speed = run.throughput(job.work)
            _append(path, point, run, speed)
            kept.setdefault(point.key, []).append((run.others, speed))
            remaining = (time.perf_counter() - start) / number * (len(left) - number)
            progress(
                f"pass {turn + 1}, {number} of {len(left)}: {speed:.1f} samples/s, others "
                f"{run.others:.0%}, {_words(point)}; {remaining / 60:.1f} minutes of it remain"
            )
    return {point.key: min(kept[point.key])[1] for point in points}


def _wait_for_others(patience: float) -> None:
    """Until they leave the cores alone for a moment, or the patience ends."""
    moment, end = 0.4, time.perf_counter() + patience
    while time.perf_counter() < end:
        before = busy_seconds()
        time.sleep(moment)
        if busy_seconds() - before <= 2 * QUIET * moment * (os.cpu_count() or 1):
            return


def _is_missing(runs: Sequence[tuple[float, float]], turn: int) -> bool:
    return len(runs) <= turn and all(others > QUIET for others, _ in runs)


def _shuffled(points: Sequence[Point], seed: int) -> list[Point]:
    """Each pass in another order, so that busy minutes of the machine meet all kinds of points."""
    mixed = list(points)
    random.Random(seed).shuffle(mixed)
    return mixed


def _words(point: Point) -> str:
    return ", ".join(f"{name} {value}" for name, value in point.choices.items())


def _append(path: Path, point: Point, run: Run, speed: float) -> None:
    row = {
        "point": point.key,
        "samples_per_s": round(speed, 4),
        "step_ms": round(1e3 * median(run.seconds), 3),
        "least_ms": round(1e3 * min(run.seconds), 3),
        "most_ms": round(1e3 * max(run.seconds), 3),
        "others": round(run.others, 4),
    }
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def read_points(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Key of a point -> what others took, and samples per second, of each run so far."""
    found: dict[str, list[tuple[float, float]]] = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                key = point_key(json.loads(row["point"]))
                figures = float(row["others"]), float(row["samples_per_s"])
                found.setdefault(key, []).append(figures)
    return found


# --- searches ------------------------------------------------------------------------------------
def search(
    points: Sequence[Point],
    job: _RecipeRun,
    measured: Mapping[str, float],
    predicted: Mapping[str, Any] | None,
    way: str,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """A row for each trial of a search on what was measured; without predictions, of all points."""
    found = tune(
        job.space,
        run=lambda values: measured[point_key(values)],
        predict=None if predicted is None else lambda values: predicted[point_key(values)],
        trials=limit_of(len(points)) if predicted is not None else len(points),
        seed=seed,
    )
    best, top = 0.0, max(measured.values())
    for number, trial in enumerate((t for t in found.trials if t.result is not None), 1):
        best = max(best, trial.result or 0.0)
        yield {
            "way": way,
            "seed": seed,
            "trial": number,
            "samples_per_s": trial.result,
            "of_best": round(best / top, 4),
        }


def limit_of(size: int) -> int:
    """Trials that a search may run of a space."""
    return max(1, math.floor(SHARE * size))


def first_near(rows: Sequence[Mapping[str, Any]], way: str) -> list[float]:
    """For each seed the first trial that is near the best; infinite if there was none."""
    seeds = sorted({row["seed"] for row in rows if row["way"] == way})
    return [
        min(
            (
                float(row["trial"])
                for row in rows
                if row["way"] == way and row["seed"] == seed and float(row["of_best"]) >= 1 - NEAR
            ),
            default=math.inf,
        )
        for seed in seeds
    ]


def _targets(
    rows: Sequence[Mapping[str, Any]], searches: Sequence[Mapping[str, Any]], progress: Progress
) -> list[Target]:
    found = {way: first_near(searches, way) for way in WAYS}
    for way, trials in found.items():
        shown = ", ".join(f"{trial:.0f}" for trial in trials)
        progress(f"{way}: within {NEAR:.0%} of the best at trial {shown} of {len(rows)} points")
    tau = kendall_tau([r["predicted"] for r in rows], [r["samples_per_s"] for r in rows])
    size = len(rows)
    return [
        Target(
            f"with predictions, {size} points: trial of the worst seed that is within {NEAR:.0%}",
            max(found["predictions"]),
            limit_of(size),
        ),
        Target("1 - Kendall's tau, predicted and measured speed", 1 - tau, DISORDER),
    ]


# --- plot ----------------------------------------------------------------------------------------
def plot(directory: Path) -> Path | None:
    """Draw ``tuning.png``: best so far over the trials, and predicted against measured speed.

    Returns
    -------
    Path or None
        The picture; None without the files or without matplotlib (``pip install slapo[examples]``).
    """
    sources = [directory / "tuning.csv", directory / f"{SEARCHES}.csv"]
    there = all(source.exists() for source in sources)
    if not there or importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot as plt

    rows, searches = map(_read, sources)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    _draw_searches(left, searches, len(rows))
    _draw_points(right, rows)
    path = directory / "tuning.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _draw_searches(axes: Any, rows: Sequence[Mapping[str, str]], size: int) -> None:
    for color, way in enumerate(WAYS):
        for seed in sorted({row["seed"] for row in rows}):
            line = [row for row in rows if row["way"] == way and row["seed"] == seed]
            axes.step(
                [int(row["trial"]) for row in line],
                [float(row["of_best"]) for row in line],
                where="post",
                color=f"C{color}",
                alpha=0.7,
                label=way if seed == rows[0]["seed"] else None,
            )
    axes.axhline(1 - NEAR, color="gray", linestyle=":", label=f"within {NEAR:.0%} of the best")
    axes.axvline(limit_of(size), color="gray", linewidth=0.8, label=f"{SHARE:.0%} of the points")
    axes.set(xlabel="trials", ylabel="best so far, to the best point", xscale="log")
    axes.set_title(f"Searches of {size} points, a line for each seed", fontsize="medium")
    axes.legend(fontsize="small")


def _draw_points(axes: Any, rows: Sequence[Mapping[str, str]]) -> None:
    kinds = {(tp, pp, dp): f"tp {tp}, pp {pp}, dp {dp}" for tp, pp, dp in map(_layout, rows)}
    for layout, label in kinds.items():
        inside = [row for row in rows if _layout(row) == layout]
        axes.plot(
            [float(row["samples_per_s"]) for row in inside],
            [float(row["predicted"]) for row in inside],
            linestyle="none",
            marker="o",
            markersize=4,
            label=label,
        )
    ends = [
        f(float(r[c]) for r in rows for c in ("samples_per_s", "predicted")) for f in (min, max)
    ]
    axes.plot(ends, ends, color="gray", linewidth=0.8)
    axes.set(xlabel="measured samples/s", ylabel="predicted samples/s")
    axes.set_title("Every point", fontsize="medium")
    axes.legend(fontsize="small")


def _layout(row: Mapping[str, str]) -> tuple[str, str, str]:
    return row["tp"], row["pp"], row["dp"]
