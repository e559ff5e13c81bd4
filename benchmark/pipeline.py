"""Idle time of pipeline schedules, measured beside the published formulas.

A rank's work in a step is ``m * (F + B + W)`` for each of its layers: forward, backward of inputs,
backward of weights, of m micro-batches. What a step takes longer is the bubble. In most cases the
layers "compute" by waiting, so that four ranks do not share the two cores of a small machine; at
two ranks there are real matrix products too. Work is measured as well: it is what the waits took
in the very step, or what the products take without a pipeline.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmark.measure import Progress, Result, Target, on_ranks
from benchmark.pipeline_ranks import Case, rank_main

ROUNDS, WARM_UP = 5, 1
#: How far a measured bubble may lie above what the order of work allows.
ALLOWED = 0.05


# --- formulas ------------------------------------------------------------------------------------
def _one_stage(p: int, m: float) -> float:
    return (p - 1) / (m + p - 1)


def _two_stages(p: int, m: float) -> float:
    return (p - 1) / (2 * m + p - 1)


def _two_stages_split(p: int, m: float) -> float:
    return (p - 1) / (6 * m + p - 1)


@dataclass(frozen=True)
class Kind:
    """A pipeline schedule.

    Parameters
    ----------
    stages
        Of each rank.
    bubble
        ``(ranks, micro-batches)`` -> idle share of a step, if F = B = W and messages take no time.
    formula
        The same in words.
    """

    stages: int
    bubble: Callable[[int, float], float]
    formula: str


#: With p ranks, m micro-batches, v stages of each rank:
#: Huang et al. 2019 (GPipe), Narayanan et al. 2019 (1F1B), 2021 (interleaved). Of ZB-H1, Qi et al.
#: 2024, a rank idles for (p-1)(F+B-W), a third of 1F1B's, and here stages have half the size. Of
#: ZB-V it idles not at all between its first and its last work, but rank r begins r F late, and a
#: step lasts from the first rank's begin to the last rank's end, so (p-1)F remain: the same.
KINDS = {
    "gpipe": Kind(1, _one_stage, "(p-1)/(m+p-1)"),
    "1f1b": Kind(1, _one_stage, "(p-1)/(m+p-1)"),
    "interleaved_1f1b": Kind(2, _two_stages, "(p-1)/(2m+p-1)"),
    "zero_bubble": Kind(2, _two_stages_split, "(p-1)/(6m+p-1)"),
    "zbv": Kind(2, _two_stages_split, "(p-1)/(6m+p-1)"),
}

WAITING = "Stages wait a known time instead of computing"
PRODUCTS = "hollow points: real matrix products, m = 8"

#: Computation, ranks, numbers of micro-batches.
JOBS = (("waiting", 2, (2, 4, 8)), ("products", 2, (8,)), ("waiting", 4, (4, 8, 16)))


# --- measurement ---------------------------------------------------------------------------------
def run(quick: bool, progress: Progress) -> Result:
    """Let schedules take steps in turn, in one job for each number of ranks; report medians."""
    jobs = (("waiting", 2, (4,)),) if quick else JOBS
    rounds = 1 if quick else ROUNDS
    result = Result()
    for compute, pp, micro_batches in jobs:
        cases = [
            Case(compute, name, kind.stages, pp, m, *([1e-3] if quick else []))
            for m in micro_batches
            for name, kind in KINDS.items()
        ]
        found = on_ranks(pp, rank_main, (cases, rounds, WARM_UP), progress)
        for case, (steps, span) in zip(cases, found, strict=True):
            row = _row(case, steps, span)
            result.rows.append(row)
            progress(_words(row))
            if compute == "waiting":
                allowed = row["bubble_formula"] if span is None else row["bubble_of_order"]
                excess = row["bubble"] - allowed
                what = f"{case.schedule}, pp={pp}, m={case.micro_batches}: bubble above its order's"
                result.targets.append(Target(what, excess, ALLOWED))
    return result


def _row(case: Case, steps: list[tuple[float, float]], span: float | None) -> dict[str, Any]:
    kind, m = KINDS[case.schedule], case.micro_batches
    bubbles = [1 - work / step for step, work in steps]
    quartiles = quantiles(bubbles, method="inclusive") if len(bubbles) > 1 else bubbles * 3
    return {
        "compute": case.compute,
        "schedule": case.schedule,
        "pp": case.pp,
        "stages_per_rank": case.stages,
        "micro_batches": m,
        "rounds": len(steps),
        "step_ms": round(1e3 * median(step for step, _ in steps), 2),
        "work_ms": round(1e3 * median(work for _, work in steps), 2),
        "bubble": round(quartiles[1], 4),
        "bubble_least": round(min(bubbles), 4),
        "bubble_quarter": round(quartiles[0], 4),
        "bubble_three_quarters": round(quartiles[2], 4),
        "bubble_formula": round(kind.bubble(case.pp, m), 4),
        "bubble_of_order": "" if span is None else round(1 - 3 * kind.stages * m / span, 4),
    }


def _words(row: dict[str, Any]) -> str:
    return (
        f"{row['schedule']}, {row['compute']}, pp={row['pp']}, m={row['micro_batches']}: "
        f"bubble {row['bubble']:.3f}, formula {row['bubble_formula']:.3f}"
    )


# --- plot ----------------------------------------------------------------------------------------
def plot(directory: Path) -> Path | None:
    """Draw ``pipeline.csv`` as ``pipeline.png``: bubbles over the number of micro-batches.

    Returns
    -------
    Path or None
        The picture; None without the file or without matplotlib (``pip install slapo[examples]``).
    """
    source = directory / "pipeline.csv"
    if not source.exists() or importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot as plt

    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    ranks = sorted({int(row["pp"]) for row in rows})
    figure, panels = plt.subplots(
        1,
        len(ranks),
        figsize=(4.6 * len(ranks) + 2, 4.8),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for pp, axes in zip(ranks, panels[0], strict=True):
        _draw(axes, pp, [row for row in rows if int(row["pp"]) == pp])
    panels[0][0].set_ylabel("bubble: idle share of a step")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="small")
    figure.suptitle(
        "Pipeline bubbles: measured (points: medians, bars: quartiles) and by formula (lines)\n"
        f"{WAITING}; {PRODUCTS}",
        fontsize="medium",
    )
    path = directory / "pipeline.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _draw(axes: Any, pp: int, rows: list[dict[str, str]]) -> None:
    counts = sorted({int(row["micro_batches"]) for row in rows})
    fine = [counts[0] * (counts[-1] / counts[0]) ** (i / 50) for i in range(51)]
    drawn = set()
    for number, (name, kind) in enumerate(KINDS.items()):
        color = f"C{number}"
        if kind.formula not in drawn:
            drawn.add(kind.formula)
            bubbles = [kind.bubble(pp, m) for m in fine]
            axes.plot(fine, bubbles, color=color, linewidth=1, label=kind.formula)
        # Side by side, where they would hide one another.
        for compute, fill, place in (
            ("waiting", color, number - 2),
            ("products", "white", number + 3),
        ):
            points = [r for r in rows if r["schedule"] == name and r["compute"] == compute]
            if points:
                label = name if compute == "waiting" else None
                _draw_points(axes, points, 1.035**place, color, fill, label)
    axes.set(xscale="log", xlabel="micro-batches m", title=f"p = {pp} ranks", ylim=(0, 0.6))
    axes.set_xticks(counts, labels=[str(m) for m in counts])
    axes.minorticks_off()
    axes.grid(axis="y", linewidth=0.3)


def _draw_points(
    axes: Any,
    rows: Iterable[dict[str, str]],
    shift: float,
    color: str,
    fill: str,
    label: str | None,
) -> None:
    x = [shift * int(row["micro_batches"]) for row in rows]
    y = [float(row["bubble"]) for row in rows]
    below = [float(row["bubble"]) - float(row["bubble_quarter"]) for row in rows]
    above = [float(row["bubble_three_quarters"]) - float(row["bubble"]) for row in rows]
    axes.errorbar(
        x,
        y,
        yerr=[below, above],
        linestyle="none",
        marker="o",
        markersize=5,
        color=color,
        markerfacecolor=fill,
        elinewidth=1,
        label=label,
    )
