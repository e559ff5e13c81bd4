"""The differentiable collectives with the names and arguments of the published Slapo."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from slapo.sharding.collectives import (
    all_gather,
    copy_to_group,
    reduce_from_group,
    reduce_scatter,
    scatter,
)


def all_gather_forward_output(
    inp: Tensor,
    dim: int,
    group: dist.ProcessGroup | None = None,
    tensor_parallel_output_grad: bool = True,
) -> Tensor:
    """See :func:`slapo.sharding.all_gather`.

    Examples
    --------
    >>> import torch
    >>> all_gather_forward_output(torch.ones(2, 3), 1).shape
    torch.Size([2, 3])
    """
    return all_gather(inp, group, dim, tensor_parallel_output_grad)


def reduce_scatter_forward_output(
    inp: Tensor, dim: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """See :func:`slapo.sharding.reduce_scatter`."""
    return reduce_scatter(inp, group, dim)


def scatter_forward_output(inp: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """See :func:`slapo.sharding.scatter`."""
    return scatter(inp, group, dim)


def reduce_forward_output(inp: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """See :func:`slapo.sharding.reduce_from_group`."""
    return reduce_from_group(inp, group)


def reduce_backward_grad(inp: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """See :func:`slapo.sharding.copy_to_group`."""
    return copy_to_group(inp, group)
