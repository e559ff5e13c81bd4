"""Cross entropy of logits whose vocabulary lies over the ranks of a group.

Technique: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism" (2019), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from slapo.sharding.groups import group_rank, group_size, handle_of, share_of
from slapo.sharding.steps import Step, carry_out

#: The label of tokens that do not count, as everywhere in torch.
IGNORED = -100

# Steps, so that who watches these may leave the communication out. How slices become whole by them
# is not to be seen there: rules say it of the functions of autograd that take them.
_TELL_COLUMNS = Step("all_gather of columns", "replicate", "replicate")
_LARGEST = Step("all_reduce of the largest logits", "replicate", "replicate")
_ADD_UP = Step("all_reduce of the losses' terms", "replicate", "replicate")


class ParallelCrossEntropy(nn.Module):
    """Cross entropy of each token, from the columns of the logits that each rank has.

    The whole logits never exist: the ranks exchange one maximum and one packed sum of a few
    numbers per token.

    Parameters
    ----------
    group
        The ranks that share out the vocabulary, as ``torch.chunk`` cuts it; None is the default
        group, or a world of one where ``torch.distributed`` is not initialised.
    ignore_index
        The label of tokens whose loss is 0, and which give no gradient.

    Examples
    --------
    >>> logits, labels = torch.zeros(2, 3, 8), torch.tensor([[1, 7, -100], [0, 5, 2]])
    >>> ParallelCrossEntropy()(logits, labels).shape
    torch.Size([2, 3])
    """

    def __init__(self, group: dist.ProcessGroup | None = None, ignore_index: int = IGNORED) -> None:
        super().__init__()
        # A handle, which copies of the module share and pickles find again.
        self._group = handle_of(group)
        self.ignore_index = ignore_index

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share out the vocabulary; None outside of ``torch.distributed``."""
        found = self._group.group
        if found is None and dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        return found

    def forward(self, logits: Tensor, labels: Tensor, vocab_size: int | None = None) -> Tensor:
        """The loss of each token; the mean over them is the caller's.

        Parameters
        ----------
        logits
            ``(..., own columns)``, of a floating-point type; not changed.
        labels
            ``(...)``, integers, the same on all ranks.
        vocab_size
            Columns of all ranks together. Where it is left out and there are several ranks, they
            tell each other, in one more collective.

        Returns
        -------
        Tensor
            ``(...)``, float32, the same on all ranks; 0 where the label is `ignore_index`.

        Raises
        ------
        ValueError
            If shapes do not fit, or the logits are not this rank's part of `vocab_size` columns.
        IndexError
            On CPU, for a label that no rank has a column for. Elsewhere its loss is nan, as values
            are not looked at.

        Examples
        --------
        >>> logits = torch.tensor([[0.0, 0.0]], requires_grad=True)
        >>> loss = ParallelCrossEntropy()(logits, torch.tensor([1]))
        >>> loss.sum().backward()
        >>> logits.grad
        tensor([[ 0.5000, -0.5000]])
        """
        group = self.group
        start = _start_of(logits.shape[-1], vocab_size, group, logits.device)
        return token_losses(logits, labels, start, group, ignore_index=self.ignore_index)


def token_losses(
    logits: Tensor,
    labels: Tensor,
    start: int | Tensor = 0,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Cross entropy of each token, where this rank has the columns of the logits from `start` on.

    Parameters
    ----------
    logits
        ``(..., own columns)``, of a floating-point type; not changed.
    labels
        ``(...)``, integers of the whole vocabulary, the same on all ranks.
    start
        The token that the first column is of; an integer, or a tensor of one. Of no meaning for
        whole logits.
    group
        The ranks that have the other columns; None if the logits are whole: nothing is
        communicated then, also where ``torch.distributed`` is initialised.
    ignore_index
        The label of tokens whose loss is 0, and which give no gradient.

    Returns
    -------
    Tensor
        ``(...)``, float32, the same on all ranks.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is no column.
    IndexError
        On CPU, for a label that not exactly one rank has a column for. Elsewhere its loss is nan.

    Notes
    -----
    One float32 copy of the logits is kept, which the backward pass makes the gradient in place,
    unless the graph is retained. The gradient has no gradient of its own.

    Examples
    --------
    >>> token_losses(torch.zeros(2, 4), torch.tensor([3, -100]))
    tensor([1.3863, 0.0000])
    """
    check_shapes("token_losses", logits, labels)
    start = start if has_others(group) else 0
    losses = TokenLosses.apply(logits, labels, start, group, ignore_index)
    return cast(Tensor, losses)


# --- parts that the fused head shares -----------------------------------------------------------
@dataclass(frozen=True)
class Columns:
    """Labels as columns of this rank's part of the logits.

    Attributes
    ----------
    index
        ``(..., 1)``: the column of each token's label; column 0 or the last for those of others.
    is_own
        ``(...)``: whether this rank has the label's column.
    counts
        ``(...)``: whether the token counts.
    """

    index: Tensor
    is_own: Tensor
    counts: Tensor

    @classmethod
    def of(cls, labels: Tensor, start: int | Tensor, columns: int, ignore_index: int) -> Columns:
        """Of labels of the whole vocabulary, for columns from `start` on."""
        local, counts = labels.long() - start, labels != ignore_index
        is_own = (local >= 0) & (local < columns) & counts
        return cls(local.clamp(0, columns - 1).unsqueeze(-1), is_own, counts)


def exponentials_(
    logits: Tensor, columns: Columns, labels: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Put exponentials in the place of float32 logits, and give losses and the exponentials' sums.

    Parameters
    ----------
    logits
        ``(..., own columns)``, overwritten by exponentials, relative to the token's largest.

    Returns
    -------
    tuple of Tensor
        Losses and sums over the whole vocabulary, both ``(...)``.
    """
    peak = logits.amax(-1)
    if has_others(group):
        peak = carry_out(_LARGEST, _largest, peak, group)
    logits.sub_(peak.unsqueeze(-1))
    picked = logits.gather(-1, columns.index).squeeze(-1).masked_fill_(~columns.is_own, 0.0)
    packed = torch.stack([logits.exp_().sum(-1), picked, columns.is_own.to(picked.dtype)])
    if has_others(group):
        packed = carry_out(_ADD_UP, _add_up, packed, group, labels=labels, counts=columns.counts)
    else:
        _refuse(packed, labels, columns.counts)
    total, picked, owners = packed.unbind()
    # Without a look at the values, which an accelerator would have to wait for.
    is_lost = columns.counts & (owners != 1)
    losses = (total.log() - picked).masked_fill_(is_lost, torch.nan)
    return losses.masked_fill_(~columns.counts, 0.0), total


def gradient_(powers: Tensor, total: Tensor, columns: Columns, grad: Tensor | None) -> Tensor:
    """Put the gradient of the logits in the place of their exponentials.

    Parameters
    ----------
    powers, total
        What :func:`exponentials_` has left and given.
    grad
        ``(...)``: of the losses; None where it is 1.
    """
    each = columns.counts.to(powers.dtype)
    each = each if grad is None else each * grad
    powers.mul_((each / total).unsqueeze(-1))
    at_labels = torch.where(columns.is_own, -each, 0.0).unsqueeze(-1)
    return powers.scatter_add_(-1, columns.index, at_labels)


def has_others(group: dist.ProcessGroup | None) -> bool:
    """Whether other ranks have columns too; no group stands for whole logits."""
    return group is not None and group_size(group) > 1


def is_graph_kept() -> bool:
    """Whether a backward pass may come a second time to what was saved, in the present one."""
    if torch.compiler.is_compiling():  # which decides about copies by itself
        return True
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())


def refuse_graph(what: str) -> None:
    """Raise where a gradient is to have a gradient: its numbers are made outside of autograd.

    ``once_differentiable`` would take it for a constant where the losses were all that is asked of.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"the gradient of {what} has no gradient of its own (create_graph=True); use "
            "torch.nn.functional.cross_entropy where you need one"
        )


def check_shapes(what: str, logits: Tensor, labels: Tensor) -> None:
    """Refuse labels that are not one integer for each row of the logits."""
    if logits.dim() == 0 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"{what}: labels of shape {tuple(labels.shape)} do not fit logits or states of shape "
            f"{tuple(logits.shape)}; pass one label for each row of them"
        )
    if labels.is_floating_point() or not logits.is_floating_point():
        raise ValueError(
            f"{what}: labels are {labels.dtype} and logits {logits.dtype}; pass integers as labels "
            "and floating-point numbers as logits"
        )
    if not logits.shape[-1]:
        raise ValueError(
            f"{what}: logits of shape {tuple(logits.shape)} have no column on this rank; share "
            "the vocabulary out over fewer ranks"
        )


def _largest(peak: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    return peak


def _add_up(
    packed: Tensor, group: dist.ProcessGroup | None, labels: Tensor, counts: Tensor
) -> Tensor:
    dist.all_reduce(packed, group=group)
    if not torch.compiler.is_compiling() and dist.get_backend(group) != "fake":
        _refuse(packed, labels, counts)
    return packed


def _refuse(packed: Tensor, labels: Tensor, counts: Tensor) -> None:
    """Raise for labels outside the vocabulary, where values are at hand; on all ranks alike."""
    if torch.compiler.is_compiling() or labels.device.type != "cpu":
        return
    if isinstance(packed, FakeTensor):
        return
    is_lost = counts & (packed[2] != 1)
    if bool(is_lost.any()):
        raise IndexError(
            f"the labels {labels[is_lost].unique().tolist()[:5]} have no column of the logits, or "
            "one on several ranks; pass labels below the size of the vocabulary, and each rank's "
            "own columns with the token that they start at, and the group"
        )


def _start_of(
    columns: int, vocab_size: int | None, group: dist.ProcessGroup | None, device: torch.device
) -> int | Tensor:
    """The token that this rank's first column is of."""
    if vocab_size is None:
        return _start_by_asking(columns, group, device) if has_others(group) else 0
    ranks = group_size(group) if has_others(group) else 1
    rank = group_rank(group) if ranks > 1 else 0
    start, own = share_of(vocab_size, rank, ranks)
    if own != columns:
        raise ValueError(
            f"ParallelCrossEntropy: rank {rank} of {ranks} has {own} of {vocab_size} columns as "
            f"torch.chunk cuts them, and the logits have {columns}; pass this rank's own, and as "
            "vocab_size the columns of all ranks together, padding included"
        )
    return start


def _start_by_asking(columns: int, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """The columns of the ranks before, added up where they are: nothing waits for a device."""
    own = torch.tensor(columns, device=device)
    return carry_out(_TELL_COLUMNS, _columns_before, own, group)


def _columns_before(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    sizes = [torch.empty_like(own) for _ in range(group_size(group))]
    dist.all_gather(sizes, own, group=group)
    return torch.stack(sizes)[: group_rank(group)].sum()


class TokenLosses(torch.autograd.Function):
    """Losses and their gradient; for :func:`token_losses` and the rules of ``slapo.check``."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        start: int | Tensor,
        group: dist.ProcessGroup | None,
        ignore_index: int,
    ) -> Tensor:
        # In any case a copy, which is overwritten until it is the gradient.
        powers = logits.to(torch.float32, copy=True)
        columns = Columns.of(labels, start, logits.shape[-1], ignore_index)
        losses, total = exponentials_(powers, columns, labels, group)
        ctx.save_for_backward(powers, total, columns.index, columns.is_own, columns.counts)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # noqa: D102
        refuse_graph("token_losses")
        powers, total, *parts = ctx.saved_tensors
        if is_graph_kept():
            powers = powers.clone()
        own = gradient_(powers, total, Columns(*parts), grad)
        return own.to(ctx.dtype), None, None, None, None
