"""Pipeline stages of about equal work."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from slapo.errors import SlapoError
from slapo.model_schedule.recipe import Stack
from slapo.schedule import Schedule


def layer_costs(model: nn.Module, layers: Sequence[str], head: str = "") -> list[float]:
    """Estimate each layer's work per token: the number of its matrix parameters."""
    costs = [_matrices(model.get_submodule(path)) for path in layers]
    if head:
        costs[-1] += _matrices(model.get_submodule(head))
    return costs


def _matrices(module: nn.Module) -> float:
    return float(sum(p.numel() for p in module.parameters() if p.dim() > 1))


def even_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return the indices of layers that end a stage, minimizing the most expensive stage.

    The last stage has no entry. Stages are filled from the last one, which leaves less to the
    first: it embeds and keeps activations longest.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(
            f"{len(costs)} layers cannot fill {stages} stages; pass a number from 1 to {len(costs)}"
        )
    # The most expensive stage is a run of layers, so its cost is one of these O(layers**2) sums.
    # The smallest that suffices is found by bisection, as a larger limit never needs more stages.
    # Costs are whole numbers, which floats add exactly in any order.
    limits = sorted({sum(costs[i:j]) for j in range(len(costs) + 1) for i in range(j)})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _filled(costs, limits[middle], stages) is None:
            low = middle + 1
        else:
            high = middle
    return _filled(costs, limits[low], stages) or []


def _filled(costs: Sequence[float], limit: float, stages: int) -> list[int] | None:
    """Return the ends of stages that cost at most `limit` each, or None if impossible."""
    ends: list[int] = []
    total = 0.0
    for number in reversed(range(len(costs))):
        must_end = number + 1 == stages - len(ends) - 1  # one layer is needed for each stage before
        if number < len(costs) - 1 and (must_end or total + costs[number] > limit):
            ends.append(number)
            total = 0.0
        total += costs[number]
        if total > limit or len(ends) >= stages:
            return None
    return ends[::-1]


def chosen_cuts(cuts: Any, counts: Sequence[int]) -> list[int]:
    """Return layer indices over all stacks from the caller's list, or one list per stack."""
    flat = list(cuts)
    is_one_each = True
    if any(isinstance(each, (list, tuple)) for each in flat):
        is_one_each = len(flat) == len(counts)
        starts = [sum(counts[:number]) for number in range(len(counts))]
        flat = [start + n for start, each in zip(starts, flat, strict=False) for n in each]
    last = sum(counts) - 1
    if not is_one_each or flat != sorted(set(flat)) or not all(0 <= n < last for n in flat):
        raise ValueError(
            f"pipeline_cuts is {cuts!r}; pass increasing indices of layers that end a stage, "
            f"from 0 to {last - 1}, in one list, or one per stack: {len(counts)}"
        )
    return flat


def cut(
    sch: Schedule,
    base: str,
    stacks: Sequence[Stack],
    layers: Sequence[Sequence[str]],
    ends: Sequence[int],
    inputs: Any,
) -> None:
    """Trace down to the layers that end stages, and cut after them."""
    containers, places, first = [], [], 0
    owners = [_container(sch, f"{base}.{stack.layers}".lstrip(".")) for stack in stacks]
    for container, after, paths in zip(owners, [*owners[1:], None], layers, strict=True):
        own = [n - first for n in ends if first <= n < first + len(paths)]
        first += len(paths)
        # A stage that ends with a stack ends after the module that calls it, such as the encoder:
        # its last norm is then in the same stage, and nothing inside it need be traced.
        whole = own[-1:] == [len(paths) - 1] and container != after
        within = own[:-1] if whole else own
        containers += [container] if within else []
        places += [paths[n] for n in within] + ([container] if whole else [])
    _trace(sch, containers or [p.rpartition(".")[0] for p in places], inputs)
    for path in places:
        sch[path].cut_pipeline_stage()


def _container(sch: Schedule, path: str) -> str:
    """Return the module that calls the layers; a ModuleList itself has no forward."""
    while isinstance(sch.mod.get_submodule(path), nn.ModuleList):
        path = path.rpartition(".")[0]
    return path


def _trace(sch: Schedule, containers: Sequence[str], inputs: Any) -> None:
    takes = inspect.signature(sch.mod.forward).parameters
    fixed = {"use_cache": False} if "use_cache" in takes and "use_cache" not in inputs else {}
    with warnings.catch_warnings(record=True) as caught:
        # Scripts that switch warnings off still get the reason of a failure.
        warnings.simplefilter("always")
        traced = sch.trace_until(
            [path for path in containers if path],
            tracer="huggingface",
            concrete_args=fixed,
            example_inputs=inputs,
        )
    if not traced:
        raise SlapoError(
            f"pipeline stages need a trace, but {caught[-1].message}; apply_schedule takes the "
            "inputs of your calls as example_inputs="
        )
    for each in caught:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
