"""Differentiable collectives, each beside its conjugate.

The gradient of a collective is another collective. They come in pairs, and every backward calls its
partner's public function, so higher-order gradients work too. All of them

- return a new tensor and do not change their input,
- take ``group=None`` for the default group, or for a world of one if ``torch.distributed`` is not
  initialized; in a group of one they return their input,
- check sizes before they communicate, so that a mistake raises instead of hanging,
- are captured by ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from slapo.sharding.groups import (
    GroupHandle,
    check_axis,
    check_divisible,
    group_rank,
    group_size,
    handle_of,
    lengthened,
    move_blocks,
    parse_reshard,
    sharded_axis,
    share_of,
)
from slapo.sharding.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COPY,
    REDUCE_SCATTER,
    SCATTER,
    SUM_SHARED,
    Step,
    carry_out,
)

__all__ = ["all_gather", "all_to_all", "copy_to_group", "reduce_from_group", "reduce_scatter"]
__all__ += ["reshard", "scatter"]

# Newer releases of torch deprecate the second names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduce_from_group(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over the group; the gradient passes unchanged.

    Ends a tensor-parallel region whose ranks hold partial sums. The conjugate of
    :func:`copy_to_group`.

    Parameters
    ----------
    tensor : Tensor
        This rank's summand, with the same shape on all ranks.
    group : ProcessGroup, optional
        Ranks to sum over.

    Returns
    -------
    Tensor
        The sum, replicated on all ranks.

    Examples
    --------
    >>> reduce_from_group(torch.ones(2))
    tensor([1., 1.])
    """
    if group_size(group) == 1:
        return tensor
    return _apply(_ReduceFromGroup, tensor, group, ALL_REDUCE)


def sum_shared(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum the gradient of a slice over the ranks that hold that slice."""
    if group_size(group) == 1:
        return tensor
    # The same sum as that of reduce_from_group, under another step: the placement check has a rule
    # for each.
    return _apply(_ReduceFromGroup, tensor, group, SUM_SHARED)


def copy_to_group(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Pass the tensor unchanged; sum its gradient over the group.

    Starts a tensor-parallel region: each rank's weight slice contributes one summand of the input's
    gradient. The conjugate of :func:`reduce_from_group`.

    Parameters
    ----------
    tensor : Tensor
        A replicated tensor.
    group : ProcessGroup, optional
        Ranks to sum the gradient over.

    Returns
    -------
    Tensor
        A copy of the input, which may be changed in place; the input itself if no gradient is
        recorded.

    Examples
    --------
    >>> copy_to_group(torch.ones(2))
    tensor([1., 1.])
    """
    if group_size(group) == 1 or not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    return _apply(_CopyToGroup, tensor, group)


def all_gather(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    axis: int,
    tensor_parallel_output_grad: bool = True,
    total: int | None = None,
) -> Tensor:
    """Concatenate the ranks' tensors along ``axis``.

    Parameters
    ----------
    tensor : Tensor
        This rank's slice, with the same shape on all ranks unless ``total`` is given.
    group : ProcessGroup or None
        Ranks to gather from.
    axis : int
        Dimension to concatenate; negative values count from the end.
    tensor_parallel_output_grad : bool
        True if the following computation is tensor-parallel, so that each rank's gradient of the
        result is a summand and the backward is :func:`reduce_scatter`. With False every rank
        already has the full gradient, and the backward takes its slice (:func:`scatter`).
    total : int, optional
        Full size along ``axis`` if the slices are uneven, as from ``torch.chunk``.

    Returns
    -------
    Tensor
        The gathered tensor; its size along ``axis`` is ``total``, or the input's times the number
        of ranks.

    Raises
    ------
    ValueError
        If the tensor has no such axis, or its size does not match this rank's slice of ``total``.

    Examples
    --------
    >>> all_gather(torch.ones(2, 3), None, axis=-1).shape
    torch.Size([2, 3])
    """
    axis = check_axis("all_gather", tensor, axis)
    ranks = group_size(group)
    if total is not None:
        own = share_of(total, group_rank(group), ranks)[1]
        if tensor.shape[axis] != own:
            raise ValueError(
                f"all_gather: rank {group_rank(group)} of {ranks} has {own} of {total}, but the "
                f"tensor of shape {tuple(tensor.shape)} has {tensor.shape[axis]} along axis "
                f"{axis}; pass this rank's slice from torch.chunk"
            )
    if ranks == 1:
        return tensor
    is_uneven = total is not None and total % ranks != 0
    return _apply(
        _AllGather, tensor, group, axis, tensor_parallel_output_grad, total if is_uneven else None
    )


def reduce_scatter(
    tensor: Tensor, group: dist.ProcessGroup | None, axis: int, uneven: bool = False
) -> Tensor:
    """Sum over the group and keep this rank's slice of the sum along ``axis``.

    The backward is :func:`all_gather`.

    Parameters
    ----------
    tensor : Tensor
        This rank's summand, with the same shape on all ranks.
    group : ProcessGroup or None
        Ranks to sum over.
    axis : int
        Dimension to slice; the number of ranks must divide its size.
    uneven : bool
        Allow any size; slices are then cut as by ``torch.chunk``.

    Returns
    -------
    Tensor
        The input's shape with ``axis`` divided by the number of ranks.

    Raises
    ------
    ValueError
        If the tensor has no such axis, or the number of ranks does not divide its size.

    Examples
    --------
    >>> reduce_scatter(torch.ones(2, 3), None, axis=0).shape
    torch.Size([2, 3])
    """
    axis = check_divisible("reduce_scatter", tensor, axis, group, uneven)
    if group_size(group) == 1:
        return tensor
    return _apply(_ReduceScatter, tensor, group, axis)


def scatter(
    tensor: Tensor, group: dist.ProcessGroup | None, axis: int, uneven: bool = False
) -> Tensor:
    """Keep this rank's slice of a replicated tensor along ``axis``.

    The backward is :func:`all_gather`: every rank gets the full gradient.

    Parameters
    ----------
    tensor : Tensor
        A replicated tensor.
    group : ProcessGroup or None
        Ranks that shard the tensor.
    axis : int
        Dimension to slice; the number of ranks must divide its size.
    uneven : bool
        Allow any size; slices are then cut as by ``torch.chunk``.

    Returns
    -------
    Tensor
        A copy of the slice: the input's shape with ``axis`` divided by the number of ranks.

    Raises
    ------
    ValueError
        If the tensor has no such axis, or the number of ranks does not divide its size.

    Examples
    --------
    >>> scatter(torch.ones(2, 3), None, axis=0).shape
    torch.Size([2, 3])
    """
    axis = check_divisible("scatter", tensor, axis, group, uneven)
    if group_size(group) == 1:
        return tensor
    return _apply(_Scatter, tensor, group, axis)


def all_to_all(
    tensor: Tensor, group: dist.ProcessGroup | None, split_axis: int, concat_axis: int
) -> Tensor:
    """Exchange slices, so that another axis becomes the sharded one.

    Rank ``i`` sends its ``j``-th slice along ``split_axis`` to rank ``j``, and concatenates the
    received slices along ``concat_axis``. The backward swaps the two axes.

    Parameters
    ----------
    tensor : Tensor
        This rank's slice, with the same shape on all ranks.
    group : ProcessGroup or None
        Ranks that exchange slices.
    split_axis : int
        Dimension to slice; the number of ranks must divide its size.
    concat_axis : int
        Dimension to concatenate the received slices along.

    Returns
    -------
    Tensor
        The input's shape, with ``split_axis`` divided by the number of ranks and ``concat_axis``
        multiplied by it.

    Raises
    ------
    ValueError
        If the tensor lacks an axis, or the number of ranks does not divide the size of
        ``split_axis``.

    Examples
    --------
    >>> all_to_all(torch.ones(2, 3), None, split_axis=0, concat_axis=1).shape
    torch.Size([2, 3])
    """
    split_axis = check_divisible("all_to_all", tensor, split_axis, group)
    concat_axis = check_axis("all_to_all", tensor, concat_axis)
    if group_size(group) == 1:
        return tensor
    return _apply(_AllToAll, tensor, group, split_axis, concat_axis)


def reshard(tensor: Tensor, spec: str, group: dist.ProcessGroup | None = None) -> Tensor:
    """Change which of the last two dimensions is sharded over the group.

    ============================  ======================================  ===================
    before -> after               forward                                 backward
    ============================  ======================================  ===================
    ``"RR->RS"``, ``"RR->SR"``    keep this rank's slice                  all-gather
    ``"RS->RR"``, ``"SR->RR"``    all-gather                              keep the slice
    ``"RS->SR"``, ``"SR->RS"``    all-to-all                              the reverse
    ============================  ======================================  ===================

    Parameters
    ----------
    tensor : Tensor
        This rank's part, with two or more dimensions.
    spec : str
        Layouts before and after, see :func:`parse_reshard`.
    group : ProcessGroup, optional
        Ranks that share the tensor.

    Returns
    -------
    Tensor
        This rank's part in the new layout.

    Raises
    ------
    ValueError
        If ``spec`` is invalid, the tensor has fewer than two dimensions, or the number of ranks
        does not divide the size of the dimension to slice.

    Examples
    --------
    >>> reshard(torch.ones(2, 3), "RR->RS").shape
    torch.Size([2, 3])
    """
    source, target = parse_reshard(spec)
    if tensor.dim() < 2:
        raise ValueError(
            f"reshard {spec!r} needs a tensor of two dimensions or more, "
            f"not one of shape {tuple(tensor.shape)}"
        )
    if source == "RR":
        return scatter(tensor, group, sharded_axis(target))
    if target == "RR":
        # All ranks compute the same in layout RR, so the gradient is not a partial sum.
        axis = sharded_axis(source)
        return all_gather(tensor, group, axis, tensor_parallel_output_grad=False)
    return all_to_all(tensor, group, sharded_axis(target), sharded_axis(source))


def _apply(function: type[torch.autograd.Function], tensor: Tensor, *args: Any) -> Tensor:
    """Call ``function.apply``, which torch leaves untyped."""
    return cast(Tensor, function.apply(tensor, *args))


def _held(group: dist.ProcessGroup | None) -> Any:
    """A reference to the group for an autograd graph, which must not keep the group alive.

    Under torch.compile there is no graph, and a handle could not be created.
    """
    return group if torch.compiler.is_compiling() else handle_of(group)


def _group(held: Any) -> dist.ProcessGroup | None:
    return held.group if isinstance(held, GroupHandle) else held


# --- forward implementations --------------------------------------------------------------------
def _all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # gloo rejects non-contiguous tensors.
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _copy(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # Autograd would refuse in-place changes of a view, such as those of an activation.
    return tensor.clone()


def _all_gather(
    tensor: Tensor, group: dist.ProcessGroup | None, axis: int, total: int | None = None
) -> Tensor:
    ranks = group_size(group)
    if total is not None:  # all but the last have the longest slice
        longest = share_of(total, 0, ranks)[1]
        whole = _all_gather(lengthened(tensor, axis, longest), group, axis)
        return whole.narrow(axis, 0, total).contiguous()
    gathered = tensor.new_empty(ranks * tensor.shape[0], *tensor.shape[1:])
    all_gather_single(gathered, tensor.contiguous(), group=group)
    return move_blocks(gathered, ranks, 0, axis)


def _reduce_scatter(tensor: Tensor, group: dist.ProcessGroup | None, axis: int) -> Tensor:
    ranks, total = group_size(group), tensor.shape[axis]
    longest = share_of(total, 0, ranks)[1]
    if total % ranks:
        own = _reduce_scatter(lengthened(tensor, axis, longest * ranks), group, axis)
        return own.narrow(axis, 0, share_of(total, group_rank(group), ranks)[1]).contiguous()
    blocks = move_blocks(tensor, ranks, axis, 0)
    own = blocks.new_empty(blocks.shape[0] // ranks, *blocks.shape[1:])
    reduce_scatter_single(own, blocks, group=group)
    return own


def own_slice(tensor: Tensor, group: dist.ProcessGroup | None, axis: int) -> Tensor:
    """This rank's slice of a replicated tensor, without a gradient of its own."""
    own = tensor.narrow(axis, *share_of(tensor.shape[axis], group_rank(group), group_size(group)))
    # A copy: a view would keep the full tensor alive and pass in-place changes on to it.
    return own.clone(memory_format=torch.contiguous_format)


def _exchange(
    tensor: Tensor, group: dist.ProcessGroup | None, split_axis: int, concat_axis: int
) -> Tensor:
    ranks = group_size(group)
    blocks = move_blocks(tensor, ranks, split_axis, 0)
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return move_blocks(received, ranks, 0, concat_axis)


# --- autograd functions -------------------------------------------------------------------------
# A backward pass calls the public function of the conjugate, so that it can be differentiated too:
# the sum of a gradient in `_CopyToGroup.backward` is the forward of `_ReduceFromGroup`.
class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, step: Step) -> Tensor:
        ctx.held = _held(group)
        return carry_out(step, _all_reduce, tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return copy_to_group(grad, _group(ctx.held)), None, None


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.held = _held(group)
        return carry_out(COPY, _copy, tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from_group(grad, _group(ctx.held)), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        axis: int,
        tensor_parallel_output_grad: bool,
        total: int | None,
    ) -> Tensor:
        ctx.held, ctx.axis, ctx.uneven = _held(group), axis, total is not None
        ctx.scatter = reduce_scatter if tensor_parallel_output_grad else scatter
        return carry_out(ALL_GATHER, _all_gather, tensor, group, axis=axis, total=total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        own = ctx.scatter(grad, _group(ctx.held), ctx.axis, ctx.uneven)
        return own, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, axis: int) -> Tensor:
        ctx.held, ctx.axis, ctx.total = _held(group), axis, tensor.shape[axis]
        return carry_out(REDUCE_SCATTER, _reduce_scatter, tensor, group, axis=axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, _group(ctx.held), ctx.axis, total=ctx.total), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, axis: int) -> Tensor:
        ctx.held, ctx.axis, ctx.total = _held(group), axis, tensor.shape[axis]
        return carry_out(SCATTER, own_slice, tensor, group, axis=axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = all_gather(grad, _group(ctx.held), ctx.axis, False, ctx.total)
        return whole, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, split_axis: int, concat_axis: int
    ) -> Tensor:
        ctx.held, ctx.axes = _held(group), (concat_axis, split_axis)
        axes = {"split_axis": split_axis, "concat_axis": concat_axis}
        return carry_out(ALL_TO_ALL, _exchange, tensor, group, **axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, _group(ctx.held), *ctx.axes), None, None, None
