"""Result of a dry run: as data, as a table, and as an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch

from slapo.cost.layout import Layout
from slapo.cost.machine import USABLE, Machine
from slapo.cost.memory import Memory
from slapo.cost.steptime import StepTime
from slapo.errors import import_package


@dataclass(frozen=True)
class DryRun:
    """Predicted memory of each stage's ranks, and time of a step.

    Parameters
    ----------
    model
        Class name of the model.
    parameters
        Number of parameters of the full model.
    dtype
        Dtype of the computation.
    machine, layout
        Machine and layout of the job.
    stages
        Memory of a rank of each pipeline stage; all ranks of a stage are equal.
    timed
        Function that computes :attr:`time`; a search calls it only for layouts that fit.
    flops
        FLOPs of a step's matrix products over all replicas, without recomputation. Work repeated by
        tensor-parallel ranks counts once.
    tokens
        Tokens of a step over all replicas; 0 if the model takes no ``input_ids``.

    Examples
    --------
    >>> import slapo
    >>> from transformers import GPT2Config
    >>> config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=128)
    >>> found = slapo.dryrun("gpt2", config, machine="v100-16gb", batch=2, seq_len=32)
    >>> found.fits, found.memory == found.peak
    (True, True)
    """

    model: str
    parameters: int
    dtype: torch.dtype
    machine: Machine
    layout: Layout
    stages: tuple[Memory, ...]
    timed: Callable[[], StepTime] = field(repr=False, compare=False)
    flops: float
    tokens: int

    @cached_property
    def time(self) -> StepTime:
        """Seconds of a step, in parts."""
        return self.timed()

    @property
    def peak(self) -> int:
        """Peak bytes of the rank that needs the most memory."""
        return max(stage.peak for stage in self.stages)

    @property
    def memory(self) -> int:
        """Alias of :attr:`peak`, by the name that the tuner reads."""
        return self.peak

    @property
    def capacity(self) -> float:
        """Usable bytes of a device: 92 % of its memory, as allocators leave gaps."""
        return USABLE * self.machine.memory

    @property
    def fits(self) -> bool:
        """True if every rank stays within the capacity."""
        return self.peak <= self.capacity

    @property
    def throughput(self) -> float:
        """Samples per second, of all replicas."""
        return self.layout.batch * self.layout.dp / self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all replicas; 0 if the model takes no ``input_ids``."""
        return self.tokens / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's own FLOP/s as a fraction of the devices' peak.

        Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", appendix B.
        """
        peak = self.machine.peak_flops(self.dtype) * self.layout.ranks
        return self.flops / (self.time.total * peak)

    def data(self) -> dict[str, Any]:
        """Return all figures as plain data, for JSON."""
        layout = self.layout
        return {
            "model": self.model,
            "parameters": self.parameters,
            "dtype": str(self.dtype).removeprefix("torch."),
            "machine": self.machine.name,
            "is_measured": self.machine.is_measured,
            "memory": self.machine.memory,
            "layout": asdict(layout),
            "fits": self.fits,
            "peak": self.peak,
            "ranks": layout.ranks,
            "capacity": self.capacity,
            "stages": [asdict(stage) for stage in self.stages],
            "seconds": {**asdict(self.time), "total": self.time.total},
            "samples_per_second": self.throughput,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
        }

    def __str__(self) -> str:
        return _table(self.data())

    def plot(self, path: str) -> None:
        """Plot the memory of each stage as a stacked bar into a file.

        Raises
        ------
        MissingPackageError
            If matplotlib is not installed.
        """
        import_package("matplotlib", "an image", "tune")
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        data = self.data()
        name, unit = ("GiB", 2**30) if data["peak"] >= 2**30 else ("MiB", 2**20)
        stages = {key: [s[key] / unit for s in data["stages"]] for key in data["stages"][0]}
        peaks, capacity = stages.pop("peak"), data["capacity"] / unit
        figure = Figure(figsize=(max(6.0, 4 + 0.6 * len(peaks)), 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        places, bottoms = range(len(peaks)), [0.0] * len(peaks)
        for key, heights in stages.items():
            axes.bar(places, heights, bottom=bottoms, label=key)
            bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
        axes.plot(places, peaks, "k_", markersize=18, label="peak")
        # If the capacity is far above the bars, a true line would flatten them; it then marks the
        # upper edge.
        is_near = capacity < 5 * max(peaks)
        height = capacity if is_near else 1.3 * max(peaks)
        said = f"capacity {size_of(data['capacity'])}" + ("" if is_near else ", not to scale")
        axes.axhline(height, color="red", linestyle="--" if is_near else ":", label=said)
        axes.set(xlabel="stage", ylabel=f"{name} of a rank", xticks=list(places))
        axes.set_title(f"{data['model']} on {data['ranks']} x {data['machine']}", fontsize="medium")
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
        figure.savefig(path, dpi=120)


def _table(data: Mapping[str, Any]) -> str:
    layout, stages, tokens = data["layout"], data["stages"], data["tokens_per_second"]
    sizes = ["pp", "dp", "tp", "batch", *(["length"] if tokens else []), "micro_batches"]
    engine = engine_of(Layout(**layout))
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
            *aligned(
                ["stage", *stages[0]],
                *([str(n), *map(size_of, stage.values())] for n, stage in enumerate(stages)),
            ),
            f"{'fits' if data['fits'] else 'DOES NOT FIT'}: {size_of(data['peak'])} of "
            f"{size_of(data['memory'])} (of which {size_of(data['capacity'])} are used at most)",
            "",
            "time of a step",
            *aligned(
                *(
                    [name.replace("_", " "), _seconds(value), f"{value / seconds['total']:.1%}"]
                    for name, value in times.items()
                )
            ),
            (f"{tokens:,.0f} tokens/s, " if tokens else "")
            + f"{data['samples_per_second']:,.4g} samples/s, MFU {data['mfu']:.1%}",
        ]
    )


def engine_of(layout: Layout) -> str:
    """Describe the engine of a layout."""
    more = f" ZeRO {layout.zero}" if layout.zero else ""
    return layout.target + more + (" FSDP2" if layout.data_parallel == "fsdp" else "")


def aligned(*rows: list[str]) -> list[str]:
    """Format the rows of a table as aligned lines."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(["", name.ljust(first), *map(str.rjust, cells, others)]) for name, *cells in rows
    ]


def size_of(size: float) -> str:
    """Format a number of bytes."""
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
