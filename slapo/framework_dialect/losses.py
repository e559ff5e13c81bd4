"""Losses that loss functions return in a step, and their mean over the job."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slapo.agreement import has_peers, on_every_rank
from slapo.errors import SlapoError
from slapo.framework_dialect.runtime import Lowering
from slapo.wrapper import innermost

# Allowed relative difference between the losses of tensor-parallel ranks. Nondeterministic kernels
# differ by less; a missing collective or another dropout mask differs by more.
_SPREAD = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}


class LossAccumulator:
    """Losses of one step on this rank.

    A loss function returns a mean, which `add` weights: by default equally for all `parts` of a
    step. Or it returns ``(sum, count)``, for example of non-padding tokens, and the mean is over
    all of these, on any rank.
    """

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts
        self._losses: list[Tensor] = []
        self.count: Tensor | float = 0.0
        #: true if the loss function returns counts; None before its first call
        self.returns_counts: bool | None = None

    def add(self, returned: Any, weight: Tensor | float | None = None) -> Tensor:
        """Add a loss function's result for a micro-batch; returns the root for backward."""
        counts = isinstance(returned, (tuple, list)) and len(returned) == 2
        if self.returns_counts not in (None, counts):
            raise ValueError(
                "loss_fn returned a number for one micro-batch and (sum, count) for another in "
                "the batch; return the same for all"
            )
        self.returns_counts = counts
        if counts:
            loss, count = _one_number(returned[0]), returned[1]
            self.count = self.count + _as_count(count, loss.device)
        else:
            loss = _one_number(returned)
            share = 1 / self.parts if weight is None else weight
            if isinstance(share, Tensor):
                # The mean over no targets is NaN.
                loss = torch.where(share > 0, loss, 0)
            loss = loss * share
            self.count += share
        self._losses.append(loss.detach())
        return loss

    @property
    def total(self) -> Tensor:
        """Sum of the added losses."""
        if not self._losses:
            raise SlapoError(
                "a rank of the last pipeline stage has no loss; its loss_fn was not run"
            )
        return torch.stack(self._losses).sum()


def shifts_labels(lowering: Lowering) -> bool:
    """Return whether the model's own loss compares each token with the next label."""
    pipelined = lowering.pipelined
    model: Any = lowering.model if pipelined is None else pipelined.whole
    own = getattr(model and innermost(model), "loss_function", None)
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(own, "__name__", "") == "ForCausalLMLoss" and not both


class LossReducer:
    """Mean of the losses of a step over the job, on every rank.

    `last` is the coordinate along pp of the ranks that run the last stage, `dtype` the one that the
    model computes in.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        last: int = -1,
        dtype: torch.dtype | None = None,
    ) -> None:
        pp, self.dp, self.tp = mesh.shape
        self._is_last = mesh.get_local_rank("pp") == last % pp
        self._place = mesh.get_local_rank("tp")
        self._device, self._has_peers = device, has_peers()
        self._spread = _SPREAD.get(dtype or torch.float32, 1e-3)
        # Apple's accelerator has no float64.
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        #: true if the loss function returns counts; None before the first reduction
        self.returns_counts: bool | None = None
        self._work: Any = None
        self._read: tuple[Tensor, Tensor | None] | None = None

    def begin(self, tally: LossAccumulator, check: bool) -> LossReducer:
        """Start the single collective of the world that a step needs for its loss.

        With `check`, the losses of tensor-parallel ranks are compared: they must be equal.
        """
        # One row per tensor-parallel rank, so that none hides another: sum, count, flag.
        found = torch.zeros(self.tp, 3, dtype=self._wide, device=self._device)
        if self._is_last:
            total = tally.total
            if self.returns_counts not in (None, tally.returns_counts):
                raise ValueError(
                    "loss_fn returned a number for one batch and (sum, count) for another; "
                    "return the same kind for all: ranks without a loss rely on the first one"
                )
            own = found[self._place]
            own[0], own[1], own[2] = total, tally.count, float(bool(tally.returns_counts))
        # Over the world: ranks of other stages add zeros, and replicas add up to the sums of the
        # mean.
        self._work = dist.all_reduce(found, async_op=True) if self._has_peers else None
        self._found, self._check, self._read = found, check and self.tp > 1, None
        return self

    def scale(self) -> Tensor | None:
        """Factor for gradients before the optimizer's step, if these belong to sums.

        None if they belong to means. Once that is established, it does not wait, so the optimizer's
        step hides the reduction.
        """
        return None if self.returns_counts is False and not self._check else self._wait()[1]

    def loss(self) -> Tensor:
        """The 0-dim float32 loss, the same on every rank."""
        return self._wait()[0]

    def _wait(self) -> tuple[Tensor, Tensor | None]:
        if self._read is None:
            if self._work is not None:
                self._work.wait()
            sums, counts, marks = self._found.unbind(1)
            # Where the count is 0, so is the sum.
            counts = torch.where(counts == 0, 1, counts)
            means = sums / counts
            # Reads from the device once; later steps do not synchronize for it.
            if self.returns_counts is None:
                self.returns_counts = bool(marks[0].item())
            if self._check:
                self._compare(means.tolist())
            # The gradients of sums were averaged over dp replicas; the factor makes them those of
            # the mean over all counts.
            self._read = means[0].float(), self.dp / counts[0] if self.returns_counts else None
        return self._read

    def _compare(self, means: list[float]) -> None:
        finite = [mean for mean in means if math.isfinite(mean)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        # Losses of an overflow agree if no rank has a finite one; NaN fails every comparison.
        is_mixed = 0 < len(finite) < len(means)
        if is_mixed or high - low > self._spread * max(abs(low), abs(high)):
            shown = ", ".join(f"{mean:.6g}" for mean in means)
            raise on_every_rank(
                SlapoError(
                    "tensor-parallel ranks computed different losses for the same batch: "
                    f"{shown}; the schedule lacks a collective after a shard, or random numbers "
                    "differ outside of fork_rng(). Find the module with slapo.Verify"
                )
            )


def _one_number(loss: Any) -> Tensor:
    if loss is None:
        raise ValueError(
            "loss_fn returned None; add 'labels' to the batch of a Transformers model, or a "
            "return to the function"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn returned {shown}; it must return one number, the mean over a micro-batch, "
            "or the (sum, count) of that mean"
        )
    # Each operation adds a node to the backward pass, so reshape only if needed.
    loss = loss.reshape(()) if loss.dim() else loss
    return loss.float()


def _as_count(count: Any, device: torch.device) -> Tensor:
    if isinstance(count, Tensor) and count.numel() == 1:
        return count.detach().reshape(()).to(device, torch.float32)
    if isinstance(count, (int, float)) and not isinstance(count, bool) and count >= 0:
        return torch.tensor(float(count), device=device)
    shown = f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else repr(count)
    raise ValueError(
        f"loss_fn returned the count {shown} in (sum, count); it must be one number, 0 or more"
    )
