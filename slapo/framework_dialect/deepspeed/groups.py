"""The mesh in the words that DeepSpeed understands."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.framework_dialect.gradients import is_counted_slice


class MeshUnit:
    """A mesh of one pipeline stage as the "model parallelism unit" of ``deepspeed.initialize``.

    Parameters
    ----------
    mesh
        With the dimensions pp, dp and tp.

    Examples
    --------
    >>> import slapo.mesh
    >>> MeshUnit(slapo.mesh.init_mesh(device="cpu")).get_model_parallel_world_size()
    1
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def get_model_parallel_rank(self) -> int:
        """Rank among those that share out the model."""
        return self.mesh.get_local_rank("tp")

    def get_model_parallel_world_size(self) -> int:
        """Number of ranks that share out the model."""
        return self.mesh.shape[2]

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that share out the model."""
        return self.mesh.get_group("tp")

    # Without pipeline, tensor parallelism is all the model parallelism there is.
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group
    get_slice_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Rank among the replicas."""
        return self.mesh.get_local_rank("dp")

    def get_data_parallel_world_size(self) -> int:
        """Number of replicas."""
        return self.mesh.shape[1]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The replicas."""
        return self.mesh.get_group("dp")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of the replicas."""
        return dist.get_process_group_ranks(self.mesh.get_group("dp"))


def topology_of(mesh: DeviceMesh) -> Any:
    """The mesh as DeepSpeed's topology: both number the ranks by pp, then dp, then tp."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology  # optional package

    pp, dp, tp = mesh.shape
    return PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)


def mark_sharded(module: nn.Module) -> None:
    """Tell DeepSpeed which parameters are slices: the others count once in the gradient's norm."""
    for parameter in module.parameters():
        sharded = is_counted_slice(parameter)
        parameter.model_parallel = sharded  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = sharded  # type: ignore[attr-defined]
