"""CSV files of what was measured, and a plot that reads them."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import slapo
from benchmark.measure import Result, Target
from benchmark.scheduling import PUBLISHED

RESULTS = Path(__file__).parent / "results"


def environment(command: str) -> dict[str, Any]:
    """What every line of a CSV file says of the run."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "slapo": slapo.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def version(package: str) -> str:
    """Of a package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def made_folder(path: Path) -> Path:
    """A folder for results, made before time is spent on them.

    Raises
    ------
    ValueError
        If nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--results {path} cannot be made: {error}; pass another folder") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"--results {path} cannot be written to; pass another folder")
    return path


def write(name: str, result: Result, command: str, directory: Path = RESULTS) -> list[Path]:
    """Write ``<name>.csv`` with the measurements and ``<name>_targets.csv`` with the figures.

    Returns
    -------
    list of Path
        The files written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    about = environment(command)
    tables = {name: result.rows, f"{name}_targets": [_target_row(t) for t in result.targets]}
    paths = []
    for table, rows in tables.items():
        if rows:
            paths.append(directory / f"{table}.csv")
            _write_rows(paths[-1], [{**row, **about} for row in rows])
    return paths


def extend(name: str, row: Mapping[str, Any], command: str, directory: Path) -> Path:
    """Write a row to the end of ``<name>.csv``, or as the first one of a new file.

    Raises
    ------
    ValueError
        If the file has other columns.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.csv"
    full = {**row, **environment(command)}
    rows: list[Mapping[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
        if rows and set(rows[0]) != set(full):
            apart = sorted(set(rows[0]) ^ set(full))
            raise ValueError(f"{path} has other columns, apart by {apart}; move the file away")
    _write_rows(path, [*rows, full])
    return path


def _target_row(target: Target) -> dict[str, Any]:
    return {
        "figure": target.what,
        "value": round(target.value, 4),
        "at_most": round(target.limit, 4),
        "unit": target.unit,
        "met": target.met,
    }


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot_scheduling(directory: Path = RESULTS) -> Path | None:
    """Draw ``scheduling.csv`` as ``scheduling.png``: time per layer over the number of layers.

    Returns
    -------
    Path or None
        The picture; None without the file or without matplotlib (``pip install slapo[examples]``).
    """
    source = directory / "scheduling.csv"
    if not source.exists() or importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for way, points in _points(source).items():
        layers = [n for n, _ in points]
        (line,) = axes.plot(layers, [ms for _, ms in points], marker="o", label=way)
        # Linear in N is level here: the time per layer of the smallest model.
        axes.axhline(points[0][1], color=line.get_color(), linestyle=":", linewidth=1)
        published = PUBLISHED.get(way, {})
        axes.plot(
            list(published),
            [1e3 * seconds / n for n, seconds in published.items()],
            marker="x",
            markersize=9,
            linestyle="none",
            color=line.get_color(),
            label=f"{way}, published" if published else None,
        )
    axes.plot([], [], color="gray", linestyle=":", linewidth=1, label="linear in the layers")
    axes.set(xscale="log", yscale="log", xlabel="layers", ylabel="CPU time per layer in ms")
    sizes = sorted({n for points in _points(source).values() for n, _ in points})
    axes.set_xticks(sizes, labels=[str(n) for n in sizes])
    axes.minorticks_off()
    axes.set_title("Scheduling a transformer on meta")
    axes.legend(fontsize="small")
    figure.tight_layout()
    path = directory / "scheduling.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _points(source: Path) -> dict[str, list[tuple[int, float]]]:
    """Way -> (layers, milliseconds per layer), by size."""
    points: dict[str, list[tuple[int, float]]] = {}
    with source.open(newline="") as file:
        for row in csv.DictReader(file):
            point = (int(row["layers"]), float(row["cpu_ms_per_layer"]))
            points.setdefault(row["way"], []).append(point)
    return {way: sorted(found) for way, found in points.items()}
