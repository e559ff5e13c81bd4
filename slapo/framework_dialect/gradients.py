"""Gradients between backward and the optimizer: averaged, tied, measured and clipped.

For engines whose runtime leaves that to them. Every rank of a group has to call the collectives
here in one order and with parameters in one order. Which parameters have a gradient may differ:
what is missing on some ranks counts as zeros there, what is missing on all of them stays None.

Numbers of half precision are added in float32: the sum of many replicas would otherwise lose the
last bits that bfloat16 has, for half the traffic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from slapo.framework_dialect.buckets import (
    Bucket,
    by_kind,
    distinct,
    is_sharded,
    local_part,
    reduced_in,
    share_out,
    sum_of_squares,
)
from slapo.mesh import device_of_world
from slapo.sharding.tags import SHARERS

# As DDP has it: large enough for full bandwidth, small enough to overlap copies with traffic.
BUCKET_BYTES = 25 * 2**20

# Buckets under way at one time; each holds memory.
_IN_FLIGHT = 2


@torch.no_grad()
def reduce_gradients(
    params: Iterable[Parameter],
    group: dist.ProcessGroup | None,
    mean: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace each gradient by its mean, or its sum, over the ranks of a group.

    Parameters
    ----------
    params
        In the same order on all ranks.
    group
        The ranks; None for a world of one.
    mean
        Whether the sum is divided by their number.
    bucket_bytes
        Gradients travel together in buffers of about this size.

    Examples
    --------
    >>> weight = Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, 2.0])
    >>> reduce_gradients([weight], group=None)
    >>> weight.grad
    tensor([1., 2.])
    """
    if group is None or group.size() == 1:
        return
    divisor = group.size() if mean else 1
    under_way: deque[Bucket] = deque()
    for bucket in share_out(_trained(params), bucket_bytes):
        if len(under_way) == _IN_FLIGHT:
            under_way.popleft().finish(divisor)
        bucket.start(group)
        under_way.append(bucket)
    for bucket in under_way:
        bucket.finish(divisor)


@torch.no_grad()
def sum_copies(copies: Sequence[Parameter], group: dist.ProcessGroup | None) -> None:
    """Give every copy of a tied parameter the sum of the gradients of all of them.

    Parameters
    ----------
    copies
        The distinct parameters of this rank that stand for one of the model.
    group
        The ranks that hold it; None if all copies are on this rank.

    Examples
    --------
    >>> first, second = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    >>> first.grad = torch.tensor([1.0, 2.0])
    >>> sum_copies([first, second], None)
    >>> second.grad
    tensor([1., 2.])
    """
    first = _add_up(copies)
    if group is not None and group.size() > 1:
        bucket = Bucket([first])
        bucket.start(group)
        bucket.finish()
    for other in copies[1:]:
        _set_gradient(other, first.grad)


def is_tensor_parallel(param: Tensor) -> bool:
    """Whether each tensor-parallel rank holds another slice of the parameter.

    Examples
    --------
    >>> is_tensor_parallel(Parameter(torch.ones(2)))
    False
    """
    return getattr(param, "orig_shape", None) is not None


def is_counted_slice(param: Tensor) -> bool:
    """Whether it is a slice that counts on this rank: of those that hold the same, on the first."""
    sharers = getattr(param, SHARERS, None)
    return is_tensor_parallel(param) and (sharers is None or _is_first(sharers.group))


@torch.no_grad()
def global_norm(
    params: Iterable[Parameter],
    *,
    tp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    shard_group: dist.ProcessGroup | None = None,
    counted: Callable[[Parameter], bool] = lambda param: True,
    tensor_parallel: Callable[[Parameter], bool] = is_counted_slice,
) -> Tensor:
    """2-norm of the gradient of the whole model, as one process would see it.

    Parameters
    ----------
    params
        This rank's parameters, DTensors of FSDP2 included.
    tp_group
        The tensor-parallel ranks. A slice counts on each of them, a replicated parameter once.
    pp_group
        The ranks that hold the other stages.
    shard_group
        The data-parallel ranks among which FSDP2 has shared out its DTensors.
    counted
        Whether a parameter counts on this rank: False for all copies of a tied one but the first.
    tensor_parallel
        Whether a parameter is a slice that counts here; by default, whether it has ``orig_shape``,
        and is the first of those that are the same.

    Returns
    -------
    Tensor
        Without dimensions, in float64 where the device has that; the same on all ranks.

    Examples
    --------
    >>> weight = Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> float(global_norm([weight]))
    5.0
    """
    groups = [g for g in (tp_group, pp_group, shard_group) if g is not None and g.size() > 1]
    first_tp, first_shard = _is_first(tp_group), _is_first(shard_group)

    def is_mine(param: Parameter) -> bool:
        slice_or_first = first_tp or tensor_parallel(param)
        return slice_or_first and (first_shard or is_sharded(param)) and counted(param)

    every = distinct(params)
    grads = [local_part(p.grad) for p in every if p.grad is not None and is_mine(p)]
    device = every[0].device if every else device_of_world()
    square = sum_of_squares(grads, device)
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def scale_gradients(params: Iterable[Parameter], factor: Tensor) -> None:
    """Multiply gradients by one number.

    Parameters
    ----------
    params
        This rank's.
    factor
        Without dimensions; the same on all ranks. It is not read here: that would make the host
        wait for the device.

    Examples
    --------
    >>> weight = Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> scale_gradients([weight], clip_factor(global_norm([weight]), 1.0))
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    grads = [local_part(param.grad) for param in distinct(params) if param.grad is not None]
    for dtype, same in by_kind(grads):
        torch._foreach_mul_(same, factor.to(same[0].device, reduced_in(dtype)))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What brings a gradient's norm down to at most ``max_norm``.

    Examples
    --------
    >>> clip_factor(torch.tensor(4.0), 1.0)
    tensor(0.2500)
    """
    # The small number is that of torch.nn.utils.clip_grad_norm_.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _trained(params: Iterable[Parameter]) -> list[Parameter]:
    return [param for param in distinct(params) if param.requires_grad]


def _add_up(same: Sequence[Parameter]) -> Parameter:
    """Sum the gradients of this rank's copies in the first."""
    first = same[0]
    for other in same[1:]:
        if other.grad is None:
            continue
        if first.grad is None:
            _set_gradient(first, other.grad)
        else:
            local_part(first.grad).add_(local_part(other.grad))
    return first


def _set_gradient(param: Parameter, grad: Tensor | None) -> None:
    """Copy a gradient: two parameters that share one would each scale it."""
    if grad is None:
        param.grad = None
        return
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    local_part(param.grad).copy_(local_part(grad))


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return group is None or group.rank() == 0
