"""Progress and failures of the other ranks of a verification.

A failed rank is missing in the next collective, and the others would wait there until the group's
timeout. Ranks therefore publish their progress in the job's store. They meet there before every
collective of the verification, and before the schedule's collectives while the models run. A rank
inside one of the model's own collectives notices a failure when the failed process ends; its error
then contains the published message.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from slapo.agreement import FirstFailure, has_peers, is_broken_collective, on_every_rank
from slapo.errors import SlapoError, VerificationError
from slapo.sharding.steps import Step

#: Number of joint verifications of these ranks; the same on all of them.
_TIMES: Counter[tuple[int, ...]] = Counter()


class RankSync:
    """Meeting point of a group's ranks; does nothing without other ranks."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._store: dist.Store | None = None
        if not has_peers(group):
            return
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank()
        # Keys of an earlier verification stay in the store, so each gets a prefix of its own.
        _TIMES[self._ranks] += 1
        place = f"slapo/verify/{'-'.join(map(str, self._ranks))}/{_TIMES[self._ranks]}"
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(place, store)
        self._meetings = 0
        self._failure = FirstFailure(self._store, self._rank)
        self._patience = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch omits it

    def meet(self, step: str) -> None:
        """Wait until every rank has reached `step`."""
        if self._store is None:
            return
        self._meetings += 1
        keys = {rank: f"{self._meetings}/{rank}" for rank in self._ranks}
        self._store.set(keys[self._rank], step)
        deadline = time.monotonic() + self._patience
        pause = 1e-4
        every = list(keys.values())
        while not self._store.check(every):
            reported = self._reported_by_another()
            if self._store.check(every):  # a rank that failed after this meeting has reached it
                break
            if reported:
                raise on_every_rank(VerificationError(f"Verify failed on {reported}"))
            if time.monotonic() > deadline:
                late = [rank for rank, key in keys.items() if not self._store.check([key])]
                raise SlapoError(
                    f"Verify: no response from rank {', '.join(map(str, late))} within "
                    f"{self._patience:.0f} s; every rank of the group must verify the same schedule"
                )
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        steps = {rank: self._store.get(key).decode() for rank, key in keys.items()}
        other = next((rank for rank, theirs in steps.items() if theirs != step), None)
        if other is not None:
            raise SlapoError(
                f"rank {self._rank} is at {step} while rank {other} is at {steps[other]}; every "
                "rank must run the same collectives in the same order"
            )

    def carry_out(
        self,
        step: Step,
        function: Callable[..., Tensor],
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        **arguments: Any,
    ) -> Tensor:
        """Meet before a collective of the model, because a failed rank would be missing in it."""
        if step.communicates and self._store is not None:
            ranks = dist.get_process_group_ranks(group)
            # Ranks of another group do not all take part in this verification, and would never be
            # met.
            if tuple(ranks) == self._ranks:
                shape = list(tensor.shape)
                if arguments.get("total") is not None:  # parts differ in size between ranks
                    shape[arguments["axis"]] = arguments["total"]
                self.meet(f"{step.name} of {tuple(shape)}")
        return function(tensor, group, **arguments)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Report a failure to the other ranks, or explain it by an earlier failure of theirs."""
        try:
            yield
        except Exception as error:
            if self._store is not None:
                if is_broken_collective(error):
                    self._raise_for_lost_rank(error)
                self.report(error)
            raise

    def report(self, error: BaseException) -> None:
        """Report an error to the other ranks, unless one has failed before."""
        if self._store is not None:
            self._failure.report(f"rank {self._rank} with {type(error).__name__}: {error}")

    def _reported_by_another(self) -> str:
        reported = self._failure.reported()
        return "" if reported.startswith(f"rank {self._rank} ") else reported

    def _raise_for_lost_rank(self, noticed: Exception) -> None:
        """Raise an error that names the failed rank, after a collective broke here."""
        try:
            reported = self._reported_by_another()
        except RuntimeError as gone:
            raise VerificationError(
                "Verify: a rank has exited, most likely the one that hosts the job's store; its "
                f"output shows why: {noticed}"
            ) from gone
        if reported:
            left = [rank for rank in self._ranks if not reported.startswith(f"rank {rank} ")]
            # If this rank hosts the store, the others could not read the cause once it has exited.
            self._failure.wait_for_readers(left)
            raise VerificationError(f"Verify failed on {reported}") from noticed
