"""The tensor-parallel group of a schedule."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import SlapoError
from slapo.history import warn_caller
from slapo.sharding.groups import group_of_one


def resolve_group(
    group: dist.ProcessGroup | DeviceMesh | None, mesh: DeviceMesh | None = None
) -> dist.ProcessGroup | None:
    """Process group for `group` or ``mesh["tp"]``; None for a world of one."""
    if mesh is not None:
        if group is not None:
            raise TypeError(
                "create_schedule: mesh includes the group; pass only one of mesh and group"
            )
        if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names is None:
            raise TypeError(
                f"create_schedule: mesh is {mesh!r}; pass slapo.init_mesh(pp=, dp=, tp=), or a "
                "DeviceMesh with names"
            )
        group = mesh["tp"] if "tp" in mesh.mesh_dim_names else group_of_one()
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names: Any = group.mesh_dim_names
            raise ValueError(
                f"create_schedule: group is a mesh of {group.ndim} dimensions {names}; pass one "
                'of them, such as mesh["tp"]'
            )
        group = group.get_group()
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise SlapoError(
                f"create_schedule: group {group!r} was given, but torch.distributed is not "
                "initialized; call slapo.init_mesh or torch.distributed.init_process_group first"
            )
        _warn_if_alone()
        return None
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"create_schedule: group is {group!r}; pass a ProcessGroup, or a DeviceMesh of one "
            'dimension such as mesh["tp"], that contains this process'
        )
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"create_schedule: global rank {dist.get_rank()} is not in the group; pass the group "
            "that contains this process"
        )
    return group


def _warn_if_alone() -> None:
    """Warn if several processes were launched, but this one runs as a world of one."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and world_size.isdigit() and int(world_size) > 1:
        warn_caller(
            f"create_schedule: this is process {os.environ['RANK']} of {world_size} (RANK and "
            "WORLD_SIZE are set), but torch.distributed is not initialized: the schedule covers "
            "this process only. Call slapo.init_mesh or torch.distributed.init_process_group first "
            "to cover all"
        )
