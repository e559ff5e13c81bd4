"""What it costs to schedule a model of N layers, per layer and in one flat graph."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import slapo
import torch.nn.functional as F
from torch import Tensor

from benchmark.models import transformer_on_meta

Row = dict[str, Any]
Progress = Callable[[str], None]

SIZES = (12, 24, 48, 96, 192, 384)
REPEATS = 3
#: What `find` looks for, N times.
PATTERN_LENGTH = 2


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """The pattern that is fused in every layer."""
    return F.gelu(x + bias)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The pattern that is checkpointed in every layer of the flat graph."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def schedule_per_layer(layers: int) -> slapo.Schedule:
    """A graph for each layer; the root stays as it is."""
    sch = slapo.create_schedule(transformer_on_meta(layers))
    for index in range(layers):
        layer = sch[f"layers.{index}"]
        layer["up"].decompose()
        _shard(layer)
        layer.trace(flatten=True)
        layer.fuse(layer.find(bias_gelu), name="BiasGelu")
        layer.checkpoint()
    return sch


def schedule_flat(layers: int) -> slapo.Schedule:
    """One graph of the whole model: one trace, one search, a fusion for each match."""
    sch = _traced_flat(layers)
    for match in sch.find(bias_gelu):
        sch.fuse(match, name="BiasGelu")
    return sch


def schedule_flat_checkpoint(layers: int) -> slapo.Schedule:
    """The same with a checkpointed subgraph in each layer."""
    sch = schedule_flat(layers)
    for match in sch.find(attention):
        sch.checkpoint(match)
    return sch


def _traced_flat(layers: int) -> slapo.Schedule:
    sch = slapo.create_schedule(transformer_on_meta(layers))
    for index in range(layers):
        layer = sch[f"layers.{index}"]
        layer["up"].decompose()
        _shard(layer)
    sch.trace(flatten=True)
    return sch


def _shard(layer: slapo.Schedule) -> None:
    layer["up"].shard("weight", axis=0)
    layer["up"].shard("bias", axis=0)
    layer["down"].shard("weight", axis=1)


WAYS: dict[str, Callable[[int], slapo.Schedule]] = {
    "per_layer": schedule_per_layer,
    "flat": schedule_flat,
    "flat_checkpoint": schedule_flat_checkpoint,
}
