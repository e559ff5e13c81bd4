"""Pictures of the experiments, from their CSV files alone."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

from benchmark.experiments import Experiment

#: What stands where a bar would, by outcome.
_MARKS = {
    "out_of_memory": " out of memory",
    "refused": " refused",
    "failed": " failed",
    "timeout": " timeout",
}


def draw(name: str, experiment: Experiment, directory: Path) -> Path | None:
    """Draw ``<name>.csv`` as ``<name>.png``: samples a second, a bar for each side of a group.

    Returns
    -------
    Path or None
        The picture; None without the file or without matplotlib (``pip install slapo[examples]``).
    """
    source = directory / f"{name}.csv"
    if not source.exists() or importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot as plt

    with source.open(newline="") as file:
        places = {(row["panel"], row["group"], row["side"]): row for row in csv.DictReader(file)}
    rows = list(places.values())  # a point that was run again by its own command is the later one
    panels = _unlike(rows, "panel")
    sides = _unlike(rows, "side")
    wide = max(len(_unlike([r for r in rows if r["panel"] == p], "group")) for p in panels)
    figure, all_axes = plt.subplots(
        len(panels),
        1,
        figsize=(max(6.0, 1.5 * wide + 3), 3.2 * len(panels) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for panel, axes in zip(panels, all_axes[:, 0], strict=True):
        _draw_panel(axes, [row for row in rows if row["panel"] == panel], sides)
        axes.set(title=panel, ylabel="samples/s", xlabel=experiment.axis)
    if len(sides) > 1:
        handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{n}") for n in range(len(sides))]
        figure.legend(handles, sides, loc="outside right center", fontsize="small")
    size = ", small models on a CPU" if rows[0]["small"] == "True" else ""
    figure.suptitle(f"{experiment.about}{size}", fontsize="medium")
    path = directory / f"{name}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _unlike(rows: list[dict[str, str]], column: str) -> list[str]:
    """Values in the order in which they come."""
    return list(dict.fromkeys(row[column] for row in rows))


def _draw_panel(axes: Any, rows: list[dict[str, str]], sides: list[str]) -> None:
    """Bars of a group stand side by side, those that it has."""
    groups = _unlike(rows, "group")
    members = {group: [row for row in rows if row["group"] == group] for group in groups}
    width = 0.8 / max(4, *map(len, members.values()))
    for place, found in enumerate(members.values()):
        for number, row in enumerate(found):
            x = place + (number - (len(found) - 1) / 2) * width
            color = f"C{sides.index(row['side'])}"
            axes.bar(x, float(row["throughput"] or 0), width, color=color)
            mark = _MARKS.get(row["outcome"], "")
            axes.text(x, 0, mark, ha="center", va="bottom", rotation=90, fontsize=7, color=color)
    axes.set_xticks(range(len(groups)), labels=groups)
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)
