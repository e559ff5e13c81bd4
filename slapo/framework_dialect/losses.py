"""The losses that loss functions return in a step, and their mean over the job."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slapo.agreement import has_peers, on_every_rank
from slapo.errors import SlapoError
from slapo.framework_dialect.runtime import Lowering
from slapo.wrapper import innermost

# Of two tensor-parallel ranks' losses, relative to the larger: kernels that add up in no fixed
# order are off by less, and a forgotten collective or another dropout mask by more.
_SPREAD = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}


class LossAccumulator:
    """The losses of one step on this rank.

    A loss function returns a mean, and `add` is given the weight of the micro-batch, by default the
    same for all `parts` of a step; or it returns ``(sum, count)``, as of tokens that are no
    padding, and the mean is that over all of them, wherever they are.
    """

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts
        self._losses: list[Tensor] = []
        self.count: Tensor | float = 0.0
        #: true if the loss function counts; None before it was called
        self.counts: bool | None = None

    def add(self, returned: Any, weight: Tensor | float | None = None) -> Tensor:
        """Note what a loss function returned for a micro-batch; returns the root for backward."""
        counts = isinstance(returned, (tuple, list)) and len(returned) == 2
        if self.counts not in (None, counts):
            raise ValueError(
                "loss_fn returned one number for a micro-batch and (sum, count) for another of the "
                "same batch; return the same for all"
            )
        self.counts = counts
        if counts:
            loss, count = _one_number(returned[0]), returned[1]
            self.count = self.count + _as_count(count, loss.device)
        else:
            loss = _one_number(returned)
            share = 1 / self.parts if weight is None else weight
            if isinstance(share, Tensor):
                # The mean over no targets is not a number.
                loss = torch.where(share > 0, loss, 0)
            loss = loss * share
            self.count += share
        self._losses.append(loss.detach())
        return loss

    @property
    def total(self) -> Tensor:
        """Sum of what was added."""
        if not self._losses:
            raise SlapoError(
                "a rank of the last pipeline stage has no loss; its loss_fn was not run"
            )
        return torch.stack(self._losses).sum()


def shifts_labels(lowering: Lowering) -> bool:
    """Return whether the model's own loss compares each token with the label behind it."""
    pipelined = lowering.pipelined
    model: Any = lowering.model if pipelined is None else pipelined.whole
    own = getattr(model and innermost(model), "loss_function", None)
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(own, "__name__", "") == "ForCausalLMLoss" and not both


class LossReducer:
    """The mean of the losses of a step over the job, for every rank.

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
        #: true if the loss function counts; None before this rank knows
        self.counts: bool | None = None

    def begin(self, tally: LossAccumulator, check: bool) -> PendingLoss:
        """Begin the one collective of the world that a step needs for its loss.

        With `check`, the losses of tensor-parallel ranks, which must be the same, are compared.
        """
        # A row for each tensor-parallel rank, so that none hides another's: sum, count, mark.
        found = torch.zeros(self.tp, 3, dtype=self._wide, device=self._device)
        if self._is_last:
            total = tally.total
            if self.counts not in (None, tally.counts):
                raise ValueError(
                    "loss_fn returned one number for a batch and (sum, count) for another; return "
                    "the same for all: ranks without a loss go by what the first one was"
                )
            own = found[self._place]
            own[0], own[1], own[2] = total, tally.count, float(bool(tally.counts))
        work = dist.all_reduce(found, async_op=True) if self._has_peers else None
        return PendingLoss(self, found, work, check and self.tp > 1)

    def compare(self, means: list[float]) -> None:
        """Refuse tensor-parallel ranks that computed different losses."""
        low, high = min(means), max(means)
        if high - low > self._spread * max(abs(low), abs(high)):
            shown = ", ".join(f"{mean:.6g}" for mean in means)
            raise on_every_rank(
                SlapoError(
                    f"tensor-parallel ranks computed different losses of the same batch: {shown}; "
                    "the schedule shards something without the collective that makes it whole "
                    "again, or their random numbers differ outside of fork_rng(). slapo.Verify "
                    "finds the module"
                )
            )


class PendingLoss:
    """The mean of a step's losses while it is on its way; see :meth:`LossReducer.begin`."""

    def __init__(self, reducer: LossReducer, found: Tensor, work: Any, check: bool) -> None:
        self._reducer, self._found, self._work, self._check = reducer, found, work, check
        self._read: tuple[Tensor, Tensor | None] | None = None

    def scale(self) -> Tensor | None:
        """The factor of gradients, before the optimizer's step: one where they are those of sums.

        None where they are those of means. This is not waited for once it is known, so that the
        optimizer's step hides the way.
        """
        return None if self._reducer.counts is False and not self._check else self._wait()[1]

    def loss(self) -> Tensor:
        """Without dimensions, float32, the same on every rank."""
        return self._wait()[0]

    def _wait(self) -> tuple[Tensor, Tensor | None]:
        if self._read is None:
            if self._work is not None:
                self._work.wait()
            sums, counts, marks = self._found.unbind(1)
            # Where nothing counts, sums are 0 and stay that.
            counts = torch.where(counts == 0, 1, counts)
            means = sums / counts
            if self._reducer.counts is None:
                self._reducer.counts = bool(marks[0].item())
            if self._check:
                self._reducer.compare(means.tolist())
            scale = self._reducer.dp / counts[0] if self._reducer.counts else None
            self._read = means[0].float(), scale
        return self._read


def _one_number(loss: Any) -> Tensor:
    if loss is None:
        raise ValueError(
            "loss_fn returned None; a model of Transformers has no loss where the batch has no "
            "'labels', and a function needs a return"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn returned {shown}; it must return one number, the mean over a micro-batch, or "
            "(sum, count) of what the mean is over"
        )
    # Each of these is a node of its own in the backward pass.
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
