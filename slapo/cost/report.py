"""A dry run as a table, and as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slapo.errors import MissingPackageError

#: Of the layout, as far as they say something.
_SHOWN = ("pp", "dp", "tp", "batch", "length", "micro_batches")


def table(data: Mapping[str, Any]) -> str:
    """Memory by stage, time by part, and what follows from it.

    Parameters
    ----------
    data
        Of :meth:`DryRun.data`.
    """
    layout = data["layout"]
    # Samples of other things than tokens have no length.
    shown = [name for name in _SHOWN if name != "length" or data["tokens_per_second"]]
    parts = [name for name in data["stages"][0] if name != "peak"]
    head = ["stage", *parts, "peak"]
    lines = [[str(n), *(_size(s[name]) for name in head[1:])] for n, s in enumerate(data["stages"])]
    return "\n".join(
        [
            f"{data['model']}, {_count(data['parameters'])} parameters, {data['dtype']}, on "
            f"{data['ranks']} x {data['machine']} "
            f"({'measured' if data['is_measured'] else 'data sheet'})",
            "  " + ", ".join(f"{name} {layout[name]}" for name in shown) + _engine(layout),
            "",
            "memory of a rank",
            *_aligned([head, *lines]),
            _verdict(data),
            "",
            "time of a step",
            *_aligned(_times(data["seconds"])),
            _tokens(data) + f"{data['samples_per_second']:,.4g} samples/s, MFU {data['mfu']:.1%}",
        ]
    )


def _tokens(data: Mapping[str, Any]) -> str:
    return f"{data['tokens_per_second']:,.0f} tokens/s, " if data["tokens_per_second"] else ""


def _engine(layout: Mapping[str, Any]) -> str:
    how = layout["target"]
    if layout["zero"]:
        how += f" ZeRO {layout['zero']}"
    if layout["data_parallel"] == "fsdp":
        how += " FSDP2"
    return f"; {how}" + (f", {layout['schedule']}" if layout["pp"] > 1 else "")


def _verdict(data: Mapping[str, Any]) -> str:
    says = "fits" if data["fits"] else "DOES NOT FIT"
    return (
        f"{says}: {_size(data['peak'])} of {_size(data['memory'])} "
        f"(of which {_size(data['capacity'])} are used at most)"
    )


def _times(seconds: Mapping[str, float]) -> list[list[str]]:
    total = seconds["total"]
    return [
        [name.replace("_", " "), _seconds(value), f"{value / total:.1%}"]
        for name, value in seconds.items()
        if value or name == "total"
    ]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _size(size: float) -> str:
    """Bytes in the unit that fits.

    Examples
    --------
    >>> _size(3 * 2**30), _size(5 * 2**20), _size(0)
    ('3.00 GiB', '5.0 MiB', '0')
    """
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
    """Draw a stacked bar of memory for each stage, with the device's limit.

    Parameters
    ----------
    data
        Of :meth:`DryRun.data`.
    path
        A picture, its type by the suffix.

    Raises
    ------
    MissingPackageError
        Without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("pictures need matplotlib: pip install 'slapo[tune]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.0, 2 + 0.6 * len(data["stages"])), 4.5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bottoms = [0.0] * len(data["stages"])
    places = range(len(bottoms))
    for name in [part for part in data["stages"][0] if part != "peak"]:
        heights = [stage[name] / 2**30 for stage in data["stages"]]
        axes.bar(places, heights, bottom=bottoms, label=name)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    peaks = [stage["peak"] / 2**30 for stage in data["stages"]]
    axes.plot(places, peaks, "k_", markersize=18, label="peak")
    if max(peaks) > 0.2 * data["memory"] / 2**30:
        axes.axhline(data["capacity"] / 2**30, color="red", linestyle=":", label="capacity")
    axes.set(xlabel="stage", ylabel="GiB of a rank", xticks=list(places))
    axes.set_title(f"{data['model']} on {data['ranks']} x {data['machine']}", fontsize="medium")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
