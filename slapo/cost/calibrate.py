"""Machine figures measured on this machine."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.cost.machine import MACHINES, SLOW, Machine
from slapo.cost.meter import Meter
from slapo.sharding.collectives import all_gather_single, reduce_scatter_single

#: More than the processor caches hold, since operands of a step usually come from memory.
_COLD_BYTES = 96 * 2**20
_SIDES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def calibrate(say: Callable[[str], None] = lambda text: None, seconds: float = 20.0) -> Machine:
    """Measure this CPU with torch's current number of threads, in about twenty seconds.

    In a process group all ranks call this together, and links are measured too.

    Parameters
    ----------
    say
        Function called with a line of text after each part.
    seconds
        Approximate duration.

    Returns
    -------
    Machine
        Machine ``"here"``, with this machine's memory.

    Examples
    --------
    >>> here = calibrate(seconds=1.0)
    >>> here.name, here.is_measured
    ('here', True)
    """
    clock = _Clock(seconds)
    curve = tuple((2.0 * n**3, _product_speed(clock, n)) for n in _SIDES)
    flops = max(speed for _, speed in curve)
    say(f"products: {curve[0][1] / 1e9:.1f} to {flops / 1e9:.1f} GFLOP/s")
    speeds = _attention(clock)
    say(f"attention: {speeds[_FLASH] / 1e9:.1f} GFLOP/s")
    bandwidth = _bandwidth(clock)
    say(f"memory: {bandwidth / 1e9:.1f} GB/s")
    slow = _functions(clock)
    least, most = 1e9 * min(slow.values()), 1e9 * max(slow.values())
    say(f"functions: {least:.2f} to {most:.2f} ns an element")
    overhead = _overhead(clock, bandwidth)
    say(f"overhead: {1e6 * overhead:.1f} us a kernel")
    here = replace(
        MACHINES["cpu"],
        name="here",
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        flops=flops,
        bandwidth=bandwidth,
        reached_flops=1.0,
        reached_bandwidth=1.0,
        overhead=overhead,
        curve=curve,
        slow=slow,
        speeds=speeds,
        is_measured=True,
    )
    if dist.is_initialized() and dist.get_world_size() > 1:
        latency, links = _links()
        width = links["all_reduce"]
        say(f"link: {1e6 * latency:.0f} us, {width / 1e9:.2f} GB/s")
        here = replace(here, inside=width, between=width, latency=(latency, latency), links=links)
    return here


class _Clock:
    """Timer of one call, in seconds."""

    def __init__(self, seconds: float) -> None:
        # One thread is timed by CPU time, which other processes do not disturb. For several threads
        # CPU time is a sum over threads, so wall time is used.
        self.least = seconds / 200
        self._now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def __call__(self, run: Callable[[], Any]) -> float:
        run()
        times = []
        for _ in range(3):
            calls, start = 0, self._now()
            while self._now() - start < self.least or not calls:
                run()
                calls += 1
            times.append((self._now() - start) / calls)
        return statistics.median(times)

    def cold(self, run: Callable[..., Any], ring: Sequence[list[Tensor]]) -> float:
        """Return the seconds of one run with operands that have left the caches."""
        operands = cycle(ring)
        return self(lambda: run(*next(operands)))


def _ring(make: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    """Return operands of many runs, which together exceed the caches."""
    first = make()
    count = _COLD_BYTES // sum(tensor.nbytes for tensor in first)
    return [first, *(make() for _ in range(max(1, min(255, count - 1))))]


def _operands(count: int, *shape: int) -> list[list[Tensor]]:
    return _ring(lambda: [torch.rand(shape) + 0.01 for _ in range(count)])


def _product_speed(clock: _Clock, n: int) -> float:
    """Return the FLOP/s of a matrix product, without the overhead of an operator."""
    tiny = torch.randn(2, 2)
    floor = clock(lambda: tiny @ tiny) if n <= 128 else 0.0
    return 2 * n**3 / max(clock.cold(torch.mm, _operands(2, n, n)) - floor, 1e-9)


def _attention(clock: _Clock) -> dict[str, float]:
    """Return the FLOP/s of torch's fused attention, forward and backward."""
    batch, heads, length, width = 4, 4, 128, 64
    attend = F.scaled_dot_product_attention

    def make() -> list[Tensor]:
        return [torch.randn(batch, heads, length, width, requires_grad=True) for _ in range(3)]

    ring = _ring(make)
    once = clock.cold(attend, ring)
    both = clock.cold(lambda *operands: attend(*operands).sum().backward(), ring)
    flops = 4.0 * batch * heads * length * length * width
    # The backward has five products of this size, one of them recomputed, and the forward two.
    return {_FLASH: flops / once, f"{_FLASH}_backward": 2.5 * flops / max(both - once, once)}


def _bandwidth(clock: _Clock) -> float:
    """Return the bytes per second of adding tensors as large as activations."""
    sizes = (1 << 17, 1 << 19, 1 << 21)
    # Two float32 operands are read, and one is written: 12 bytes an element.
    return statistics.median(12 * n / clock.cold(torch.add, _operands(2, n)) for n in sizes)


def _functions(clock: _Clock) -> dict[str, float]:
    """Return the seconds per element of all operators in :data:`slapo.cost.machine.SLOW`."""
    shape, ops = (512, 1024), torch.ops.aten
    other, chance = torch.randn(shape), torch.empty(shape)
    keep = other > 0
    runs: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "_softmax": lambda x, y: x.softmax(-1),
        "_safe_softmax": lambda x, y: ops._safe_softmax(x, -1),
        "_log_softmax": lambda x, y: x.log_softmax(-1),
        "gelu_tanh": lambda x, y: F.gelu(x, approximate="tanh"),
        "native_dropout": lambda x, y: F.dropout(x, 0.1),
        "bernoulli_": lambda x, y: chance.bernoulli_(0.9),
        "where": lambda x, y: torch.where(keep, x, other),
        "gelu_backward": ops.gelu_backward,
        "gelu_tanh_backward": lambda x, y: ops.gelu_backward(x, y, approximate="tanh"),
        "silu_backward": ops.silu_backward,
        "_softmax_backward_data": lambda x, y: ops._softmax_backward_data(x, y, -1, x.dtype),
        "_log_softmax_backward_data": lambda x, y: ops._log_softmax_backward_data(
            x, y, -1, x.dtype
        ),
    }
    pair, one = _operands(2, *shape), _operands(1, *shape)
    seconds = {name: clock.cold(run, pair) for name, run in runs.items()}
    for name in sorted(SLOW - set(runs)):
        seconds[name] = clock.cold(getattr(ops, name), one)
    return {name: total / math.prod(shape) for name, total in seconds.items()}


def _overhead(clock: _Clock, bandwidth: float) -> float:
    """Return the framework seconds per kernel, from training steps on tiny tensors."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    x = torch.randn(1, 4, 16)

    def step() -> None:
        layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Meter(layer) as meter:
        step()
    moved = sum(kernel.moved for kernel in meter.kernels)
    # Tensors this small cost next to nothing but Python and the dispatcher.
    return max(clock(step) - moved / bandwidth, 1e-7) / len(meter.kernels)


def _links() -> tuple[float, dict[str, float]]:
    """Return latency in seconds, and bytes per second of collectives between products."""
    # Products in between make ranks wait for each other as in a step. Waits count by their mean:
    # with shared cores most are short, and some take a time slice. Collectives are timed
    # separately: gloo has no ring for each, and its reduce-scatter is slower than its all-reduce.
    square, small, large = torch.randn(512, 512), 1 << 8, 1 << 20
    ranks = dist.get_world_size()
    large -= large % ranks
    whole, part = torch.zeros(large), torch.zeros(large // ranks)
    runs: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "latency": lambda: dist.all_reduce(whole[:small]),
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole),
        "all_gather": lambda: all_gather_single(whole, part),
    }
    waits = dict.fromkeys(runs, 0.0)
    for turns in (2, 8):  # the first two rounds warm up
        for name, run in runs.items():
            total = 0.0
            for _ in range(turns):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(12):
                    torch.mm(square, square)
                    run()
                total += time.perf_counter() - start
            waits[name] = total / turns / 12
    latency = max(waits["latency"] - waits["nothing"], 1e-6) / 2
    named, widths = list(runs)[2:], []
    for name in named:
        rounds = 2 if name == "all_reduce" else 1
        moved = rounds * whole.nbytes * (ranks - 1) / ranks
        # Noise can make a link look infinitely fast, so memory bandwidth bounds it.
        took = max(waits[name] - waits["latency"], moved / MACHINES["cpu"].bandwidth)
        widths.append(moved / took)
    figures = torch.tensor([latency, *widths])
    dist.broadcast(figures, 0)
    return float(figures[0]), dict(zip(named, figures[1:].tolist(), strict=True))
