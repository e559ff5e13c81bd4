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
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from slapo.errors import SlapoError
from slapo.framework_dialect.agreement import same_on_all_ranks
from slapo.framework_dialect.buckets import (
    Bucket,
    by_kind,
    distinct,
    is_sharded,
    local_part,
    share_out,
    sum_of_squares,
)
from slapo.mesh import coordinate, current_device, device_of_world, extent

# As DDP has it: large enough for full bandwidth, small enough to overlap copies with traffic.
BUCKET_BYTES = 25 * 2**20

# Buckets under way at one time; each holds memory.
_IN_FLIGHT = 2


@torch.no_grad()
def average_gradients(
    params: Iterable[Parameter],
    group: dist.ProcessGroup | None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace each gradient by its mean over the ranks of a group.

    Parameters
    ----------
    params
        Ordinary parameters (no DTensors), in the same order on all ranks.
    group
        The data-parallel ranks; None for a world of one.
    bucket_bytes
        Gradients travel together in buffers of about this size.

    Examples
    --------
    >>> weight = Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, 2.0])
    >>> average_gradients([weight], group=None)
    >>> weight.grad
    tensor([1., 2.])
    """
    if group is None or group.size() == 1:
        return
    under_way: deque[Bucket] = deque()
    for bucket in share_out(_trained(params), bucket_bytes):
        if len(under_way) == _IN_FLIGHT:
            under_way.popleft().finish(group.size())
        bucket.start(group)
        under_way.append(bucket)
    for bucket in under_way:
        bucket.finish(group.size())


class TiedGradients:
    """Parameters that are one in the model and several in the run.

    Parameters
    ----------
    copies
        For each tie, the distinct parameters of this rank that stand for it. The order of ties is
        the same on all ranks, also where a rank has only some of them.
    groups
        For each tie, the group of the ranks that hold it; None if all copies are on this rank.

    Raises
    ------
    ValueError
        If a tie has no copy, copies of different shapes, or no group entry.

    Examples
    --------
    >>> first, second = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    >>> first.grad = torch.tensor([1.0, 2.0])
    >>> TiedGradients([[first, second]], [None]).reduce()
    >>> second.grad
    tensor([1., 2.])
    """

    def __init__(
        self, copies: Sequence[Sequence[Parameter]], groups: Sequence[dist.ProcessGroup | None]
    ) -> None:
        if len(copies) != len(groups):
            raise ValueError(f"{len(copies)} ties and {len(groups)} groups; pass one for each")
        for number, same in enumerate(copies):
            shapes = {tuple(param.shape) for param in same}
            if len(shapes) != 1:
                raise ValueError(
                    f"tie {number} has parameters of the shapes {sorted(shapes)}; pass at least "
                    "one, and all of one shape"
                )
        self.copies = [distinct(same) for same in copies]
        self.groups = list(groups)

    @torch.no_grad()
    def reduce(self) -> None:
        """Give every copy the sum of the gradients of all copies, on all ranks."""
        for same, group in zip(self.copies, self.groups, strict=True):
            first = _add_up(same)
            if group is not None and group.size() > 1:
                bucket = Bucket([first])
                bucket.start(group)
                bucket.finish()
            for other in same[1:]:
                _set_gradient(other, first.grad)

    @torch.no_grad()
    def broadcast_values(self) -> None:
        """Give every copy the values of the first one, on the first rank of its group."""
        for same, group in zip(self.copies, self.groups, strict=True):
            values = local_part(same[0].detach())
            if group is not None and group.size() > 1:
                dense = values.contiguous()
                dist.broadcast(dense, src=dist.get_global_rank(group, 0), group=group)
                values.copy_(dense)
            for other in same[1:]:
                local_part(other.detach()).copy_(values)


def new_tie_groups(rank_sets: Sequence[Iterable[int]]) -> list[dist.ProcessGroup | None]:
    """Create a process group for each set of ranks.

    Parameters
    ----------
    rank_sets
        Global ranks. A collective of the world: all ranks pass the same sets in the same order,
        also those of which they are no member.

    Returns
    -------
    list of ProcessGroup or None
        None for sets of one rank and for those without this rank. Equal sets share a group.

    Raises
    ------
    SlapoError
        If ranks pass different sets.

    Examples
    --------
    >>> new_tie_groups([[0]])
    [None]
    """
    sets = [tuple(sorted(set(ranks))) for ranks in rank_sets]
    same_on_all_ranks("the ranks that share tied parameters", sets)
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for ranks in sets:
        if ranks not in made:
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            # A rank outside gets a placeholder that is no group.
            made[ranks] = group if isinstance(group, dist.ProcessGroup) else None
    return [made[ranks] for ranks in sets]


def is_tensor_parallel(param: Tensor) -> bool:
    """Whether each tensor-parallel rank holds another slice of the parameter.

    Examples
    --------
    >>> is_tensor_parallel(Parameter(torch.ones(2)))
    False
    """
    return getattr(param, "orig_shape", None) is not None


@torch.no_grad()
def global_norm(
    params: Iterable[Parameter],
    *,
    tp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    shard_group: dist.ProcessGroup | None = None,
    counted: Callable[[Parameter], bool] = lambda param: True,
    tensor_parallel: Callable[[Parameter], bool] = is_tensor_parallel,
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
        Whether a parameter is a slice; by default, whether it has ``orig_shape``.

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
def clip_gradients(params: Iterable[Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients down so that their norm is at most ``max_norm``.

    Parameters
    ----------
    params
        This rank's.
    max_norm
        The largest norm to let through.
    norm
        What :func:`global_norm` has returned: the scale is the same on all ranks.

    Examples
    --------
    >>> weight = Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_gradients([weight], 1.0, global_norm([weight]))
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    grads = [local_part(param.grad) for param in distinct(params) if param.grad is not None]
    # The small number is that of torch.nn.utils.clip_grad_norm_. No branch: reading the norm would
    # make the host wait for the device.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, same in by_kind(grads):
        torch._foreach_mul_(same, scale.to(same[0].device))


@torch.no_grad()
def mean_loss(loss: Tensor | None, mesh: DeviceMesh, last: int = -1) -> Tensor:
    """Tell every rank of a mesh the loss of the last stages, averaged over replicas.

    Parameters
    ----------
    loss
        Mean over the micro-batches of this rank: a tensor of one element on ranks of the last
        pipeline stage, anything elsewhere.
    mesh
        Of the dimensions pp, dp and tp.
    last
        Coordinate along pp of the ranks that run the last stage.

    Returns
    -------
    Tensor
        Without dimensions, float32, the same on every rank.

    Raises
    ------
    SlapoError
        If a rank of the last stage has no loss.

    Examples
    --------
    >>> from slapo.mesh import init_mesh
    >>> mean_loss(torch.tensor(0.5), init_mesh(device="cpu"))
    tensor(0.5000)
    """
    is_last = coordinate(mesh, "pp") == last % extent(mesh, "pp")
    if is_last and loss is None:
        raise SlapoError("a rank of the last pipeline stage has no loss; its loss_fn was not run")
    mean = torch.zeros((), device=current_device(mesh))
    if is_last and loss is not None and coordinate(mesh, "tp") == 0:
        mean += loss.detach().reshape(()) / extent(mesh, "dp")
    # One collective of the world, after which no rank can differ in a last bit.
    if dist.get_world_size() > 1:
        dist.all_reduce(mean)
    return mean


def _trained(params: Iterable[Parameter]) -> list[Parameter]:
    return [param for param in distinct(params) if param.requires_grad]


def _add_up(same: list[Parameter]) -> Parameter:
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
