"""A machine's numbers, measured on this one."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.cost.machine import MACHINES, Machine
from slapo.cost.meter import Meter

#: Larger than the caches of a processor: operands of a step come from memory, as a rule.
_COLD_BYTES = 96 * 2**20
_SIDES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def calibrate(say: Callable[[str], None] = lambda text: None, seconds: float = 20.0) -> Machine:
    """Measure this processor, with as many threads as torch uses, in about twenty seconds.

    In a process group of several ranks each measures with the others, links too; all call this.

    Parameters
    ----------
    say
        Gets a line of text after each part.
    seconds
        About how long.

    Returns
    -------
    Machine
        ``"here"``, with the memory of this machine.

    Examples
    --------
    >>> here = calibrate(seconds=1.0)
    >>> here.name, here.is_measured
    ('here', True)
    """
    clock = _Clock(seconds)
    curve = tuple(_products(clock))
    say(f"products: {curve[0][1] / 1e9:.1f} to {max(s for _, s in curve) / 1e9:.1f} GFLOP/s")
    speeds = _attention(clock)
    say(f"attention: {speeds[_FLASH] / 1e9:.1f} GFLOP/s")
    bandwidth = _bandwidth(clock)
    say(f"memory: {bandwidth / 1e9:.1f} GB/s")
    slow = _functions(clock)
    say(
        f"functions: {1e9 * min(slow.values()):.2f} to {1e9 * max(slow.values()):.2f} ns an element"
    )
    overhead = _overhead(clock, bandwidth)
    say(f"overhead: {1e6 * overhead:.1f} us a kernel")
    cpu = MACHINES["cpu"]
    here = replace(
        cpu,
        name="here",
        memory=_memory(),
        flops=max(speed for _, speed in curve),
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
        latency, width = _links()
        say(f"link: {1e6 * latency:.0f} us, {width / 1e9:.2f} GB/s")
        here = replace(here, inside=width, between=width, latency=(latency, latency))
    return here


class _Clock:
    """Seconds of one call.

    Of one thread those of the processor, as others on the machine do not count then. Of several
    that would be the sum over threads, and it is the time that passes.
    """

    def __init__(self, seconds: float) -> None:
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


def _ring(make: Callable[[], Any], size: int) -> Iterator[Any]:
    """Operands by turns, so many that each is out of the caches when its turn comes."""
    count = max(2, min(256, _COLD_BYTES // max(1, size)))
    return cycle([make() for _ in range(count)])


def _products(clock: _Clock) -> Iterator[tuple[float, float]]:
    for n in _SIDES:
        ring = _pairs((n, n))
        floor = _dispatch(clock) if n <= 128 else 0.0
        yield 2.0 * n**3, 2 * n**3 / max(clock(partial(_on_next, torch.mm, ring)) - floor, 1e-9)


def _pairs(shape: tuple[int, ...]) -> Iterator[Any]:
    return _ring(lambda: (torch.randn(shape), torch.randn(shape)), 8 * math.prod(shape))


def _on_next(run: Callable[..., Any], ring: Iterator[Any]) -> Any:
    operands = next(ring)
    return run(*operands) if isinstance(operands, tuple) else run(operands)


def _dispatch(clock: _Clock) -> float:
    """Seconds of an operator on almost nothing, which are overhead of any."""
    tiny = torch.randn(2, 2)
    return clock(lambda: tiny @ tiny)


def _attention(clock: _Clock) -> dict[str, float]:
    """Operations per second of torch's fused attention, both ways."""
    batch, heads, length, width = 4, 4, 128, 64
    shape = batch, heads, length, width

    def make() -> list[Tensor]:
        return [torch.randn(shape, requires_grad=True) for _ in range(3)]

    ring = _ring(make, 3 * 4 * batch * heads * length * width)
    flops = 4.0 * batch * heads * length * length * width

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*next(ring))

    def both() -> None:
        forward().sum().backward()

    once = clock(forward)
    back = max(clock(both) - once, once)
    return {_FLASH: flops / once, f"{_FLASH}_backward": 2.5 * flops / back}


def _bandwidth(clock: _Clock) -> float:
    """Bytes per second of an addition of tensors as large as activations."""
    figures = []
    for elements in (1 << 17, 1 << 19, 1 << 21):
        ring = _pairs((elements,))
        figures.append(12 * elements / clock(partial(_on_next, torch.add, ring)))
    return statistics.median(figures)


def _functions(clock: _Clock) -> dict[str, float]:
    """Seconds for each element, by the operator that computes it, on tensors out of the caches."""
    rows, columns = 512, 1024
    ring = _ring(lambda: torch.rand(rows, columns) + 0.01, 4 * rows * columns)
    soft, ops = torch.randn(rows, columns).softmax(-1), torch.ops.aten
    single, keep, weight = torch.float32, soft > 0.001, torch.ones(columns)
    _, mean, scale = torch.native_layer_norm(soft, (columns,), weight, weight, 1e-5)
    runs: dict[str, Callable[[Tensor], Any]] = {
        "exp": torch.exp,
        "tanh": torch.tanh,
        "tanh_backward": lambda x: ops.tanh_backward(x, soft),
        "pow": lambda x: x.pow(3.0),
        "gelu": F.gelu,
        "gelu_backward": lambda x: ops.gelu_backward(x, next(ring)),
        "silu": F.silu,
        "silu_backward": lambda x: ops.silu_backward(x, next(ring)),
        "_softmax": lambda x: x.softmax(-1),
        "_safe_softmax": lambda x: ops._safe_softmax(x, -1),
        "_softmax_backward_data": lambda x: ops._softmax_backward_data(x, soft, -1, single),
        "_log_softmax": lambda x: x.log_softmax(-1),
        "_log_softmax_backward_data": lambda x: ops._log_softmax_backward_data(x, soft, -1, single),
        "native_layer_norm": lambda x: F.layer_norm(x, (columns,), weight, weight),
        "native_layer_norm_backward": lambda x: ops.native_layer_norm_backward(
            x, next(ring), (columns,), mean, scale, weight, weight, (True, True, True)
        ),
        "native_dropout": lambda x: F.dropout(x, 0.1),
        "rsqrt": torch.rsqrt,
        "sqrt": torch.sqrt,
        "cos": torch.cos,
        "sin": torch.sin,
        "sigmoid": torch.sigmoid,
        "sigmoid_backward": lambda x: ops.sigmoid_backward(x, soft),
        "erf": torch.erf,
        "where": lambda x: torch.where(keep, x, soft),
    }
    found = {}
    for name, run in runs.items():
        found[name] = clock(partial(_on_next, run, ring)) / (rows * columns)
    chance = torch.empty(rows, columns)
    found["bernoulli_"] = clock(lambda: chance.bernoulli_(0.9)) / (rows * columns)
    found[""] = statistics.median(found.values())
    return found


def _overhead(clock: _Clock, bandwidth: float) -> float:
    """Seconds that modules, autograd and the dispatcher take for each kernel.

    A step of a layer whose tensors are tiny.
    """
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
    return max(clock(step) - moved / bandwidth, 1e-7) / len(meter.kernels)


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _links() -> tuple[float, float]:
    """Seconds of a start, and bytes per second, from all-reduces between products; wall time.

    A rank that works on its own in between waits for others as it does in a step. Of waits the mean
    counts: where processes share cores most are short, and some as long as the system's turns.
    """
    square, small, large = torch.randn(512, 512), 1 << 8, 1 << 20
    waits = {0: 0.0, small: 0.0, large: 0.0}
    for warm_up in (True, False):
        for elements in waits:
            tensor = torch.zeros(max(elements, 1))
            runs = []
            for _ in range(2 if warm_up else 8):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(12):
                    torch.mm(square, square)
                    if elements:
                        dist.all_reduce(tensor)
                runs.append((time.perf_counter() - start) / 12)
            waits[elements] = statistics.mean(runs)
    ranks = dist.get_world_size()
    moved = 2 * 4 * large * (ranks - 1) / ranks
    start_of_one = max(waits[small] - waits[0], 1e-6)
    # Of noise a link may look endless: no faster than memory is for one that waits.
    took = max(waits[large] - waits[small], moved / MACHINES["cpu"].bandwidth)
    figures = torch.tensor([start_of_one / 2, moved / took])
    dist.broadcast(figures, 0)
    return float(figures[0]), float(figures[1])
