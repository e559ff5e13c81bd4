"""Cross entropy of logits whose vocabulary is sharded over the ranks of a group.

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

from slapo.op.dispatch import is_graph_kept, refuse_graph
from slapo.sharding.groups import group_rank, group_size, handle_of, share_of
from slapo.sharding.steps import Step, carry_out

#: Label of ignored tokens, torch's default.
IGNORED = -100
#: Remedy in the error for a gradient of the gradient.
INSTEAD = "use torch.nn.functional.cross_entropy"

# Steps, so that a watched run can skip the communication. They do not describe the gathering of
# slices: the placement check has rules for the autograd functions that take them.
_COLUMNS = Step("all_gather of columns", "replicate", "replicate")
_PEAK = Step("all_reduce of the largest logits", "replicate", "replicate")
_TERMS = Step("all_reduce of the losses' terms", "replicate", "replicate")


class ParallelCrossEntropy(nn.Module):
    """Cross entropy of each token, from each rank's columns of the logits.

    The full logits never exist. The ranks exchange one maximum and one packed sum of a few values
    per token.

    Parameters
    ----------
    group
        Ranks that shard the vocabulary, cut as by ``torch.chunk``. None is the default group, or a
        world of one if ``torch.distributed`` is not initialized.
    ignore_index
        Label of tokens with loss 0 and no gradient.
    label_smoothing
        Share of the target that is spread over the full vocabulary, as in torch.

    Examples
    --------
    >>> logits, labels = torch.zeros(2, 3, 8), torch.tensor([[1, 7, -100], [0, 5, 2]])
    >>> ParallelCrossEntropy()(logits, labels).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        ignore_index: int = IGNORED,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        check_smoothing("ParallelCrossEntropy", label_smoothing)
        # A handle: copies of the module share it, and pickles find the group again.
        self._group = handle_of(group)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that shard the vocabulary; None without ``torch.distributed``."""
        found = self._group.group
        if found is None and dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        return found

    def forward(self, logits: Tensor, labels: Tensor, vocab_size: int | None = None) -> Tensor:
        """Return the loss of each token; the caller takes the mean.

        Parameters
        ----------
        logits
            ``(..., own columns)``, floating point; not changed.
        labels
            ``(...)``, integers, the same on all ranks.
        vocab_size
            Total number of columns on all ranks. If omitted, several ranks exchange it in one more
            collective.

        Returns
        -------
        Tensor
            ``(...)``, float32, the same on all ranks; 0 for labels equal to `ignore_index`.

        Raises
        ------
        ValueError
            If shapes do not match, or the logits are not this rank's part of `vocab_size` columns.
        IndexError
            On CPU, for a label outside the columns of all ranks. On other devices its loss is nan,
            because values are not checked.

        Examples
        --------
        >>> logits = torch.tensor([[0.0, 0.0]], requires_grad=True)
        >>> loss = ParallelCrossEntropy()(logits, torch.tensor([1]))
        >>> loss.sum().backward()
        >>> logits.grad
        tensor([[ 0.5000, -0.5000]])
        """
        group = self.group
        start = self._start(logits, vocab_size, group)
        return token_losses(
            logits,
            labels,
            start,
            group,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def _start(
        self, logits: Tensor, vocab_size: int | None, group: dist.ProcessGroup | None
    ) -> int | Tensor:
        """Token of this rank's first column."""
        ranks, columns = group_size(group) if has_others(group) else 1, logits.shape[-1]
        if vocab_size is None and ranks == 1:
            return 0
        if vocab_size is None:  # summed on the device, to avoid a host sync
            return carry_out(
                _COLUMNS, _columns_before, torch.tensor(columns, device=logits.device), group
            )
        rank = group_rank(group) if ranks > 1 else 0
        start, count = share_of(vocab_size, rank, ranks)
        if count != columns:
            raise ValueError(
                f"ParallelCrossEntropy: rank {rank} of {ranks} has {count} of {vocab_size} "
                f"columns by torch.chunk, but the logits have {columns}; pass this rank's own, "
                "and the columns of all ranks, with padding, as vocab_size"
            )
        return start


def _columns_before(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    sizes = [torch.empty_like(own) for _ in range(group_size(group))]
    dist.all_gather(sizes, own, group=group)
    # Other ranks may have fewer columns, so the start is a sum and no multiple of the own size.
    return torch.stack(sizes)[: group_rank(group)].sum()


def token_losses(
    logits: Tensor,
    labels: Tensor,
    start: int | Tensor = 0,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the cross entropy of each token; this rank holds the logits' columns from `start` on.

    Without a `group` the logits are complete and nothing is communicated, even if
    ``torch.distributed`` is initialized. One float32 copy of the logits is kept. The backward pass
    turns it into their gradient in place, unless the graph is retained.
    """
    check_shapes("token_losses", logits, labels)
    check_smoothing("token_losses", label_smoothing)
    start = start if has_others(group) else 0
    losses = TokenLosses.apply(logits, labels, start, group, ignore_index, label_smoothing)
    return cast(Tensor, losses)


# --- parts that the fused head shares -----------------------------------------------------------
@dataclass(frozen=True)
class Columns:
    """Labels as columns of this rank's part of the logits; `counts` is False for ignored labels."""

    #: ``(..., 1)``, clamped to column 0 or the last one for labels of other ranks.
    index: Tensor
    is_own: Tensor
    counts: Tensor

    @classmethod
    def of(cls, labels: Tensor, start: int | Tensor, columns: int, ignore_index: int) -> Columns:
        """Map labels of the full vocabulary to the columns from `start` on."""
        local, counts = labels.long() - start, labels != ignore_index
        is_own = (local >= 0) & (local < columns) & counts
        return cls(local.clamp(0, columns - 1).unsqueeze(-1), is_own, counts)


def exponentials_(
    logits: Tensor,
    columns: Columns,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Overwrite float32 logits by exponentials, relative to the token's largest logit.

    Returns the losses, the sums of the exponentials over the full vocabulary, and with smoothing
    each column's share of the target.
    """
    # Shifted by the largest logit of all ranks, no exponential overflows, and the losses stay the
    # same.
    peak = logits.amax(-1)
    if has_others(group):
        peak = carry_out(_PEAK, _largest, peak, group)
    logits.sub_(peak.unsqueeze(-1))
    # Read before exp_() overwrites the logits. Only one rank holds a token's label, so a sum over
    # the ranks finds its logit.
    picked = logits.gather(-1, columns.index).squeeze(-1).masked_fill_(~columns.is_own, 0.0)
    terms = [picked, columns.is_own.to(picked.dtype)]
    if smoothing:
        terms += [logits.sum(-1), torch.full_like(picked, logits.shape[-1])]
    # One collective for all sums; is_own counts the ranks that hold the label.
    packed = torch.stack([logits.exp_().sum(-1), *terms])
    if has_others(group):
        packed = carry_out(_TERMS, _add_up, packed, group, labels=labels, counts=columns.counts)
    else:
        _refuse(packed, labels, columns.counts)
    total, picked, owners, *rest = packed.unbind()
    # Reading the values would make the host wait for an accelerator.
    is_lost = columns.counts & (owners != 1)
    even = smoothing / rest[1] if smoothing else None
    wanted = picked if even is None else (1 - smoothing) * picked + even * rest[0]
    losses = (total.log() - wanted).masked_fill_(is_lost, torch.nan)
    return losses.masked_fill_(~columns.counts, 0.0), total, even


def gradient_(
    powers: Tensor,
    total: Tensor,
    columns: Columns,
    grad: Tensor | None,
    even: Tensor | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """Overwrite exponentials by the gradient of the logits; `grad` is that of the losses, or 1."""
    each = columns.counts.to(powers.dtype)
    each = each if grad is None else each * grad
    # The gradient is softmax - target; `powers` / `total` is the softmax.
    powers.mul_((each / total).unsqueeze(-1))
    if even is not None:
        powers.sub_((each * even).unsqueeze(-1))
    # Labels of other ranks have a clamped index and add 0 there.
    at_labels = torch.where(columns.is_own, (smoothing - 1) * each, 0.0).unsqueeze(-1)
    return powers.scatter_add_(-1, columns.index, at_labels)


def has_others(group: dist.ProcessGroup | None) -> bool:
    """Return True if other ranks hold columns too."""
    return group is not None and group_size(group) > 1


def check_shapes(what: str, logits: Tensor, labels: Tensor) -> None:
    """Raise unless there is one integer label for each row of the logits."""
    if logits.dim() == 0 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"{what}: labels of shape {tuple(labels.shape)} do not match logits or states of "
            f"shape {tuple(logits.shape)}; pass one label per row"
        )
    if labels.is_floating_point() or not logits.is_floating_point():
        raise ValueError(
            f"{what}: labels are {labels.dtype} and logits {logits.dtype}; pass integer labels "
            "and floating-point logits"
        )
    if not logits.shape[-1]:
        raise ValueError(
            f"{what}: logits of shape {tuple(logits.shape)} have no column on this rank; shard "
            "the vocabulary over fewer ranks"
        )


def check_smoothing(what: str, value: float) -> None:
    """Raise for an invalid label smoothing."""
    if not 0 <= value < 1:
        raise ValueError(
            f"{what}: label_smoothing is {value!r}; pass a fraction of at least 0 and below 1"
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
    """Raise on all ranks for labels outside the vocabulary, where reading them is cheap."""
    is_fake = isinstance(packed, FakeTensor)
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or is_fake:
        return
    # Row 2 counts the ranks that hold the label.
    is_lost = counts & (packed[2] != 1)
    if bool(is_lost.any()):
        raise IndexError(
            f"the labels {labels[is_lost].unique().tolist()[:5]} have no column in the logits, "
            "or one on several ranks; pass labels below the vocabulary size, and each rank's "
            "own columns with their first token, and the group"
        )


class TokenLosses(torch.autograd.Function):
    """:func:`token_losses` and its gradient; ``slapo.check`` has a rule for it."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        start: int | Tensor,
        group: dist.ProcessGroup | None,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        # Always a copy: it is overwritten until it is the gradient.
        powers = logits.to(torch.float32, copy=True)
        columns = Columns.of(labels, start, logits.shape[-1], ignore_index)
        losses, total, even = exponentials_(powers, columns, labels, group, smoothing)
        parts = columns.index, columns.is_own, columns.counts
        ctx.save_for_backward(powers, total, even, *parts)
        ctx.dtype, ctx.smoothing = logits.dtype, smoothing
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph("token_losses", INSTEAD)
        powers, total, even, *parts = ctx.saved_tensors
        if is_graph_kept():
            powers = powers.clone()
        own = gradient_(powers, total, Columns(*parts), grad, even, ctx.smoothing)
        return own.to(ctx.dtype), None, None, None, None, None
