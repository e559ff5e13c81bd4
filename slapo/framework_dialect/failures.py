"""Which rank failed first, for every rank that meets a broken collective.

A rank that fails leaves others in collectives. These break when its process ends, or time out when
it hangs, and the error that they raise then shows a socket. The rank that fails therefore writes
what happened in the job's store before it leaves its step, and whoever meets a broken collective
looks there. A process that was killed has written nothing; those on its machine see it is gone.
The store goes with the process that keeps it, rank 0 without a launcher's: who waits for that one
alone, and so notices last, can name no other.

Nothing runs beside the training: no thread, no signal, no exit. Processes are ended by what has
started them, torchrun at once.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import util
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slapo.agreement import (
    FirstFailure,
    has_peers,
    is_broken_collective,
    is_on_every_rank,
    on_every_rank,
)
from slapo.errors import SlapoError
from slapo.mesh import describe_rank

# Seconds to wait for the word of others: ranks of other machines may see first who is gone.
_PATIENCE = 3.0

# A store that has not answered by then is gone. Nothing here waits for a key.
_STORE_PATIENCE = timedelta(seconds=20)


class Failures:
    """Tells the others of a failure here, and explains a broken collective by one elsewhere.

    Parameters
    ----------
    mesh
        Gives ranks the names that messages use.
    store
        The job's.
    number
        Of this object, where a job makes several one after the other; alike on all ranks.
    """

    def __init__(self, mesh: DeviceMesh, store: dist.Store, number: int) -> None:
        # Not the mesh: it would keep all of the job's groups, and their threads, to the very end.
        self._places = mesh.mesh
        self._rank = dist.get_rank()
        client: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch omits it
        client.set_timeout(_STORE_PATIENCE)
        self._store = dist.PrefixStore(f"slapo/failures/{number}", client)
        self._failure = FirstFailure(self._store, self._rank)
        self._store.set(f"process/{self._rank}", json.dumps(_this_process()))
        self._has_told = False
        # Runs at the end of ordinary processes and of those that multiprocessing starts.
        util.Finalize(None, self._tell_uncaught, exitpriority=0)

    @contextmanager
    def named(self) -> Iterator[None]:
        """A step of training inside: what fails in it is told, or explained by who failed before.

        Raises
        ------
        SlapoError
            In place of the error of a broken collective; it names the rank that failed first.
        """
        try:
            yield
        except Exception as error:
            if is_on_every_rank(error):
                raise
            if is_broken_collective(error):
                # Each of the others gets to know by itself.
                raise on_every_rank(SlapoError(self._explain(error))) from error
            self._tell(f"failed with {type(error).__name__}: {str(error)[:500]}")
            raise
        if self._has_told:  # and was caught, on all ranks alike: training goes on
            self._has_told = False
            self._failure.forget()

    def _tell(self, what: str) -> None:
        self._has_told = True
        self._tell_of(self._rank, what)

    def _tell_of(self, rank: int, what: str) -> str:
        text = f"{describe_rank(self._places, rank)} {what}"
        self._failure.tell(text)
        return text

    def _tell_uncaught(self) -> None:
        """At the end of this process: an error between two steps has not been told yet."""
        # The first inside a process of multiprocessing, the second in an ordinary one.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if error is not None and not isinstance(error, SystemExit) and has_peers():
            self._tell(f"failed with {type(error).__name__}: {str(error)[:500]}")

    def _explain(self, error: Exception) -> str:
        first_line = str(error).strip().partition("\n")[0]
        return (
            f"{self._cause()}; this rank cannot go on, and noticed by: {type(error).__name__}: "
            f"{first_line}"
        )

    def _cause(self) -> str:
        deadline = time.monotonic() + _PATIENCE
        # The store may go while we look, with a rank that has lost its patience before us.
        seen = f"{self._keeper()}, which keeps the store of the job, is gone"
        with suppress(RuntimeError):
            self._store.set(f"waiting/{self._rank}", "")
            while time.monotonic() < deadline:
                told = self._failure.told()
                gone = [rank for rank in self._processes() if not self._is_running(rank)]
                if gone and not told:
                    told = self._tell_of(gone[0], "died without a word: its process is gone")
                if told:
                    self._failure.wait_for_readers(self._still_running)
                    return told
                seen = self._say_who_is_silent()
                time.sleep(0.1)
        return seen

    def _say_who_is_silent(self) -> str:
        silent = [
            describe_rank(self._places, rank)
            for rank in range(dist.get_world_size())
            if rank != self._rank and not self._store.check([f"waiting/{rank}"])
        ]
        if not silent:
            return "every rank waits for another, and none has said why"
        shown = f"{', '.join(silent[:4])}{' and others' if silent[4:] else ''}"
        return f"nothing was heard of {shown}, which may hang, or be lost with a machine"

    def _processes(self) -> list[int]:
        return [r for r in range(dist.get_world_size()) if self._store.check([f"process/{r}"])]

    def _still_running(self) -> list[int]:
        return [rank for rank in self._processes() if self._is_running(rank)]

    def _is_running(self, rank: int) -> bool:
        """Whether a process is there, as far as this machine can tell."""
        host, pid, started = json.loads(self._store.get(f"process/{rank}"))
        return host != _host() or _start_time(pid) == started

    def _keeper(self) -> str:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "the launcher"
        return describe_rank(self._places, 0)


class NoFailures(Failures):
    """Of a process alone, which has nobody to tell."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def named(self) -> Iterator[None]:
        """Nothing happens."""
        yield


_current: Failures | None = None
_number = 0
# The job that `_current` is for, by its store; not kept alive by us.
_job: weakref.ref[dist.Store] | None = None


def failures_of(mesh: DeviceMesh) -> Failures:
    """What the engines of this process share. All ranks call it, in one order with other calls.

    Examples
    --------
    >>> from slapo.mesh import init_mesh
    >>> with failures_of(init_mesh(device="cpu")).named():
    ...     loss = 0.5
    """
    global _current, _number, _job
    if not has_peers():
        return NoFailures()
    store = dist.distributed_c10d._get_default_store()
    if _current is None or _job is None or _job() is not store:
        _number += 1
        _current, _job = Failures(mesh, store, _number), weakref.ref(store)
    return _current


# --- processes of this machine -------------------------------------------------------------------
def _this_process() -> tuple[str, int, str | None]:
    """Where it is, its number, and when it started, since numbers are used again."""
    return _host(), os.getpid(), _start_time(os.getpid())


def _host() -> str:
    """The same for processes that see each other: one machine, and one space of process ids."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    # Where the system does not tell, each process counts as a machine.
    return "/".join(parts) if len(parts) == 3 else f"{parts[0]}/{os.getpid()}"


def _start_time(pid: int) -> str | None:
    """When a process started; None if it is gone, also when its parent has not yet noticed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; state and start time are fields 3 and 22.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]
