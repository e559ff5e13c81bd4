"""Parameters that are one in the model and several in the job, compared before training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.agreement import all_ranks_or_none, checksum, communication_device, has_peers
from slapo.errors import SlapoError
from slapo.framework_dialect.gradients import is_tensor_parallel
from slapo.framework_dialect.runtime import Lowering
from slapo.framework_dialect.ties import SharedParameter, shared_parameters
from slapo.sharding.tags import SHARERS


@torch.no_grad()
def share_values(
    module: nn.Module,
    groups: Mapping[str, dist.ProcessGroup | None],
    shared: Sequence[SharedParameter] = (),
    created: Collection[str] = (),
    sync: bool = False,
) -> None:
    """Refuse replicas that hold other values, or make them equal. A collective of the world.

    Data-parallel ranks hold the same tensors; tensor-parallel ranks the same of those that are not
    sharded; stages the same of those that are tied. Models that are made from other seeds or files
    train in silence into something that nobody meant, and FSDP would even put one model together
    from parts of several.

    Parameters
    ----------
    module
        This rank's model or stages.
    groups
        Of this rank, by the dimensions ``"tp"`` and ``"dp"``.
    shared
        Parameters that several stages share.
    created
        Names of tensors that every rank has drawn by itself: these take the values of the first
        rank.
    sync
        Whether all of them do, in place of being compared.

    Raises
    ------
    SlapoError
        On every rank, naming the first tensor that differs.
    """
    named = list(_tensors(module))
    names = {id(tensor): name for name, tensor in named}
    whole = [(name, tensor) for name, tensor in named if not is_tensor_parallel(tensor)]
    ties = [(one.copies[0], one.group) for one in shared]
    work: list[tuple[str, Sequence[tuple[str, Tensor]], dist.ProcessGroup | None]] = [
        ("tensor-parallel ranks", whole, groups["tp"]),
        *_held_twice(named),
        # Before the replicas, which then take tied values from ranks that have them.
        *(("stages", [(names[id(tensor)], tensor)], group) for tensor, group in ties),
        ("data-parallel ranks", named, groups["dp"]),
    ]
    wrong: tuple[str, str] | None = None
    for who, tensors, group in work:
        differs = _share(tensors, group, sync, created)
        wrong = wrong or (None if differs is None else (differs, who))
    if not sync:
        all_ranks_or_none("build", lambda: _refuse(wrong))


@torch.no_grad()
def share_wholes(module: nn.Module, group: dist.ProcessGroup | None, sync: bool = False) -> None:
    """`share_values` of what is whole over the tensor-parallel ranks. A collective of the group.

    Raises
    ------
    SlapoError
        On every rank of the group, naming the first tensor that differs.
    """
    named = list(_tensors(module))
    whole = [(n, t) for n, t in named if not (is_tensor_parallel(t) or t.is_meta)]
    for who, tensors, ranks in (("tensor-parallel ranks", whole, group), *_held_twice(named)):
        differs = _share(tensors, ranks, sync)
        _refuse(None if differs is None else (differs, who))


def _held_twice(
    named: Sequence[tuple[str, Tensor]],
) -> list[tuple[str, Sequence[tuple[str, Tensor]], dist.ProcessGroup | None]]:
    """Slices that several ranks hold, with these."""
    found: dict[tuple[int, ...], tuple[list[tuple[str, Tensor]], dist.ProcessGroup | None]] = {}
    for name, tensor in named:
        sharers = getattr(tensor, SHARERS, None)
        if sharers is not None and not tensor.is_meta:
            found.setdefault(sharers.ranks, ([], sharers.group))[0].append((name, tensor))
    return [
        ("tensor-parallel ranks of one part", tensors, group) for tensors, group in found.values()
    ]


def _share(
    tensors: Sequence[tuple[str, Tensor]],
    group: dist.ProcessGroup | None,
    sync: bool,
    created: Collection[str] = (),
) -> str | None:
    """Make the tensors of a group equal, or else name the first that differs."""
    if group is None or not has_peers(group):
        return None
    for name, tensor in tensors:
        if sync or name in created:
            _broadcast(tensor, group)
    return None if sync else _first_difference(tensors, group)


def _refuse(wrong: tuple[str, str] | None) -> None:
    if wrong is not None:
        raise SlapoError(
            f"{wrong[0]!r} has different values on {wrong[1]} that must hold the same; seed alike "
            "before the model is made, load one checkpoint everywhere, or pass "
            "sync_replicated=True to take the first rank's. A slice that shard() did not make says "
            'so by sch[path].annotate(name, "orig_shape", shape_of_the_whole)'
        )


def _first_difference(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> str | None:
    if not named:
        return None
    sums = torch.stack([checksum(tensor).cpu() for _, tensor in named])
    # The largest and, by its complement, the smallest: in one collective.
    both = torch.stack([sums, ~sums]).to(communication_device(group))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    differs = (both[0] != ~both[1]).nonzero()
    return named[int(differs[0])][0] if len(differs) else None


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    value = tensor.detach().contiguous()
    dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
    if value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)


def share_over_mesh(
    lowering: Lowering,
    mesh: DeviceMesh,
    sync: bool,
    rank_of: Callable[[int], int] = lambda stage: stage,
) -> list[SharedParameter]:
    """`share_values` of what was lowered, over a mesh; returns what stages share.

    Parameters
    ----------
    sync
        See `share_values`.
    rank_of
        Stage -> its place along pp.
    """
    shared = shared_parameters(lowering, mesh.mesh.flatten(1).t().tolist(), rank_of)
    groups = {dim: mesh.get_group(dim) for dim in ("tp", "dp")}
    share_values(lowering.module, groups, shared, lowering.created, sync)
    return shared


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Each tensor once, with its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    tables: tuple[Callable[..., Iterable[tuple[str, Tensor]]], ...] = (
        module.named_parameters,
        module.named_buffers,
    )
    for table in tables:
        for name, tensor in table():
            found.setdefault(id(tensor), (name, tensor))
    return found.values()
