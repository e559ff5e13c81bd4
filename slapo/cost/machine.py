"""Machines as a few figures, and the time of kernels and collectives on them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slapo.cost.meter import Collective, Kernel
from slapo.errors import with_nearest

GB, TERA = 1e9, 1e12
#: Fraction of a device's memory that a step may fill, as allocators leave gaps.
USABLE = 0.92

#: Functions that a CPU computes more slowly than it moves their operands.
_SLOW_NAMES = (
    "exp tanh gelu gelu_backward gelu_tanh gelu_tanh_backward silu silu_backward sqrt _softmax "
    "_softmax_backward_data _safe_softmax _log_softmax _log_softmax_backward_data native_dropout "
    "bernoulli_ cos sin erf where"
)
SLOW = frozenset(_SLOW_NAMES.split())


@dataclass(frozen=True)
class Machine:
    """A node of equal devices, and the links between nodes.

    Four figures are enough: ``Machine("mine", memory, flops, bandwidth, inside)``.

    Parameters
    ----------
    name
        Name in outputs.
    memory
        Memory of a device, in bytes.
    flops
        FLOP/s of dense matrix products, for each dtype or for all.
    bandwidth
        Bytes per second between a device and its memory.
    inside
        Bytes per second between two devices of a node, in each direction.
    devices
        Number of devices of a node.
    between
        Bytes per second between each device and other nodes; by default an eighth of `inside`.
    reached_flops, reached_bandwidth
        Fraction of these figures that kernels reach. If `is_measured`, the figures are already the
        reached ones.
    overhead
        Host seconds per kernel, which overlap with the device's work if `is_asynchronous`.
    half_at
        FLOPs of a product that runs at half the speed of a large one.
    curve
        Measured: pairs of FLOPs of a product and FLOP/s, in ascending order.
    slow
        Measured: function -> seconds per element; ``""`` is the entry for others.
    speeds
        Measured: operator -> FLOP/s, for operators other than plain products.
    latency
        Seconds per message, within a node and between nodes.
    links
        Measured: collective -> bytes per second, where it differs from `inside`.
    is_measured
        True for measured figures, False for those of a data sheet.

    Examples
    --------
    >>> mine = Machine("mine", 48e9, 180e12, 860e9, inside=32e9)
    >>> mine.between
    4000000000.0
    """

    name: str
    memory: float
    flops: float | Mapping[torch.dtype, float] = field(hash=False)
    bandwidth: float
    inside: float
    devices: int = 8
    between: float = 0.0
    reached_flops: float = 0.6
    reached_bandwidth: float = 0.8
    overhead: float = 4e-6
    is_asynchronous: bool = True
    half_at: float = 1e9
    curve: tuple[tuple[float, float], ...] = ()
    slow: Mapping[str, float] = field(default_factory=dict, hash=False)
    speeds: Mapping[str, float] = field(default_factory=dict, hash=False)
    latency: tuple[float, float] = (8e-6, 20e-6)
    links: Mapping[str, float] = field(default_factory=dict, hash=False)
    is_measured: bool = False

    def __post_init__(self) -> None:
        if not self.between:
            object.__setattr__(self, "between", self.inside / 8)
        speeds = self.flops if isinstance(self.flops, Mapping) else {torch.float32: self.flops}
        above = "a number above 0, in bytes, operations per second (flops) or bytes per second"
        self._require(above, _is_positive, "memory", "bandwidth", "inside", "between")
        self._require(above, lambda _: speeds and all(map(_is_positive, speeds.values())), "flops")
        self._require(
            "a share up to 1", lambda v: _is_positive(v) and v <= 1,
            "reached_flops", "reached_bandwidth",
        )  # fmt: skip

    def _require(self, wanted: str, is_valid: Callable[[Any], Any], *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not is_valid(value):
                raise ValueError(f"machine {self.name!r} has {name}={value!r}; pass {wanted}")

    @property
    def rounding(self) -> int:
        """Allocation granularity: each storage takes a multiple of this many bytes."""
        return 512 if self.is_asynchronous else 1

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s of a dtype; an unlisted dtype gets that of the slowest."""
        if not isinstance(self.flops, Mapping):
            return self.flops
        return self.flops.get(dtype, min(self.flops.values()))

    # --- kernels ---------------------------------------------------------------------------------
    def seconds(self, kernel: Kernel) -> float:
        """Return the seconds of one kernel: the larger of arithmetic and memory traffic."""
        work = 0.0
        if kernel.flops:
            work = kernel.flops / self._speed(kernel)
        elif kernel.name in SLOW and self.slow:
            each = self.slow.get(kernel.name, self.slow.get("", 0.0))
            work = each * kernel.elements
        # A roofline: a kernel overlaps arithmetic with memory traffic.
        busy = max(work, self.traffic(kernel.moved))
        # On an accelerator the host launches ahead of the device; a CPU does both by turns.
        return max(busy, self.overhead) if self.is_asynchronous else busy + self.overhead

    def traffic(self, moved: float) -> float:
        """Return the seconds that reading and writing so many bytes of memory takes."""
        return moved / (self.bandwidth * self.reached_bandwidth)

    def _speed(self, kernel: Kernel) -> float:
        if kernel.name in self.speeds:
            return self.speeds[kernel.name]
        if self.curve:
            sizes = [size for size, _ in self.curve]
            at = min(bisect_left(sizes, kernel.flops / kernel.products), len(sizes) - 1)
            return self.curve[at][1]
        peak = self.peak_flops(kernel.dtype) * self.reached_flops
        return peak * kernel.flops / (kernel.flops + self.half_at)

    def time_of(self, kernels: Iterable[Kernel]) -> float:
        """Return the seconds of kernels that run one after another."""
        return sum(map(self.seconds, kernels))

    # --- links -----------------------------------------------------------------------------------
    def collective(self, name: str, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of a collective, by the faster of a ring and a tree.

        Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations
        in MPICH": a start for each message, and time for each byte.

        Parameters
        ----------
        name
            Name of the collective, such as ``"all_reduce"``.
        size
            Bytes of the full tensor.
        ranks
            Size of the group.
        stride
            Distance between consecutive ranks: 1 for neighbors.

        Examples
        --------
        >>> node = MACHINES["h100-80gb"]
        >>> node.collective("all_reduce", 2**20, 1)
        0.0
        >>> node.collective("all_reduce", 2**30, 8) < node.collective("all_reduce", 2**30, 16)
        True
        """
        if name in ("send", "recv", "message"):
            return self.message(size, stride >= self.devices)
        if ranks < 2:
            return 0.0
        # Data-parallel ranks are `tp` devices apart, so a node has fewer of them than devices.
        within = max(1, min(ranks, self.devices // stride if stride < self.devices else 1))
        nodes = math.ceil(ranks / within)
        # An all-reduce is a reduce-scatter and an all-gather.
        rounds = 2 if "reduce" in name and "scatter" not in name else 1
        # The devices of a node share their links to other nodes.
        width = self.inside if nodes == 1 else min(self.inside, self.between * within)
        width = self.links.get(name, width)
        hop = self.latency[nodes > 1]
        moved = rounds * size * (ranks - 1) / ranks / width
        ring = moved + rounds * ((ranks - nodes) * self.latency[0] + (nodes - 1) * self.latency[1])
        tree = rounds * (math.ceil(math.log2(ranks)) * hop + size / (0.9 * width))
        return min(ring, tree)

    def message(self, size: float, far: bool) -> float:
        """Return the seconds of a message of `size` bytes; `far` is True for another node."""
        return self.latency[far] + size / (self.between if far else self.inside)

    def communication(self, collectives: Iterable[Collective]) -> float:
        """Return the seconds of collectives among adjacent ranks, as in tensor parallelism."""
        return sum(self.collective(c.name, c.size, c.ranks) for c in collectives)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _gpu(
    name: str, memory: int, half: float, single: float, wide: float, links: tuple[float, float]
) -> Machine:
    flops = {torch.float16: half, torch.float32: single}
    # A V100 has no bfloat16 units; products in it run at the speed of the slowest listed dtype.
    if "v100" not in name:
        flops[torch.bfloat16] = half
    return Machine(name, memory * 2**30, flops, wide, links[0], between=links[1])


#: Machines by name. Dense peaks, memory bandwidth and links are from the makers' data sheets. Links
#: are what all-reduces reach: 120 GB/s on six NVLinks of a V100, 230 on an A100's twelve, 360 on an
#: H100's and an H200's, and the same fraction of a B200's.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu("v100-16gb", 16, 112 * TERA, 15.7 * TERA, 900 * GB, (120 * GB, 1.5 * GB)),
        _gpu("v100-32gb", 32, 112 * TERA, 15.7 * TERA, 900 * GB, (120 * GB, 12 * GB)),
        _gpu("a100-40gb", 40, 312 * TERA, 19.5 * TERA, 1555 * GB, (230 * GB, 22 * GB)),
        _gpu("a100-80gb", 80, 312 * TERA, 19.5 * TERA, 2039 * GB, (230 * GB, 22 * GB)),
        _gpu("h100-80gb", 80, 989 * TERA, 67 * TERA, 3350 * GB, (360 * GB, 45 * GB)),
        _gpu("h200-141gb", 141, 989 * TERA, 67 * TERA, 4800 * GB, (360 * GB, 45 * GB)),
        _gpu("b200-180gb", 180, 2250 * TERA, 75 * TERA, 8000 * GB, (720 * GB, 45 * GB)),
        Machine(
            "cpu",
            24 * 2**30,
            60e9,
            12e9,
            inside=1e9,
            devices=2,
            between=1e9,
            reached_flops=0.8,
            reached_bandwidth=0.8,
            overhead=6e-6,
            is_asynchronous=False,
            half_at=1e6,
            slow={"": 1.5e-9},
            latency=(2e-4, 2e-4),
        ),
    )
}


def machine_of(given: str | Machine) -> Machine:
    """Look up a machine by name; a Machine is returned unchanged."""
    if isinstance(given, Machine):
        return given
    if not isinstance(given, str) or given not in MACHINES:
        known = list(MACHINES)
        rest = (
            f"there is no machine {given!r}; pass one of {known}, or Machine(name, memory, "
            "flops, bandwidth, inside)"
        )
        raise KeyError(with_nearest(str(given), known, rest))
    return MACHINES[given]
