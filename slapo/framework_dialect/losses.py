"""What loss functions returned in a step, and the mean of it over the job."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slapo.agreement import has_peers, on_every_rank
from slapo.errors import SlapoError

# Of two tensor-parallel ranks' losses, in parts of the larger: kernels that add up in no fixed
# order are off by less, and a forgotten collective or another dropout mask by more.
_SPREAD = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}


class LossAccumulator:
    """The losses of one step on this rank.

    A loss function returns a mean, and micro-batches weigh the same; or ``(sum, count)``, as of
    tokens that are no padding, and the mean is that over all of them, wherever they are.

    Parameters
    ----------
    parts
        Number of micro-batches of the step, which weigh the same; None in an evaluation, where
        `add` is told what each weighs.

    Examples
    --------
    >>> tally = LossAccumulator(2)
    >>> tally.add(torch.tensor(1.0)), tally.add(torch.tensor(2.0))
    (tensor(0.5000), tensor(1.))
    >>> float(tally.total), float(tally.count)
    (1.5, 1.0)
    """

    def __init__(self, parts: int | None = None) -> None:
        self.parts = parts
        self._losses: list[Tensor] = []
        self.count: Tensor | float = 0.0
        #: whether the loss function counts; None before it was called
        self.counts: bool | None = None

    def add(self, returned: Any, weight: float | None = None) -> Tensor:
        """Note what a loss function returned for a micro-batch.

        Parameters
        ----------
        returned
            A tensor of one element, or ``(sum, count)``.
        weight
            What a mean weighs in this step; None for one of equal parts.

        Returns
        -------
        Tensor
            What to go backward from, without dimensions, in float32.

        Raises
        ------
        ValueError
            If a loss function returned anything else, or does not always return the same.
        """
        counts = isinstance(returned, (tuple, list)) and len(returned) == 2
        if self.counts not in (None, counts):
            raise ValueError(
                "loss_fn returned one number for a micro-batch and (sum, count) for another of the "
                "same batch; return the same for all"
            )
        self.counts = counts
        if counts:
            loss, count = one_number(returned[0]), returned[1]
            self.count = self.count + _as_count(count, loss.device)
        else:
            loss = one_number(returned)
            share = 1 / (self.parts or 1) if weight is None else weight
            loss = loss * share
            self.count += share
        self._losses.append(loss.detach())
        return loss

    @property
    def total(self) -> Tensor:
        """Sum of what was added.

        Raises
        ------
        SlapoError
            If nothing was.
        """
        if not self._losses:
            raise SlapoError(
                "a rank of the last pipeline stage has no loss; its loss_fn was not run"
            )
        return torch.stack(self._losses).sum()


def one_number(loss: Any) -> Tensor:
    """A loss without dimensions, in float32.

    Raises
    ------
    ValueError
        If a loss function has returned anything but a tensor of one element.

    Examples
    --------
    >>> one_number(torch.ones(1, dtype=torch.bfloat16))
    tensor(1.)
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn returned {shown}; it must return one number, the mean over a micro-batch, or "
            "(sum, count) of what the mean is over"
        )
    # Each of these is a node of its own in the backward pass.
    loss = loss.reshape(()) if loss.dim() else loss
    return loss.float()


class LossReducer:
    """The mean of the losses of a step over the job, told to every rank.

    Parameters
    ----------
    mesh
        Of the dimensions pp, dp and tp.
    device
        Where losses are.
    last
        Coordinate along pp of the ranks that run the last stage.
    dtype
        What the model computes in.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        last: int = -1,
        dtype: torch.dtype | None = None,
    ) -> None:
        pp, self._dp, self._tp = mesh.shape
        self._is_last = mesh.get_local_rank("pp") == last % pp
        self._place = mesh.get_local_rank("tp")
        self._has_peers = has_peers()
        self._device = device
        self._spread = _SPREAD.get(dtype or torch.float32, 1e-3)
        # Apple's accelerator has no float64.
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        #: whether the loss function counts; None before this rank knows
        self.counts: bool | None = None

    def begin(self, tally: LossAccumulator, check: bool) -> PendingLoss:
        """Begin to tell every rank. A collective of the world: the only one a step needs for it.

        Parameters
        ----------
        tally
            With losses on the ranks of the last stage.
        check
            Whether to compare the losses of tensor-parallel ranks, which must be the same.

        Raises
        ------
        SlapoError, ValueError
            If this rank of the last stage has no loss, or one of another kind than before.
        """
        found = self._told_of_parts(tally) if self._is_short(tally) else self._told(tally)
        work = dist.all_reduce(found, async_op=True) if self._has_peers else None
        return PendingLoss(self, found, work, check and self._tp > 1)

    def _is_short(self, tally: LossAccumulator) -> bool:
        """Whether all know what a sum is to be divided by: the number of replicas."""
        return self.counts is False and tally.parts is not None

    def _told_of_parts(self, tally: LossAccumulator) -> Tensor:
        """What this rank adds: its sum, in the place of its tensor-parallel rank."""
        if self._tp == 1:
            return self._total(tally) if self._is_last else torch.zeros((), device=self._device)
        found = torch.zeros(self._tp, device=self._device)
        if self._is_last:
            found[self._place] = self._total(tally)
        return found

    def _told(self, tally: LossAccumulator) -> Tensor:
        """A row for each tensor-parallel rank, so that none hides another's: sum, count, mark."""
        found = torch.zeros(self._tp, 3, dtype=self._wide, device=self._device)
        if self._is_last:
            own = found[self._place]
            own[0] = self._total(tally)
            own[1], own[2] = tally.count, float(bool(tally.counts))
        return found

    def _total(self, tally: LossAccumulator) -> Tensor:
        total = tally.total
        if self.counts not in (None, tally.counts):
            raise ValueError(
                "loss_fn returned one number for a batch and (sum, count) for another; return "
                "the same for all: ranks without a loss go by what the first one was"
            )
        return total

    def read(self, found: Tensor, check: bool) -> tuple[Tensor, Tensor | None]:
        """What `begin` comes to, when all ranks have told theirs."""
        scale = None
        if found.dim() < 2:
            means = found if self._dp == 1 else found / self._dp
        else:
            # Where nothing counts, sums are 0 and stay that.
            counts = torch.where(found[:, 1] == 0, 1, found[:, 1])
            means, scale = found[:, 0] / counts, self._dp / counts[0]
            if self.counts is None:
                self.counts = bool(found[0, 2].item())
            scale = scale if self.counts else None
        if check:
            self._compare(means.tolist())
        return (means[0] if means.dim() else means).float(), scale

    def _compare(self, means: list[float]) -> None:
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

    def __init__(self, mean: LossReducer, found: Tensor, work: Any, check: bool) -> None:
        self._mean, self._found, self._work, self._check = mean, found, work, check
        self._read: tuple[Tensor, Tensor | None] | None = None

    def scale(self) -> Tensor | None:
        """What gradients are to be multiplied by, to be asked for before the optimizer's step.

        Where they are those of sums, averaged over replicas; None where they are those of means,
        which is not waited for: the optimizer's step hides the way.

        Raises
        ------
        SlapoError
            On every rank, if tensor-parallel ranks were to be compared and have other losses.
        """
        if self._found.dim() < 2 and not self._check:
            return None
        return self._wait()[1]

    def loss(self) -> Tensor:
        """Without dimensions, float32, the same on every rank."""
        return self._wait()[0]

    def _wait(self) -> tuple[Tensor, Tensor | None]:
        if self._read is None:
            if self._work is not None:
                self._work.wait()
            self._read = self._mean.read(self._found, self._check)
        return self._read


def _as_count(count: Any, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(
                f"loss_fn returned a count of shape {tuple(count.shape)} in (sum, count); it must "
                "be one number"
            )
        return count.detach().reshape(()).to(device, torch.float32)
    if isinstance(count, bool) or not isinstance(count, (int, float)):
        raise ValueError(
            f"loss_fn returned a count of type {type(count).__name__} in (sum, count); it must be "
            "a number"
        )
    if not count >= 0:
        raise ValueError(f"loss_fn returned a count of {count} in (sum, count); it is 0 or more")
    return torch.tensor(float(count), device=device)
