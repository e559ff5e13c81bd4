"""A dry run's plain data as a table, and as an image."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slapo.errors import MissingPackageError


def table(data: Mapping[str, Any]) -> str:
    """Memory by stage, time by part, and rates."""
    layout, stages, tokens = data["layout"], data["stages"], data["tokens_per_second"]
    sizes = ["pp", "dp", "tp", "batch", *(["length"] if tokens else []), "micro_batches"]
    engine = layout["target"]
    engine += f" ZeRO {layout['zero']}" if layout["zero"] else ""
    engine += " FSDP2" if layout["data_parallel"] == "fsdp" else ""
    engine += f", {layout['schedule']}" if layout["pp"] > 1 else ""
    seconds = data["seconds"]
    times = {name: value for name, value in seconds.items() if value or name == "total"}
    return "\n".join(
        [
            f"{data['model']}, {_count(data['parameters'])} parameters, {data['dtype']}, on "
            f"{data['ranks']} x {data['machine']} "
            f"({'measured' if data['is_measured'] else 'data sheet'})",
            f"  {', '.join(f'{name} {layout[name]}' for name in sizes)}; {engine}",
            "",
            "memory of a rank",
            *_aligned(
                ["stage", *stages[0]],
                *([str(n), *map(_size, stage.values())] for n, stage in enumerate(stages)),
            ),
            f"{'fits' if data['fits'] else 'DOES NOT FIT'}: {_size(data['peak'])} of "
            f"{_size(data['memory'])} (of which {_size(data['capacity'])} are used at most)",
            "",
            "time of a step",
            *_aligned(
                *(
                    [name.replace("_", " "), _seconds(value), f"{value / seconds['total']:.1%}"]
                    for name, value in times.items()
                )
            ),
            (f"{tokens:,.0f} tokens/s, " if tokens else "")
            + f"{data['samples_per_second']:,.4g} samples/s, MFU {data['mfu']:.1%}",
        ]
    )


def _aligned(*rows: list[str]) -> list[str]:
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(["", name.ljust(first), *map(str.rjust, cells, others)]) for name, *cells in rows
    ]


def _size(size: float) -> str:
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size else "0"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{1e3 * value:.2f} ms"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def plot(data: Mapping[str, Any], path: str | Path) -> None:
    """Draw a stacked bar of memory for each stage, with the device's limit."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("images need matplotlib: pip install 'slapo[tune]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages = {name: [s[name] / 2**30 for s in data["stages"]] for name in data["stages"][0]}
    peaks = stages.pop("peak")
    figure = Figure(figsize=(max(4.0, 2 + 0.6 * len(peaks)), 4.5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places, bottoms = range(len(peaks)), [0.0] * len(peaks)
    for name, heights in stages.items():
        axes.bar(places, heights, bottom=bottoms, label=name)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    axes.plot(places, peaks, "k_", markersize=18, label="peak")
    if max(peaks) > 0.2 * data["memory"] / 2**30:
        axes.axhline(data["capacity"] / 2**30, color="red", linestyle=":", label="capacity")
    axes.set(xlabel="stage", ylabel="GiB of a rank", xticks=list(places))
    axes.set_title(f"{data['model']} on {data['ranks']} x {data['machine']}", fontsize="medium")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
