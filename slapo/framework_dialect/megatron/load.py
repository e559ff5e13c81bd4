"""Import of Megatron-Core: device check, warnings, and process groups of the mesh."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slapo.agreement import all_ranks_or_none
from slapo.errors import SlapoError
from slapo.framework_dialect.runtime import quiet_warnings
from slapo.mesh import timeout_of_job

_PARTS = (
    "distributed",
    "enums",
    "optimizer",
    "parallel_state",
    "pipeline_parallel",
    # Imported by the schedules at run time.
    "transformer.multi_token_prediction",
)


def check_device(mesh: DeviceMesh) -> None:
    """Refuse a job without CUDA: Megatron-Core creates its buffers on CUDA by name."""
    remedy = 'use target="torch" or target="deepspeed", which run on any device'
    if not torch.cuda.is_available():
        raise SlapoError(
            'target="megatron" needs CUDA for its gradient and receive buffers, but this '
            f"process sees no CUDA device; {remedy}"
        )
    # Uses the same device string as Megatron-Core.
    theirs = torch.empty(0, device="cuda").device.type
    if mesh.device_type != theirs:
        raise SlapoError(
            f'target="megatron" runs on {theirs!r}, but the mesh is on {mesh.device_type!r}; '
            f"create it with slapo.init_mesh(..., device={theirs!r}), or {remedy}"
        )


@cache
def megatron_core() -> Any:
    """Return the package ``megatron.core`` with the parts that the runtime uses.

    The first call imports them, which takes seconds, so it is not done on import of this module.
    """
    with quiet():
        # It imports most of torch, whose own deprecation warnings do not concern users here.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        for part in _PARTS:
            importlib.import_module(f"megatron.core.{part}")
        return importlib.import_module("megatron.core")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings that concern Megatron-Core's code."""
    with quiet_warnings("megatron"):
        # It works without its optional kernels.
        warnings.filterwarnings("ignore", r".*\b(Apex|Transformer Engine)\b.*not installed")
        # A stage without trainable parameters is valid.
        warnings.filterwarnings("ignore", "WARNING: there is no optimizer on RANK")
        yield


def initialize_groups(mesh: DeviceMesh) -> None:
    """Create Megatron-Core's groups with the mesh's sizes, and check that they match the mesh.

    Existing groups are reused, so engines share them and a script may create them by itself. Both
    order the ranks by tp first, then dp, then pp.
    """
    parallel_state = megatron_core().parallel_state
    if parallel_state.model_parallel_is_initialized():
        try:
            dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
        except (KeyError, ValueError):  # groups of a torch.distributed that was shut down
            parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.shape[2],
            pipeline_model_parallel_size=mesh.shape[0],
            create_gloo_process_groups=False,
            distributed_timeout_minutes=timeout_of_job().total_seconds() / 60,
        )
    all_ranks_or_none("megatron", lambda: _check_groups(mesh))


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
                f"megatron-core's groups are {sizes}, with the {dim} ranks {found} here, but the "
                f"mesh of shape {tuple(mesh.shape)} has {wanted}; create a mesh of the same "
                "sizes, or, once the groups are unused, call "
                "megatron.core.parallel_state.destroy_model_parallel()"
            )
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if virtual is not None:
        raise SlapoError(
            f"megatron-core was initialized with virtual_pipeline_model_parallel_size={virtual}, "
            "but target 'megatron' runs one stage per rank; leave that out"
        )
