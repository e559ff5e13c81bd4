"""What it costs to schedule a model of N layers: a graph per layer, or one flat graph of all."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch.nn.functional as F
from torch import Tensor

import slapo
from benchmark.measure import Progress, Result, Target, Times, timed
from benchmark.models import Transformer, transformer_on_meta

SIZES = (12, 24, 48, 96, 192, 384)
REPEATS = 3
#: Models of fewer layers are scheduled several times in a turn: once takes a tenth of a second.
WHOLE = 48
#: Seconds of processor time that the published implementation takes: way -> layers -> seconds.
PUBLISHED = {"per_layer": {96: 3.4}, "flat": {12: 0.5, 96: 17.8}}


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """The pattern that is fused in every layer."""
    return F.gelu(x + bias)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The pattern that is checkpointed in every layer of a flat graph."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def schedule_per_layer(model: Transformer) -> slapo.Schedule:
    """A trace, a search, a fusion and a checkpoint for each layer; the root stays a module."""
    sch = slapo.create_schedule(model)
    for index in range(len(model.layers)):
        layer = sch[f"layers.{index}"]
        _decompose_and_shard(layer)
        layer.trace(flatten=True)
        layer.fuse(layer.find(bias_gelu), name="BiasGelu")
        layer.checkpoint()
    return sch


def schedule_flat(model: Transformer) -> slapo.Schedule:
    """One graph of the whole model: one trace, one search, N fusions."""
    sch = slapo.create_schedule(model)
    for index in range(len(model.layers)):
        _decompose_and_shard(sch[f"layers.{index}"])
    sch.trace(flatten=True)
    for match in sch.find(bias_gelu):
        sch.fuse(match, name="BiasGelu")
    return sch


def schedule_flat_checkpoint(model: Transformer) -> slapo.Schedule:
    """The same, and N checkpointed subgraphs."""
    sch = schedule_flat(model)
    for match in sch.find(attention):
        sch.checkpoint(match)
    return sch


def _decompose_and_shard(layer: slapo.Schedule) -> None:
    layer["up"].decompose()
    layer["up"].shard("weight", axis=0)
    layer["up"].shard("bias", axis=0)
    layer["down"].shard("weight", axis=1)


WAYS: dict[str, Callable[[Transformer], slapo.Schedule]] = {
    "per_layer": schedule_per_layer,
    "flat": schedule_flat,
    "flat_checkpoint": schedule_flat_checkpoint,
}


def run(quick: bool, progress: Progress) -> Result:
    """Schedule models of several sizes in turn, several times; report medians."""
    sizes, repeats = ((2, 4), 1) if quick else (SIZES, REPEATS)
    for schedule in WAYS.values():
        schedule(transformer_on_meta(1))  # TorchScript compiles equal fusions once per process
    measured: dict[tuple[str, int], list[Times]] = {}
    for repeat in range(repeats):
        for layers in sizes:
            for way in (*WAYS,) * (1 if quick else max(1, WHOLE // layers)):
                times = _measure(way, layers)
                measured.setdefault((way, layers), []).append(times)
                progress(
                    f"{way}, {layers} layers, {repeat + 1} of {repeats}: "
                    f"{1e3 * times.cpu / layers:.1f} ms of CPU per layer"
                )
    return _summary({key: _median(times) for key, times in measured.items()}, sizes)


def _measure(way: str, layers: int) -> Times:
    model = transformer_on_meta(layers)
    return timed(lambda: WAYS[way](model))[0]


def _median(times: list[Times]) -> Times:
    return Times(median(t.cpu for t in times), median(t.wall for t in times))


def _summary(times: dict[tuple[str, int], Times], sizes: tuple[int, ...]) -> Result:
    result = Result()
    for (way, layers), measured in times.items():
        published = PUBLISHED.get(way, {}).get(layers)
        result.rows.append(
            {
                "way": way,
                "layers": layers,
                "cpu_s": round(measured.cpu, 4),
                "wall_s": round(measured.wall, 4),
                "cpu_ms_per_layer": round(1e3 * measured.cpu / layers, 3),
                "published_cpu_s": "" if published is None else published,
            }
        )
    first, last = sizes[0], sizes[-1]
    for way in WAYS:
        growth = times[way, last].cpu / last / (times[way, first].cpu / first)
        result.targets.append(
            Target(f"{way}: time per layer, {last} to {first} layers", growth, 1.3)
        )
    for way, factor in (("flat", 5), ("per_layer", 1)):
        if (way, 96) in times:
            limit = PUBLISHED[way][96] / factor
            result.targets.append(Target(f"{way}: 96 layers", times[way, 96].cpu, limit, "s"))
    return result
