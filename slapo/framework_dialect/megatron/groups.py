"""Megatron-Core's process groups, made to be those of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.agreement import all_ranks_or_none
from slapo.errors import SlapoError
from slapo.framework_dialect.gradients import is_counted_slice
from slapo.framework_dialect.megatron.load import megatron_core
from slapo.framework_dialect.ties import SharedParameter
from slapo.mesh import timeout_of_job
from slapo.sharding.state import shards_of
from slapo.wrapper import innermost


def initialize_groups(mesh: DeviceMesh) -> None:
    """Have Megatron-Core's groups of the mesh's sizes, and check that they are the mesh's.

    Groups that are there already are taken, so engines share them and a script may make them by
    itself. Both number the ranks by tp first, then dp, then pp.

    Raises
    ------
    SlapoError
        On every rank, if other groups are there.
    """
    parallel_state = megatron_core().parallel_state
    if parallel_state.model_parallel_is_initialized() and _outlived_the_job():
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.shape[2],
            pipeline_model_parallel_size=mesh.shape[0],
            create_gloo_process_groups=False,
            distributed_timeout_minutes=timeout_of_job().total_seconds() / 60,
        )
    all_ranks_or_none("megatron", lambda: _check_groups(mesh))


def _outlived_the_job() -> bool:
    """Whether the groups belong to a torch.distributed that was shut down."""
    parallel_state = megatron_core().parallel_state
    try:
        dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    except (KeyError, ValueError):
        return True
    return False


def _check_groups(mesh: DeviceMesh) -> None:
    parallel_state = megatron_core().parallel_state
    theirs = {
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "tp": parallel_state.get_tensor_model_parallel_group(),
    }
    for dim, group in theirs.items():
        found = dist.get_process_group_ranks(group)
        wanted = dist.get_process_group_ranks(mesh.get_group(dim))
        if found != wanted:
            sizes = {name: group.size() for name, group in theirs.items()}
            raise SlapoError(
                f"megatron-core's groups are {sizes}, with the {dim} ranks {found} here, and the "
                f"mesh of shape {tuple(mesh.shape)} has {wanted}; make the mesh of the same sizes, "
                "or, once nothing uses the groups any more, call "
                "megatron.core.parallel_state.destroy_model_parallel()"
            )
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if virtual is not None:
        raise SlapoError(
            f"megatron-core was initialised with virtual_pipeline_model_parallel_size={virtual}, "
            "and target 'megatron' runs one stage on each rank; initialise it without"
        )


def mark_sharded(module: nn.Module) -> None:
    """Tell Megatron-Core which parameters are slices: the others count once in a norm.

    Its ``partition_stride`` is the number of blocks that lie side by side, as in a packed QKV.
    """
    blocks = {}
    for part in map(innermost, module.modules()):
        for name, spec in shards_of(part).items():
            blocks[id(part._parameters.get(name))] = len(spec.blocks)
    for parameter in module.parameters():
        marks: Any = parameter
        full = getattr(parameter, "orig_shape", parameter.shape)
        pairs = enumerate(zip(parameter.shape, full, strict=True))
        marks.tensor_model_parallel = is_counted_slice(parameter)
        marks.partition_dim = next((axis for axis, (here, whole) in pairs if here != whole), -1)
        marks.partition_stride = blocks.get(id(parameter), 1)


def mark_shared(shared: Sequence[SharedParameter]) -> None:
    """Tell Megatron-Core which parameters other stages hold too.

    It marks with ``shared`` those that count elsewhere in a norm, and with ``shared_embedding``
    those that the distributed optimizer has to cut alike on all stages.
    """
    for one in shared:
        marks: Any = one.copies[0]
        marks.shared, marks.shared_embedding = not one.is_counted, True
