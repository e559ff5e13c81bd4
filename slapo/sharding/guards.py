"""Refuse what would take slices of a model for the whole of it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slapo.errors import SlapoError
from slapo.sharding.groups import GroupHandle


def _save_pretrained(*args: Any, **kwargs: Any) -> None:
    raise SlapoError(
        "save_pretrained would write this rank's slices of a model that is sharded over several; "
        "save model.state_dict() of each rank, and put the slices together along the axes that "
        "they were sharded along (parameters know the whole's shape as orig_shape)"
    )


def refuse_saving(model: nn.Module) -> None:
    """Of a model of Transformers: let ``save_pretrained`` raise."""
    if hasattr(type(model), "save_pretrained"):
        model.__dict__["save_pretrained"] = _save_pretrained


def refuse_replicas_of_slices(group: GroupHandle) -> None:
    """Called in each forward: DDP must not take ranks for replicas that hold different slices.

    Raises
    ------
    SlapoError
        If it does.
    """
    wrapped = DistributedDataParallel._active_ddp_module
    if wrapped is None or group.ranks is None or len(group.ranks) == 1:
        return
    replicas = dist.get_process_group_ranks(wrapped.process_group)
    both = sorted(set(replicas) & set(group.ranks))
    if len(both) > 1:
        raise SlapoError(
            f"DistributedDataParallel takes the ranks {both} for replicas, over which this model "
            "is sharded, and has given all of them the slices of the first; make the model and "
            "the schedule anew, and pass DDP the process_group of the data-parallel ranks, such as "
            "mesh.get_group('dp'), or let slapo.build(sch, target='torch', mesh=mesh) do it"
        )
