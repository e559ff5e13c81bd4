"""What a dry run found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slapo.cost._report import plot, table
from slapo.cost.layout import Layout
from slapo.cost.machine import USABLE, Machine
from slapo.cost.memory import Memory
from slapo.cost.steptime import StepTime


@dataclass(frozen=True)
class DryRun:
    """Memory of every stage's ranks, and time, of a step that was not run.

    Parameters
    ----------
    model
        Name of its class.
    parameters
        Of the whole model.
    dtype
        In which it computes.
    machine, layout
        On which, and how.
    stages
        Memory of a rank of each pipeline stage; ranks of a stage are alike.
    time
        Of a step.
    flops
        Floating-point operations of a step's products over all replicas, without those that are
        computed again, and once where ranks that share a layer repeat them.
    tokens
        Of a step over all replicas; 0 where the model takes no ``input_ids``.

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
    time: StepTime
    flops: float
    tokens: int

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(stage.peak for stage in self.stages)

    @property
    def memory(self) -> int:
        """The peak, by the name that the tuner reads."""
        return self.peak

    @property
    def capacity(self) -> float:
        """Bytes of a device that a step may fill: 92 % of its memory, as allocators leave gaps."""
        return USABLE * self.machine.memory

    @property
    def fits(self) -> bool:
        """Whether every rank stays within the capacity."""
        return self.peak <= self.capacity

    @property
    def throughput(self) -> float:
        """Samples per second, of all replicas."""
        return self.layout.batch * self.layout.dp / self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas; 0 where the model takes no ``input_ids``."""
        return self.tokens / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the devices' peak that the model's own work takes.

        Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", appendix B.
        """
        peak = self.machine.peak_flops(self.dtype) * self.layout.ranks
        return self.flops / (self.time.total * peak)

    def data(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        layout = self.layout
        return {
            "model": self.model,
            "parameters": self.parameters,
            "dtype": str(self.dtype).removeprefix("torch."),
            "machine": self.machine.name,
            "is_measured": self.machine.is_measured,
            "memory": self.machine.memory,
            "layout": {name: getattr(layout, name) for name in layout.__dataclass_fields__},
            "fits": self.fits,
            "peak": self.peak,
            "ranks": layout.ranks,
            "capacity": self.capacity,
            "stages": [{**stage.parts(), "peak": stage.peak} for stage in self.stages],
            "seconds": {**self.time.parts(), "total": self.time.total},
            "samples_per_second": self.throughput,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
        }

    def __str__(self) -> str:
        return table(self.data())

    def plot(self, path: str) -> None:
        """Draw the memory of each stage as a stacked bar, in a file.

        Raises
        ------
        MissingPackageError
            Without matplotlib.
        """
        plot(self.data(), path)
