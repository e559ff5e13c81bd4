"""Gradients between backward and the optimizer: averaged, tied, measured and clipped.

For engines whose runtime does not do this. Every rank of a group has to call these collectives in
the same order, with parameters in the same order. Ranks may differ in which parameters have a
gradient: one that is missing on some ranks counts as zeros there, one missing on all stays None.

Gradients of half precision are summed in float32: a sum over many replicas in bfloat16 would need
half the traffic, but lose its last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from slapo.mesh import device_of_world
from slapo.sharding.slicing import is_sharded, local_part
from slapo.sharding.tags import SHARERS, is_tensor_parallel

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

# DDP's size: large enough for full bandwidth, small enough in memory.
_BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def reduce_gradients(
    params: Iterable[Parameter],
    group: dist.ProcessGroup | None,
    mean: bool = True,
    bucket_bytes: int = _BUCKET_BYTES,
) -> None:
    """Replace each gradient by its mean, or its sum, over the ranks of a group."""
    if group is None or group.size() == 1:
        return
    for bucket in _buckets([p for p in distinct(params) if p.requires_grad], bucket_bytes):
        _reduce(bucket, group, group.size() if mean else 1)


@torch.no_grad()
def sum_copies(copies: Sequence[Parameter], group: dist.ProcessGroup | None) -> None:
    """Set the gradient of every copy of a tied parameter to the sum over all copies.

    `copies` are those of this rank; `group` contains the ranks with copies, None if all are here.
    """
    first, *others = copies
    for other in others:
        if other.grad is not None and first.grad is None:
            _set_gradient(first, other.grad)
        elif other.grad is not None and first.grad is not None:
            local_part(first.grad).add_(local_part(other.grad))
    reduce_gradients([first], group, mean=False)
    for other in others:
        _set_gradient(other, first.grad)


def is_counted_slice(param: Tensor) -> bool:
    """Return whether this rank counts a shard: the first of the ranks that hold it does."""
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
    """2-norm of the full model's gradient; equal to that of one process, and on all ranks.

    A shard counts on each rank of `tp_group`, a replicated parameter once. `pp_group` contains the
    other stages, and `shard_group` is that of FSDP2's DTensors. `counted` is False for all copies
    of a tied parameter but the first.
    """
    groups = [g for g in (tp_group, pp_group, shard_group) if g is not None and g.size() > 1]
    first_tp, first_shard = _is_first(tp_group), _is_first(shard_group)

    def is_mine(param: Parameter) -> bool:
        # An element counts on one rank: replicated parameters on the first rank of each group,
        # shards on all.
        slice_or_first = first_tp or tensor_parallel(param)
        return slice_or_first and (first_shard or is_sharded(param)) and counted(param)

    every = distinct(params)
    grads = [local_part(p.grad) for p in every if p.grad is not None and is_mine(p)]
    device = every[0].device if every else device_of_world()
    # The same dtype on all ranks, independent of the gradients. Apple's accelerator has no float64.
    wide = torch.float32 if device.type == "mps" else torch.float64
    square = torch.zeros((), dtype=wide, device=device)
    for dtype, same in _by_kind(grads):
        norms = torch._foreach_norm(same, 2, dtype=_reduced_in(dtype))
        square += torch.stack(list(norms)).to(wide).square().sum().to(device)
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def scale_gradients(params: Iterable[Parameter], factor: Tensor) -> None:
    """Multiply gradients by a tensor, without reading it: that would synchronize the host."""
    grads = [local_part(param.grad) for param in distinct(params) if param.grad is not None]
    for dtype, same in _by_kind(grads):
        torch._foreach_mul_(same, factor.to(same[0].device, _reduced_in(dtype)))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that reduces a gradient's norm to at most `max_norm`."""
    # The epsilon is that of torch.nn.utils.clip_grad_norm_.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def distinct(params: Iterable[Parameter]) -> list[Parameter]:
    """Return each parameter once, in order."""
    return list({id(param): param for param in params}.values())


# --- buckets -------------------------------------------------------------------------------------
def _reduce(params: list[Parameter], group: dist.ProcessGroup, divisor: int) -> None:
    """Sum gradients in one flat buffer.

    The buffer ends with a count of ranks per gradient, so that every rank sends the same layout
    even if its gradients differ.
    """
    parts, n = [local_part(param.detach()) for param in params], len(params)
    length = sum(part.numel() for part in parts) + n
    flat = torch.zeros(length, dtype=_reduced_in(parts[0].dtype), device=parts[0].device)
    pieces = flat[:-n].split([part.numel() for part in parts])
    slots = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
    present = [param.grad is not None for param in params]
    flat[-n:] = 1 if all(present) else flat.new_tensor(present)
    if any(present):
        _copy(params, slots, to_slots=True)
    dist.all_reduce(flat, group=group)
    if not all(present):  # reading the counts synchronizes the host
        for param, count in zip(params, flat[-n:].tolist(), strict=True):
            if param.grad is None and count:
                param.grad = torch.zeros_like(param)
    if any(param.grad is not None for param in params):
        if divisor != 1:
            flat.div_(divisor)
        _copy(params, slots, to_slots=False)


def _copy(params: list[Parameter], slots: list[Tensor], to_slots: bool) -> None:
    pairs = zip(slots, params, strict=True)
    held = [(slot, local_part(param.grad)) for slot, param in pairs if param.grad is not None]
    buffer, grads = [slot for slot, _ in held], [grad for _, grad in held]
    torch._foreach_copy_(*((buffer, grads) if to_slots else (grads, buffer)))


def _buckets(params: list[Parameter], bucket_bytes: int) -> Iterator[list[Parameter]]:
    """Parameters of one device and dtype, in their order; a bucket ends when it is full."""
    for dtype, same in _by_kind(params):
        bucket, filled = [], 0
        for param in same:
            bucket.append(param)
            filled += param.numel() * _reduced_in(dtype).itemsize
            if filled >= bucket_bytes:
                yield bucket
                bucket, filled = [], 0
        if bucket:
            yield bucket


def _by_kind(tensors: Sequence[AnyTensor]) -> Iterator[tuple[torch.dtype, list[AnyTensor]]]:
    """Group tensors by device and dtype, as fused operations require."""
    kinds: dict[tuple[torch.device, torch.dtype], list[AnyTensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (_, dtype), same in kinds.items():
        yield dtype, same


def _reduced_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


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
