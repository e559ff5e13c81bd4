"""Language model head fused with its loss, so that the full logits never exist.

Techniques: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), section
3.2, for chunked gradients computed in the forward pass; Shoeybi et al., "Megatron-LM" (2019),
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

#: Tokens per chunk of logits: few, to fit CPU caches; many, to use all units of an accelerator.
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

    Computes ``cross_entropy(linear(hidden, weight, bias).float(), labels, reduction="sum")``, with
    the logits of one chunk at a time. The forward pass computes the gradients from the same logits;
    the backward pass scales them.

    Parameters
    ----------
    hidden
        ``(tokens, features)``, the same on all ranks of `group`.
    weight
        ``(own vocabulary, features)``: the rows of this rank, from `start` on.
    labels
        ``(tokens,)``, integers of the full vocabulary, the same on all ranks.
    bias
        ``(own vocabulary,)``.
    start
        Token of the first row of `weight`; ignored for a full weight.
    group
        Ranks that hold the other rows. None means a full weight: nothing is communicated, even if
        ``torch.distributed`` is initialized.
    ignore_index
        Label of ignored tokens.
    chunk
        Tokens per chunk, the same on all ranks; by default 256 on CPU and 1024 elsewhere.
    label_smoothing
        Share of the target that is spread over the full vocabulary, as in torch.

    Returns
    -------
    Tensor
        A float32 scalar, the same on all ranks. The gradient of `hidden` is this rank's summand and
        must be summed over the group (``sync("bwd_post", "all_reduce")``). The gradients of
        `weight` and `bias` are complete.

    Raises
    ------
    ValueError
        If the labels do not match the states.
    IndexError
        On CPU, for a label without exactly one row on all ranks. On other devices the loss is nan.

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
    check_shapes("linear_cross_entropy", hidden, labels)
    check_smoothing("linear_cross_entropy", label_smoothing)
    start = start if has_others(group) else 0
    # Read here: inside an autograd function, the grad mode is always off.
    is_training = torch.is_grad_enabled()
    settings = _Settings(start, group, ignore_index, chunk, is_training, label_smoothing)
    # Cast before apply(), so that autograd casts the gradients back.
    with _own_precision(hidden.device.type) as dtype:
        if dtype is not None:
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        total = LinearLoss.apply(hidden, weight, bias, labels, settings)
    return cast(Tensor, total)


@contextmanager
def _own_precision(device: str) -> Iterator[torch.dtype | None]:
    """Disable autocast, and yield the dtype to which it would cast the operands of products."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        yield None
        return
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        yield dtype


@dataclass(frozen=True)
class _Settings:
    """Non-tensor arguments of the autograd function."""

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
        # Accumulated in float32, so that many chunks lose no precision and half precision cannot
        # overflow.
        self.of_weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        self.of_bias = weight.new_zeros(len(weight), dtype=torch.float32) if needed[2] else None

    def add(self, tokens: slice, hidden: Tensor, logits: Tensor) -> None:
        """Add a chunk's share, from its hidden states and the gradient of its logits."""
        if self.of_bias is not None:
            self.of_bias += logits.sum(0)
        logits = logits.to(self.weight.dtype)
        if self.hidden is not None:
            # Written once per token: no chunk shares tokens with another.
            torch.mm(logits, self.weight, out=self.hidden[tokens])
        if self.of_weight is None:
            return
        # addmm_ adds in place without a second matrix, but takes operands of one dtype only.
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
            # A function call, so that the logits of one chunk are freed before those of the next.
            losses[tokens] = _losses_of(tokens, hidden, weight, bias, labels, settings, grads)
        ctx.save_for_backward(grads.hidden, grads.of_weight, grads.of_bias)
        ctx.dtypes = [hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph("linear_cross_entropy", INSTEAD)
        # The saved gradients are scaled in place if no later backward pass reads them.
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
    # float32: the softmax over a large vocabulary loses too much in half precision.
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
    """Labels of a :class:`LossHead`: ``(batch, seq)``, of the full vocabulary, equal on all ranks.

    With `shift` each position predicts the next one's label, as in a causal language model. The sum
    of the losses is divided by `num_items`, by default the number of labels that count.
    `label_smoothing` is as in torch's cross entropy.
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
        # Labels are shifted instead of cutting hidden states, which keeps the sequence length. The
        # last position has no label.
        return F.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:]

    def mean(self, total: Tensor) -> Tensor:
        """Divide the sum of the losses; as in torch, it is nan without labels, with gradient 0."""
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
    """Language model head that returns the loss instead of logits, if possible.

    ``head(x) -> logits --> head(x) -> loss`` while ``head.targets`` is set. The weight may be
    sharded along the vocabulary (``sch["head"].shard("weight", 0, uneven=True)``). The ranks then
    compute parts of the loss. The gradient of the input is a partial sum, to be summed by
    ``sync("bwd_post", "all_reduce")``. The forward itself uses the parameters, so engines that
    gather parameters around modules find them in use here.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As in ``nn.Linear``.

    Attributes
    ----------
    targets : Targets or None
        Labels of the next call; None for logits. The caller that sets it must reset it.
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

    #: A trace keeps it as a call, because the result depends on the call.
    traceable = False
    targets: Targets | None = None
    chunk: int | None = None
    #: Loss of the last call, which identifies it after other code may have changed it.
    given: Tensor | None = None
    #: Logits of the last call that returned a loss without gradients; metrics read them.
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
            With targets: if labels do not match the input, the weight is not sharded by rows, or a
            sync of logits follows.
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
        # Evaluation loops read logits for metrics; in training they would cost what the head saves.
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
        """Start of this rank's rows, and the group that holds the others, if any."""
        gathering = [sync.op for sync in syncs_of(self) if sync.mode == "fwd_post" and sync.op]
        if gathering:
            raise ValueError(
                f"LossHead: the sync {gathering[0]!r} after it needs logits, but it returns a "
                "loss while it has targets; remove that sync, or gather logits by a function"
            )
        spec, state = shards_of(self).get("weight"), sharding_of(self)
        # group_size is also 1 for a rank that runs as if alone.
        if spec is None or state is None or group_size(state.group.group) == 1:
            return 0, None
        if spec.axis or len(spec.blocks) > 1 or spec.copies > 1:
            raise ValueError(
                f"LossHead: its weight of shape {tuple(spec.full_shape)} is sharded along axis "
                f"{spec.axis} in blocks of {list(spec.blocks)}, each part on {spec.copies} "
                'rank(s); for the loss, shard it by rows: shard("weight", 0, uneven=True)'
            )
        return spec.start, state.group.group
