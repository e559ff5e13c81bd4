"""The head of a language model and its loss in one, so that the whole logits never exist.

Techniques: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), section
3.2, for gradients made by chunks in the forward pass; Shoeybi et al., "Megatron-LM" (2019),
section 3, for a vocabulary that is sharded over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.op.cross_entropy import (
    IGNORED,
    INSTEAD,
    Columns,
    check_shapes,
    check_smoothing,
    exponentials_,
    gradient_,
    has_others,
)
from slapo.op.dispatch import is_graph_kept, refuse_graph
from slapo.op.linear import same_linear
from slapo.sharding.collectives import all_gather
from slapo.sharding.groups import group_size
from slapo.sharding.state import copy_shards, sharding_of, shards_of, syncs_of

#: Tokens whose logits exist at a time: few for caches, many for the units of an accelerator.
_CHUNK = {"cpu": 256}
_CHUNK_ELSEWHERE = 1024


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
    ignore_index: int = IGNORED,
    chunk: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Sum of the cross entropies of ``F.linear(hidden, weight, bias)``, by chunks of tokens.

    ``cross_entropy(linear(hidden, weight, bias).float(), labels, reduction="sum")``, of which the
    logits of one chunk exist at a time. The gradients are made in the forward pass, from the same
    logits; the backward pass scales them.

    Parameters
    ----------
    hidden
        ``(tokens, features)``, the same on all ranks of `group`.
    weight
        ``(own vocabulary, features)``: the rows of this rank, from `start` on.
    labels
        ``(tokens,)``, integers of the whole vocabulary, the same on all ranks.
    bias
        ``(own vocabulary,)``.
    start
        The token that the first row of `weight` is of. Of no meaning for a whole weight.
    group
        The ranks that have the other rows; None if the weight is whole: nothing is communicated
        then, also where ``torch.distributed`` is initialized.
    ignore_index
        The label of tokens that do not count.
    chunk
        Tokens at a time, the same on all ranks; 256 on CPU and 1024 elsewhere unless given.
    label_smoothing
        The share of the target that is spread over the whole vocabulary, as in torch.

    Returns
    -------
    Tensor
        A float32 scalar, the same on all ranks. The gradient of `hidden` is this rank's summand,
        to be summed over the group (``sync("bwd_post", "all_reduce")``); those of `weight` and
        `bias` are complete.

    Raises
    ------
    ValueError
        If shapes do not fit, or `chunk` is not positive.
    IndexError
        On CPU, for a label that not exactly one rank has a row for. Elsewhere the loss is nan.

    Examples
    --------
    >>> hidden, weight = torch.randn(5, 4), torch.randn(7, 4, requires_grad=True)
    >>> labels = torch.tensor([0, 6, -100, 3, 3])
    >>> loss = linear_cross_entropy(hidden, weight, labels, chunk=2)
    >>> whole = F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
    >>> torch.allclose(loss, whole)
    True
    """
    chunk = _CHUNK.get(hidden.device.type, _CHUNK_ELSEWHERE) if chunk is None else chunk
    _check_operands(hidden, weight, labels, bias, chunk)
    check_smoothing("linear_cross_entropy", label_smoothing)
    start = start if has_others(group) else 0
    is_training = torch.is_grad_enabled()
    settings = _Settings(start, group, ignore_index, chunk, is_training, label_smoothing)
    with _own_precision(hidden.device.type) as dtype:
        if dtype is not None:
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        total = LinearLoss.apply(hidden, weight, bias, labels, settings)
    return cast(Tensor, total)


def _check_operands(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk: int
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: hidden of shape {tuple(hidden.shape)} and weight of shape "
            f"{tuple(weight.shape)} do not fit; pass (tokens, features) and (vocabulary, features)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: bias of shape {tuple(bias.shape)} does not fit weight of shape "
            f"{tuple(weight.shape)}; pass one number for each row, cut as the rows are"
        )
    check_shapes("linear_cross_entropy", hidden, labels)
    if not len(weight):
        raise ValueError(
            f"linear_cross_entropy: weight of shape {tuple(weight.shape)} has no row on this rank; "
            "share the vocabulary out over fewer ranks"
        )
    if chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk is {chunk}; pass 1 token or more")


@contextmanager
def _own_precision(device: str) -> Iterator[torch.dtype | None]:
    """Turn autocast off, and yield the dtype that it would cast operands of products to."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        yield None
        return
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        yield dtype


@dataclass(frozen=True)
class _Settings:
    """Arguments of the autograd function beside its tensors."""

    start: int
    group: dist.ProcessGroup | None
    ignore_index: int
    chunk: int
    is_training: bool
    smoothing: float


class _Gradients:
    """Gradients of the operands that need one; each chunk of tokens adds to them."""

    def __init__(self, needed: list[bool], hidden: Tensor, weight: Tensor) -> None:
        self.are_needed = any(needed)
        self.weight, self.hidden = weight, torch.empty_like(hidden) if needed[0] else None
        # Added up in float32, so that many chunks lose nothing, and half precision is not left.
        self.of_weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        self.of_bias = weight.new_zeros(len(weight), dtype=torch.float32) if needed[2] else None

    def add(self, tokens: slice, hidden: Tensor, logits: Tensor) -> None:
        """Add the share of a chunk, given its hidden states and the gradient of its logits."""
        if self.of_bias is not None:
            self.of_bias += logits.sum(0)
        logits = logits.to(self.weight.dtype)
        if self.hidden is not None:
            torch.mm(logits, self.weight, out=self.hidden[tokens])
        if self.of_weight is None:
            return
        if self.of_weight.dtype == hidden.dtype:
            self.of_weight.addmm_(logits.T, hidden)
        else:
            self.of_weight += logits.T @ hidden


class LinearLoss(torch.autograd.Function):
    """:func:`linear_cross_entropy` and its gradients; ``slapo.check`` has a rule for it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        settings: _Settings,
    ) -> Tensor:
        needed = [need and settings.is_training for need in ctx.needs_input_grad[:3]]
        grads = _Gradients(needed, hidden, weight)
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        for first in range(0, len(hidden), settings.chunk):
            tokens = slice(first, first + settings.chunk)
            # By a function, so that the logits of one chunk are gone before those of the next.
            losses[tokens] = _losses_of(tokens, hidden, weight, bias, labels, settings, grads)
        ctx.save_for_backward(grads.hidden, grads.of_weight, grads.of_bias)
        ctx.dtypes = [hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph("linear_cross_entropy", INSTEAD)
        scale = torch.mul if is_graph_kept() else Tensor.mul_
        found = [
            None if saved is None else scale(saved, grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *found, None, None


def _losses_of(
    tokens: slice,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    settings: _Settings,
    grads: _Gradients,
) -> Tensor:
    """Compute the losses of one chunk, and add its share to the gradients."""
    logits = F.linear(hidden[tokens], weight, bias).float()
    own = (settings.start, len(weight), settings.ignore_index)
    columns = Columns.of(labels[tokens], *own)
    group, smoothing = settings.group, settings.smoothing
    losses, total, even = exponentials_(logits, columns, labels[tokens], group, smoothing)
    if grads.are_needed:
        gradient_(logits, total, columns, None, even, smoothing)
        grads.add(tokens, hidden[tokens], logits)
    return losses


@dataclass
class Targets:
    """Labels of a :class:`LossHead`: ``(batch, seq)``, of the whole vocabulary, on all ranks alike.

    With `shift` each position predicts the next one's label, as in a causal language model. The sum
    of the losses is divided by `num_items`, by default the number of labels that count.
    `label_smoothing` is that of torch's cross entropy.
    """

    labels: Tensor
    shift: bool = True
    num_items: Tensor | int | None = None
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0

    def moved(self) -> Tensor:
        """Return the label that each position predicts, ``(batch, seq)``."""
        if not self.shift:
            return self.labels
        return F.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:]

    def mean(self, total: Tensor) -> Tensor:
        """Divide the sum of the losses; as in torch, without any it is nan, with gradient 0."""
        count = self.count()
        if self.num_items is not None:
            return total / count
        assert isinstance(count, Tensor)
        return torch.where(count > 0, total / count.clamp(min=1), float("nan"))

    def count(self) -> Tensor | int:
        """Return the divisor of the sum of the losses."""
        if self.num_items is None:
            return (self.moved() != self.ignore_index).sum()
        if isinstance(self.num_items, Tensor):  # engines count on the host
            return self.num_items.to(self.labels.device)
        return self.num_items


class LossHead(nn.Linear):
    """The head of a language model, which gives the loss instead of logits while it may.

    ``head(x) -> logits --> head(x) -> loss`` while ``head.targets`` is set. Its rows may be a slice
    of a sharded vocabulary (``sch["head"].shard("weight", 0, uneven=True)``): the ranks then
    compute parts of the loss, and the gradient of the input is a partial sum, which
    ``sync("bwd_post", "all_reduce")`` sums. Its parameters are used within its own forward, so
    that engines which gather them around modules find them in use there.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As in ``nn.Linear``.

    Attributes
    ----------
    targets : Targets or None
        Labels of the next call; None for logits. Whoever sets it takes it back.
    chunk : int or None
        As in :func:`linear_cross_entropy`.

    Examples
    --------
    >>> head = LossHead.like(nn.Linear(4, 7, bias=False))
    >>> states = torch.randn(2, 3, 4)
    >>> head(states).shape
    torch.Size([2, 3, 7])
    >>> head.targets = Targets(torch.tensor([[1, 6, 2], [0, 3, -100]]))
    >>> head(states).shape
    torch.Size([])
    """

    #: In a trace it stays a call: what it gives depends on the call.
    traceable = False
    targets: Targets | None = None
    chunk: int | None = None
    #: The loss of the last call, by which it is known again where others may have changed it.
    given: Tensor | None = None
    #: Of the last call that gave a loss without gradients: metrics read them there.
    logits: Tensor | None = None

    @classmethod
    def like(cls, linear: nn.Linear) -> LossHead:
        """Build the same layer around the parameter objects of `linear`."""
        new = same_linear(cls, linear)
        copy_shards(linear, new)
        return new

    def forward(self, input: Tensor) -> Tensor:
        """``(batch, seq, in_features)`` -> ``(batch, seq, out_features)``, or the mean loss.

        Raises
        ------
        ValueError
            With targets: if labels do not fit the input, the weight is sliced in another way than
            by rows, or a sync of logits follows.
        """
        if self.targets is None:
            return F.linear(input, self.weight, self.bias)
        check_shapes("LossHead", input, self.targets.labels)
        start, group = self._own_rows()
        total = linear_cross_entropy(
            input.flatten(0, -2),
            self.weight,
            self.targets.moved().flatten(),
            self.bias,
            start=start,
            group=group,
            ignore_index=self.targets.ignore_index,
            chunk=self.chunk,
            label_smoothing=self.targets.label_smoothing,
        )
        loss = self.targets.mean(total)
        self.given = loss.detach()
        if not torch.is_grad_enabled():
            logits = F.linear(input, self.weight, self.bias)
            self.logits = logits if group is None else self.gathered(logits)
        return loss

    def gathered(self, logits: Tensor) -> Tensor:
        """Gather ``(..., own vocabulary)`` of each rank to ``(..., vocabulary)``."""
        state, total = sharding_of(self), shards_of(self)["weight"].full_shape[0]
        assert state is not None, "the head is split"
        group = state.group.group
        return all_gather(logits, group, -1, tensor_parallel_output_grad=False, total=total)

    def _own_rows(self) -> tuple[int, dist.ProcessGroup | None]:
        """Return the start of this rank's rows, and the group that has the others, if any."""
        gathering = [sync.op for sync in syncs_of(self) if sync.mode == "fwd_post" and sync.op]
        if gathering:
            raise ValueError(
                f"LossHead: the sync {gathering[0]!r} after it is for logits, and it gives a loss "
                "while it has targets; leave that sync out, or gather logits by a function"
            )
        spec, state = shards_of(self).get("weight"), sharding_of(self)
        # One rank may also be asked to run as if it were alone.
        if spec is None or state is None or group_size(state.group.group) == 1:
            return 0, None
        if spec.axis or len(spec.blocks) > 1 or spec.copies > 1:
            raise ValueError(
                f"LossHead: its weight of shape {tuple(spec.full_shape)} is sliced along axis "
                f"{spec.axis} in blocks of {list(spec.blocks)}, each part on {spec.copies} rank(s);"
                ' for the loss, shard it by rows: shard("weight", 0, uneven=True)'
            )
        return spec.start, state.group.group
