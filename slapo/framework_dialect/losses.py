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


class LossTally:
    """The losses of one step on this rank.

    A loss function returns a mean, and micro-batches weigh the same; or ``(sum, count)``, as of
    tokens that are no padding, and the mean is that over all of them, wherever they are.

    Parameters
    ----------
    parts
        Number of micro-batches of the step; in an evaluation 1, where `add` is told what each
        weighs.

    Examples
    --------
    >>> tally = LossTally(2)
    >>> tally.add(torch.tensor(1.0)), tally.add(torch.tensor(2.0))
    (tensor(0.5000), tensor(1.))
    >>> float(tally.total), float(tally.count)
    (1.5, 1.0)
    """

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts
        self.total: Tensor | None = None
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
            loss = loss / self.parts if weight is None else loss * weight
            self.count += 1 / self.parts if weight is None else weight
        self.total = loss.detach() if self.total is None else self.total + loss.detach()
        return loss


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
    return loss.reshape(()).float()


class LossMean:
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
        self._spread = _SPREAD[dtype or torch.float32]
        # Apple's accelerator has no float64.
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        #: whether the loss function counts; None before this rank knows
        self.counts: bool | None = None

    def reduce(self, tally: LossTally, check: bool) -> tuple[Tensor, Tensor | None]:
        """Tell every rank. A collective of the world: the only one that a step needs for it.

        Parameters
        ----------
        tally
            With losses on the ranks of the last stage.
        check
            Whether to compare the losses of tensor-parallel ranks, which must be the same.

        Returns
        -------
        loss
            Without dimensions, float32, the same on every rank.
        scale
            What gradients are to be multiplied by, where they are those of sums, averaged over
            replicas; None where they are those of means.

        Raises
        ------
        SlapoError
            If a rank of the last stage has no loss, or tensor-parallel ranks have other losses. On
            every rank.
        """
        # A sum, a count and a mark for each tensor-parallel rank: none hides another's.
        rows: list[list[Any]] = [[0.0, 0.0, 0.0] for _ in range(self._tp)]
        counts_here = isinstance(tally.count, Tensor)
        if self._is_last:
            rows[self._place] = [0.0, 0.0 if counts_here else tally.count, float(counts_here)]
        found = torch.tensor(rows, dtype=self._wide, device=self._device)
        if self._is_last:
            if tally.total is None:
                raise SlapoError(
                    "a rank of the last pipeline stage has no loss; its loss_fn was not run"
                )
            if self.counts not in (None, counts_here):
                raise ValueError(
                    "loss_fn returned one number for a batch and (sum, count) for another; return "
                    "the same for all: ranks without a loss go by what the first one was"
                )
            found[self._place, 0] = tally.total
            if counts_here:
                found[self._place, 1] = tally.count
        if self._has_peers:
            dist.all_reduce(found)
        # Without anything counted, the loss and all gradients are 0.
        counts = torch.where(found[:, 1] == 0, 1, found[:, 1])
        means = found[:, 0] / counts
        if self.counts is None:
            self.counts = bool(found[0, 2].item())
        if check and self._tp > 1:
            self._compare(means.tolist())
        return means[0].float(), self._dp / counts[0] if self.counts else None

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
    return torch.tensor(float(count), device=device)
