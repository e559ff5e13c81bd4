"""What it costs to look for a pattern in one flat graph, most of all for one that is not there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import slapo
from benchmark.measure import Progress, Result, Target, timed
from benchmark.models import transformer_on_meta
from slapo.pattern import call_module

SIZES = (12, 24, 48, 96, 192, 384)
REPEATS = 5
#: Seconds that the published implementation takes for "last_absent" at 48 layers.
PUBLISHED = {("last_absent", 48): 15.0}


def last_absent(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Four operations, the last of which the graph does not hold."""
    return torch.erf(call_module(r".*\.down", F.gelu(x)) + y)


def not_connected(x: Tensor, y: Tensor) -> Tensor:
    """Four operations that the graph holds in every layer, but not one after the other."""
    return F.gelu(x + y).transpose(1, 2).flatten(2)


def in_every_layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Four operations that follow one another in every layer."""
    context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return call_module(r".*\.proj", context.transpose(1, 2).flatten(2))


#: Name -> pattern, and whether each layer holds it.
PATTERNS: dict[str, tuple[str | Callable[..., Any], bool]] = {
    "last_absent": (last_absent, False),
    "not_connected": (not_connected, False),
    "in_every_layer": (in_every_layer, True),
    "by_name": (r".*\.proj$", True),
}


def run(quick: bool, progress: Progress) -> Result:
    """Search graphs of several sizes; report medians."""
    sizes, repeats = ((2, 4), 1) if quick else (SIZES, REPEATS)
    result = Result()
    for layers in sizes:
        sch = slapo.create_schedule(transformer_on_meta(layers))
        sch.trace(flatten=True)
        for name in PATTERNS:
            row = _search(sch, name, layers, repeats)
            result.rows.append(row)
            progress(f"{name}, {layers} layers: {1e3 * row['cpu_s']:.2f} ms of CPU")
            if (name, layers) == ("last_absent", 96):
                result.targets.append(Target("last_absent: 96 layers", row["cpu_s"], 0.2, "s"))
    return result


def _search(sch: slapo.Schedule, name: str, layers: int, repeats: int) -> dict[str, Any]:
    pattern, present = PATTERNS[name]
    runs = [timed(partial(sch.find, pattern)) for _ in range(repeats)]
    found = len(runs[0][1])
    if found != (layers if present else 0):
        raise RuntimeError(f"{name}: found {found} matches in {layers} layers")
    return {
        "pattern": name,
        "layers": layers,
        "nodes": len(sch.mod.graph.nodes),
        "matches": found,
        "cpu_s": round(median(times.cpu for times, _ in runs), 5),
        "wall_s": round(median(times.wall for times, _ in runs), 5),
        "published_cpu_s": PUBLISHED.get((name, layers), ""),
    }
