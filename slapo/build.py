"""From a schedule to something that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slapo.errors import SlapoError
from slapo.framework_dialect import get_dialect_cls
from slapo.graph.traced_module import TracedModule
from slapo.op.wrapper import innermost
from slapo.schedule import Schedule
from slapo.sharding.layout import inner_layout_of
from slapo.sharding.partial import has_bias
from slapo.sharding.shards import shards_of
from slapo.sharding.vocab import is_masked
from slapo.snapshot import restored_on_error
from slapo.weights.materialize import has_meta_tensors, materialize
from slapo.weights.tags import apply_tags
from slapo.weights.ties import check_ties


def build(
    sch: Schedule,
    target: str | None = None,
    init_weights: bool | Callable[..., Any] = True,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Make the scheduled model ready to run.

    Checks that ranks agree on the schedule and that ties hold, creates parameters that are on
    ``meta``, and lowers the schedule to a runtime.

    Parameters
    ----------
    sch
        The root schedule.
    target
        None for the transformed ``nn.Module`` itself, else the name of a runtime.
    init_weights
        How to create parameters on ``meta``: True for the model's own initialisation, a callable
        ``fn(module)`` or ``fn(module, path)``, or False to leave them.
    **kwargs
        For the runtime.

    Returns
    -------
    model
        The module, or the runtime's engine.
    optimizer
        The runtime's, None without one.

    Raises
    ------
    SlapoError
        If ranks applied different schedules, a tie broke, a module cannot initialise its
        parameters, or the schedule needs a runtime it is not built for.

    Examples
    --------
    >>> import torch.nn as nn
    >>> import slapo
    >>> sch = slapo.create_schedule(nn.Linear(2, 2))
    >>> model, optimizer = slapo.build(sch)
    >>> model is sch.mod, optimizer
    (True, None)
    """
    if sch.parent is not None:
        raise ValueError(f"build takes the root schedule, not the node at {sch.path!r}")
    dialect = get_dialect_cls("runtime", target) if target is not None else None
    if dialect is None:
        _refuse_runtime_features(sch, kwargs)
    check_same_schedule(sch)
    check_ties(sch.mod, sch.state.ties)
    check_shards(sch)
    _materialize(sch, init_weights)
    _renew_tags(sch)
    _compile_graphs(sch)
    if dialect is not None:
        return dialect().lower(sch, **kwargs)
    return sch.mod, None


def _refuse_runtime_features(sch: Schedule, kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise TypeError(
            f"build without a target takes no further arguments, got {sorted(kwargs)}; "
            "they belong to a runtime"
        )
    cuts = [
        path
        for path, node in sch.named_schedules()
        if node.metadata.primitives.get("cut_pipeline_stage")
    ]
    if cuts:
        raise SlapoError(
            f"pipeline stages are cut after {cuts}, which a plain module cannot run; build with a "
            "target runtime, or leave the cuts out"
        )


def check_same_schedule(sch: Schedule) -> None:
    """Every rank of the group applied the same primitives in the same order.

    Raises
    ------
    SlapoError
        On every rank, naming the first difference.
    """
    if sch.world_size == 1:
        return
    digests: list[Any] = [None] * sch.world_size
    dist.all_gather_object(digests, sch.digest(), group=sch.group)
    if len(set(digests)) == 1:
        return
    histories: list[Any] = [None] * sch.world_size
    dist.all_gather_object(histories, [str(r) for r in sch.history], group=sch.group)
    calls: list[Any] = [None] * sch.world_size
    dist.all_gather_object(calls, [r.call() for r in sch.history], group=sch.group)
    other = next(rank for rank in range(sch.world_size) if calls[rank] != calls[0])
    index = _first_difference(calls[0], calls[other])
    shown = [h[index] if index < len(h) else "nothing" for h in (histories[0], histories[other])]
    raise SlapoError(
        f"ranks applied different schedules: step {index} is {shown[0]} on rank 0 and {shown[1]} "
        f"on rank {other}; a schedule must be the same on every rank"
    )


def _first_difference(left: list[Any], right: list[Any]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def check_shards(sch: Schedule) -> None:
    """Refuse sharded modules that compute something else than the whole one does."""
    if sch.world_size == 1:
        return
    for path, node in sch.named_schedules():
        module = innermost(node.mod)
        specs, layout = shards_of(module), inner_layout_of(module)
        splits_output = layout.output is not None and layout.output.kind == "shard"
        if "weight" in specs and splits_output and has_bias(module) and "bias" not in specs:
            raise SlapoError(
                f"{path!r}: its weight is sharded along axis {specs['weight'].axis}, which splits "
                f'the output, and its bias is whole; add sch["{path}"].shard("bias", axis=0)'
            )
        if layout.vocabulary and not is_masked(module) and not node.mod._forward_pre_hooks:
            raise SlapoError(
                f"{path!r}: its rows are spread over the ranks, and nothing masks the tokens of "
                f'others; add sch["{path}"].sync("fwd_post", "all_reduce")'
            )


def _materialize(sch: Schedule, init_weights: bool | Callable[..., Any]) -> None:
    """Create values, or leave everything on meta where a module cannot initialise its own."""
    if init_weights is not False and has_meta_tensors(sch.mod):
        with restored_on_error(sch):
            materialize(sch.mod, init_weights, sch.group)


def _compile_graphs(sch: Schedule) -> None:
    """Generate the code of every graph now: errors show here, and torch.compile sees plain code."""
    for module in sch.mod.modules():
        inner = innermost(module)
        if isinstance(inner, TracedModule) and inner.is_stale:
            inner.compile_now()


def _renew_tags(sch: Schedule) -> None:
    """Tags follow a parameter that the user replaced by hand."""
    for _, node in sch.named_schedules():
        for name, tags in node.metadata.param_tags.items():
            param = innermost(node.mod)._parameters.get(name)
            if isinstance(param, torch.Tensor):
                apply_tags(param, tags, sch.group)
