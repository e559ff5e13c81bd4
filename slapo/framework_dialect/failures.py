"""Reports the rank that failed first on every rank whose collective breaks.

A failed rank leaves others in collectives. These break when its process ends, or time out if it
hangs, and their own error mentions only a socket. So a failing rank records the failure in the
job's store before it leaves its step, and a rank whose collective breaks reads it there. A rank
that was killed or hangs records nothing: it is the one that does not look there either.

Nothing runs beside the training: no thread, no signal handler, no exit. The launcher watches and
ends the processes; torchrun does so at once.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from multiprocessing import util

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slapo.agreement import (
    REPORT_SECONDS,
    FirstFailure,
    has_peers,
    is_broken_collective,
    is_on_every_rank,
    on_every_rank,
)
from slapo.errors import SlapoError
from slapo.mesh import describe_rank

# A store that does not answer within this time is gone. No call here waits for a key.
_STORE_TIMEOUT = timedelta(seconds=20)


class Failures:
    """Records a local failure for other ranks, and explains a broken collective by theirs."""

    def __init__(self, mesh: DeviceMesh, store: dist.Store, number: int) -> None:
        # Not the mesh: it would keep all groups of the job and their threads alive until exit.
        self._places = mesh.mesh
        self._rank = dist.get_rank()
        client: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch omits it
        client.set_timeout(_STORE_TIMEOUT)
        self._store = dist.PrefixStore(f"slapo/failures/{number}", client)
        self._failure = FirstFailure(self._store, self._rank)
        self._has_reported = False
        # Runs at the end of ordinary processes and of those started by multiprocessing.
        util.Finalize(None, self._report_uncaught, exitpriority=0)

    @contextmanager
    def named(self, call: str) -> Iterator[None]:
        """Record a failure of this call, or explain it by the rank that failed first."""
        try:
            yield
        except Exception as error:
            if is_on_every_rank(error):
                raise
            if is_broken_collective(error):
                first_line = str(error).strip().partition("\n")[0]
                text = f"{self._cause(call)}; this rank stops with "
                # Every other rank detects the failure by itself.
                raise on_every_rank(
                    SlapoError(f"{text}{type(error).__name__}: {first_line}")
                ) from error
            self._report(error)
            raise
        if self._has_reported:  # the error was caught on all ranks: training continues
            self._has_reported = False
            self._failure.forget()

    def _report(self, error: BaseException) -> None:
        self._has_reported = True
        what = f"failed with {type(error).__name__}: {str(error)[:500]}"
        self._failure.report(f"{describe_rank(self._places, self._rank)} {what}")

    def _report_uncaught(self) -> None:
        # At exit: an error between two steps was not recorded yet. `sys.exc_info` has it in
        # processes of multiprocessing, `sys.last_value` in ordinary ones.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if error is not None and not isinstance(error, SystemExit) and has_peers():
            self._report(error)

    def _cause(self, call: str) -> str:
        ranks = range(dist.get_world_size())
        deadline = time.monotonic() + REPORT_SECONDS
        try:
            self._store.set(f"waiting/{self._rank}", call)
            # A rank marks itself as waiting, and looks for a report. Once all wait, or the time is
            # over, the first to notice reports the ranks that do not wait.
            while not (first := self._failure.reported()):
                silent = [r for r in ranks if not self._store.check([f"waiting/{r}"])]
                if not silent or time.monotonic() > deadline:
                    self._failure.report(self._describe_silent(silent))
                time.sleep(0.1)
            self._failure.wait_for_readers(ranks)
            return first
        except RuntimeError:  # the store ends with the process that keeps it
            keeper = describe_rank(self._places, 0)
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                keeper = "the launcher"
            return f"{keeper}, which hosts the job's store, is gone"

    def _describe_silent(self, ranks: list[int]) -> str:
        if not ranks:
            return self._describe_waiting()
        names = ", ".join(describe_rank(self._places, rank) for rank in ranks[:4])
        more = " and others" if ranks[4:] else ""
        return f"no response from {names}{more}, which may be hanging, killed or on a lost machine"

    def _describe_waiting(self) -> str:
        calls: dict[str, list[int]] = {}
        for rank in range(dist.get_world_size()):
            calls.setdefault(self._store.get(f"waiting/{rank}").decode(), []).append(rank)
        said = [f"{len(ranks)} in {call}, such as rank {ranks[0]}" for call, ranks in calls.items()]
        if len(said) > 1:
            said.append("call each on every rank, in the same order")
        return f"all ranks wait for each other: {'; '.join(said)}"


_current: Failures | None = None
_number = 0
# Store of the job that `_current` belongs to; not kept alive.
_job: weakref.ref[dist.Store] | None = None


@contextmanager
def naming(call: str) -> Iterator[None]:
    """Context of a collective function that is not an engine's, once the job has an engine."""
    with _current.named(call) if _current is not None and _is_current() else nullcontext():
        yield


def naming_failures(mesh: DeviceMesh) -> Callable[[str], AbstractContextManager[None]]:
    """Return the context of a call, see `Failures.named`; all ranks call this in one order."""
    global _current, _number, _job
    if not has_peers():
        return lambda call: nullcontext()
    if _current is None or not _is_current():
        _number += 1
        store = dist.distributed_c10d._get_default_store()
        _current, _job = Failures(mesh, store, _number), weakref.ref(store)
    return _current.named


def _is_current() -> bool:
    store = dist.distributed_c10d._get_default_store() if has_peers() else None
    return store is not None and _job is not None and _job() is store
