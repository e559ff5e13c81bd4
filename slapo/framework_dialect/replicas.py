"""Parameters with several copies in the job: the ranks that hold them, and their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from slapo.agreement import all_ranks_or_none, checksum, extremes, has_peers
from slapo.errors import SlapoError
from slapo.framework_dialect.gradients import distinct
from slapo.framework_dialect.runtime import Lowering
from slapo.mesh import new_group
from slapo.pipeline import Stage
from slapo.sharding.slicing import local_part
from slapo.sharding.tags import SHARERS, is_tensor_parallel

Named = Sequence[tuple[str, Tensor]]
Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of the model with copies in several stages.

    `places` are this rank's stages that hold it, with its name there. `group` contains the ranks
    that hold it, None if all copies are here. `is_counted` is True if the first copy here counts in
    a norm.
    """

    places: tuple[tuple[Stage, str], ...]
    group: Group
    is_counted: bool

    @property
    def copies(self) -> list[Parameter]:
        """Present parameters of this rank, looked up by name: FSDP2 replaces them."""
        return distinct(stage.get_parameter(name) for stage, name in self.places)


def _shared_parameters(
    lowering: Lowering, mesh: DeviceMesh, rank_of: Callable[[int], int]
) -> list[SharedParameter]:
    """This rank's parameters that several stages share, in one order on all ranks."""
    columns = mesh.mesh.flatten(1).t().tolist()  # for every position in a stage, the pipeline
    made: dict[tuple[int, ...], Group] = {}
    found = []
    here = dist.get_rank()
    for tie in lowering.ties:
        for column in columns:
            ranks = tuple(sorted({column[rank_of(stage)] for stage in tie.stages}))
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = new_group(ranks)  # every rank of the job creates every group
            if here not in ranks:
                continue
            places = tuple(
                (lowering.stages[stage], name)
                for stage, name in tie.members
                if stage in lowering.stages
            )
            is_counted = here == column[rank_of(tie.owner)]
            found.append(SharedParameter(places, made.get(ranks), is_counted))
    return found


def share_over_mesh(
    lowering: Lowering,
    mesh: DeviceMesh,
    sync: bool,
    rank_of: Callable[[int], int] = lambda stage: stage,
) -> list[SharedParameter]:
    """`_share_values` of a lowered schedule over a mesh; returns parameters shared by stages.

    A collective of the world. `rank_of` maps a stage to its coordinate along the pipeline.
    """
    shared = _shared_parameters(lowering, mesh, rank_of)
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    _share_values(lowering.module, tp, dp, shared, lowering.created, sync)
    return shared


def share_copies(shared: SharedParameter) -> None:
    """Set every copy of a parameter to the values of the first one."""
    first, *others = (local_part(copy.detach()) for copy in shared.copies)
    if shared.group is not None:
        _broadcast(first, shared.group)
    for other in others:
        other.copy_(first)


def share_wholes(module: nn.Module, group: Group, sync: bool = False) -> None:
    """`_share_values` of tensors replicated over the tensor-parallel group. A collective of it."""
    if group is not None:
        _share_values(module, group, None, sync=sync, among=group)


@torch.no_grad()
def _share_values(
    module: nn.Module,
    tp: Group,
    dp: Group,
    shared: Sequence[SharedParameter] = (),
    created: Collection[str] = (),
    sync: bool = False,
    among: Group = None,
) -> None:
    """Refuse replicas with different values, or make them equal. A collective of `among`.

    Data-parallel ranks must agree on all tensors, tensor-parallel ranks on replicated ones, stages
    on tied ones: otherwise replicas diverge silently, and FSDP combines shards of several models.
    Tensors in `created` (with `sync`, all) take the first rank's values. Other differences raise on
    every rank.
    """
    named = _tensors(module)
    names = {id(tensor): name for name, tensor in named}
    whole = [(name, tensor) for name, tensor in named if not is_tensor_parallel(tensor)]
    ties = [(one.copies[0], one.group) for one in shared if not one.copies[0].is_meta]
    work: list[tuple[str, Named, Group]] = [
        ("tensor-parallel ranks", whole, tp),
        *_held_twice(named),
        # Before the data-parallel ranks, which then take tied values that already agree.
        *(("stages", [(names[id(tensor)], tensor)], group) for tensor, group in ties),
        ("data-parallel ranks", named, dp),
    ]
    wrong: tuple[str, str] | None = None
    for who, tensors, group in work:
        if group is None or not has_peers(group):
            continue
        for name, tensor in tensors:
            if sync or name in created:
                _broadcast(tensor, group)
        # No early end: all ranks have to run the collectives of every group.
        differs = None if sync else _first_difference(tensors, group)
        wrong = wrong or (None if differs is None else (differs, who))
    if not sync:
        all_ranks_or_none("build", lambda: _refuse(wrong), among)


def _tensors(module: nn.Module) -> Named:
    """Each tensor once, with its first name; tensors on meta are left out."""
    found: dict[int, tuple[str, Tensor]] = {}
    tables: Iterable[Iterable[tuple[str, Tensor]]] = (
        module.named_parameters(),
        module.named_buffers(),
    )
    for table in tables:
        for name, tensor in table:
            if not tensor.is_meta:
                found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


def _held_twice(named: Named) -> list[tuple[str, Named, Group]]:
    """Shards that several tensor-parallel ranks hold, by these ranks."""
    found: dict[tuple[int, ...], tuple[list[tuple[str, Tensor]], Group]] = {}
    for name, tensor in named:
        sharers = getattr(tensor, SHARERS, None)
        if sharers is not None:
            found.setdefault(sharers.ranks, ([], sharers.group))[0].append((name, tensor))
    return [("tensor-parallel ranks of one shard", *pair) for pair in found.values()]


def _refuse(wrong: tuple[str, str] | None) -> None:
    if wrong is not None:
        raise SlapoError(
            f"{wrong[0]!r} has different values on {wrong[1]} that must agree; use the same seed "
            "before creating the model, load one checkpoint everywhere, or pass "
            "sync_replicated=True to take the first rank's. Mark a shard that shard() did not "
            'make with sch[path].annotate(name, "orig_shape", full_shape)'
        )


def _first_difference(named: Named, group: dist.ProcessGroup) -> str | None:
    if not named:
        return None
    largest, smallest = extremes(torch.stack([checksum(t).cpu() for _, t in named]), group)
    differs = (largest != smallest).nonzero()
    return named[int(differs[0])][0] if len(differs) else None


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    value = tensor.detach().contiguous()
    dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
    if value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)
