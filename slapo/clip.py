"""Gradient clipping for a model sharded over tensor-parallel ranks, for custom training loops."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.framework_dialect.gradients import (
    clip_factor,
    global_norm,
    is_counted_slice,
    scale_gradients,
)
from slapo.sharding.slicing import is_sharded
from slapo.sharding.state import sharding_of
from slapo.wrapper import innermost


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients in place so that the norm of the full model's gradient is at most `max_norm`.

    ``torch.nn.utils.clip_grad_norm_`` would compute the norm of the local shards only. Each rank
    would clip differently, and replicated parameters would diverge; it raises when given shards.
    This function is a collective of the ranks that the model is sharded over, also by
    ``fully_shard``. Engines clip by themselves: ``build(..., clip_grad_norm=)``.

    Parameters
    ----------
    model
        The module that ``build(sch)`` returned, or any module without shards.
    max_norm
        Largest 2-norm; ``math.inf`` only measures.

    Returns
    -------
    Tensor
        The 0-dim norm before clipping; the same on all ranks.

    Raises
    ------
    ValueError
        If `max_norm` is not above 0.
    TypeError
        If `model` is not a module.
    SlapoError
        If FSDP has flattened its parameters, or has sharded them over several groups.

    Examples
    --------
    >>> import torch
    >>> model = nn.Linear(1, 2, bias=False)
    >>> model.weight.grad = torch.tensor([[3.0], [4.0]])
    >>> float(clip_grad_norm_(model, 1.0)), model.weight.grad.flatten()
    (5.0, tensor([0.6000, 0.8000]))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"clip_grad_norm_: got {type(model).__name__}; pass the model instead of its "
            "parameters: only modules know which parameters are sharded"
        )
    if isinstance(max_norm, bool) or not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: max_norm is {max_norm!r}; pass a number above 0")
    parameters, slices = list(model.parameters()), _slices_of(model)
    norm = global_norm(
        parameters,
        tp_group=_group_of(model),
        shard_group=_shard_group(parameters),
        tensor_parallel=lambda param: id(param) in slices,
    )
    if max_norm != math.inf:
        scale_gradients(parameters, clip_factor(norm, max_norm))
    return norm


def _slices_of(model: nn.Module) -> set[int]:
    """Ids of the parameters whose shards count on this rank; of equal shards, the first counts.

    Parameters are looked up by name in their modules, since FSDP2 replaces the objects.
    """
    owners = [(part, sharding_of(part)) for part in map(innermost, model.modules())]
    found = [
        part._parameters.get(name)
        for part, state in owners
        if state
        for name, spec in state.specs.items()
        # Ranks that share a head of keys hold equal slices, which must count once in the norm.
        if spec.copy == 0
    ]
    return {id(p) for p in (*found, *filter(is_counted_slice, model.parameters()))}


def _shard_group(parameters: Iterable[nn.Parameter]) -> dist.ProcessGroup | None:
    """Return the group over which FSDP2 has sharded parameters, or None."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for param in parameters:
        if hasattr(param, "_is_flat_param") or type(param).__name__ == "FlatParameter":
            raise SlapoError(
                "clip_grad_norm_: FullyShardedDataParallel mixes sharded and replicated "
                "parameters; use fully_shard, or slapo.build(sch, target='torch', mesh=mesh, "
                "data_parallel='fsdp', clip_grad_norm=...)"
            )
        if is_sharded(param):
            placed: Any = param
            for dim, placement in enumerate(placed.placements):
                if placement.is_shard():
                    group = placed.device_mesh.get_group(dim)
                    # By ranks: two meshes over the same ranks have different group objects.
                    groups[tuple(dist.get_process_group_ranks(group))] = group
    if len(groups) > 1:
        raise SlapoError(
            f"clip_grad_norm_: parameters are sharded over several groups, {sorted(groups)}; use "
            "one mesh, or clip with slapo.build(sch, target='torch', clip_grad_norm=...)"
        )
    return next(iter(groups.values()), None)


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the tensor-parallel group of the model, or None."""
    for module in map(innermost, model.modules()):
        state = sharding_of(module)
        if state is not None and state.specs:
            return state.group.group
    return None
