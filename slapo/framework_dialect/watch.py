"""A rank that dies or fails ends the job, with a message that names it.

Collectives wait for all of their ranks: without this, one process that is gone leaves the others
in silence until a timeout of many minutes, or for good. A thread in each process looks after the
others:

- On its own host it asks the system for the processes of the job. A process that is merely busy or
  stopped is still there.
- Other hosts count signs of life in the job's store; one in which no process has given any for
  ``seconds`` is dead. Each host is looked after by the two before it, so the traffic does not grow
  with the square of the job.
- A rank that leaves a step by an exception, or its program by an uncaught one, says so in the
  store; one that ends as it should says that too.

When a rank is gone, the main thread gets a moment to raise the error itself, from a collective that
broke or at its next step. A thread that sits in a collective cannot be woken: then the process
prints the message and ends.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import SlapoError
from slapo.framework_dialect.agreement import (
    has_peers,
    is_on_every_rank,
    on_every_rank,
    same_on_all_ranks,
)
from slapo.framework_dialect.peers import (
    Bulletin,
    Event,
    Lookout,
    Peer,
    Silence,
    keeper_of,
    shown,
    this_process,
    uncaught_error,
)
from slapo.framework_dialect.steps import Steps
from slapo.mesh import describe_rank

# Seconds between two looks, and those that the main thread gets to raise the error itself.
_TICK, _GRACE = 1.0, 3.0

# Seconds until the process ends all the same when it has raised it: to save what it can.
_AFTER_RAISING = 300.0

# Seconds of silence after which a host is dead when a connection has broken as well, and those
# without an answer after which the store is lost, at least.
_SILENCE_WHEN_SUSPECT, _STORE_SILENCE = 5.0, 20.0

# Seconds that the process that keeps the store waits for others at its end.
_LAST_WAIT = 30.0

_BROKEN_CONNECTION = re.compile(
    r"gloo|nccl|connection|socket|broken pipe|timed out|remote process|store|recvvalue|sendbytes",
    re.IGNORECASE,
)


class Watch:
    """Looks after nobody: for a process alone, or when watching is switched off.

    Examples
    --------
    >>> with Watch().guard():
    ...     pass
    """

    @contextmanager
    def guard(self, counted: bool = True) -> Iterator[None]:
        """Run a training step inside: errors in it are told to all ranks.

        Parameters
        ----------
        counted
            Whether all ranks run this step, so that one that has ended with fewer steps makes it
            impossible to finish.

        Raises
        ------
        SlapoError
            If the step cannot go on since another rank is gone; it names that rank.
        """
        yield

    def report(self, error: BaseException) -> None:
        """Tell all ranks that this one fails; their processes will end."""

    def close(self) -> None:
        """Say goodbye: this rank takes no part in further steps."""


class JobWatch(Watch):
    """Looks after the other ranks of a job; made by :func:`start_watch`."""

    def __init__(
        self, store: dist.Store, generation: int, mesh: DeviceMesh | None, seconds: float
    ) -> None:
        # Holds the server, where it is in this process, as long as there is somebody to talk to.
        self._store = store
        self._rank, self.seconds = dist.get_rank(), seconds
        # Connected before the ranks meet: a rank that dies after that leaves nobody waiting for a
        # connection to a store that is gone, which takes minutes to be given up.
        self._main, self._own = (Bulletin(store, generation) for _ in range(2))
        self._peers = peers = _roster(mesh)
        self._pid = os.getpid()
        self._steps = Steps()
        self._suspicious = self._closing = self._warned = False
        # When an obstacle was noticed, and in which step; when the main thread raised it.
        self._noticed: tuple[float, int] | None = None
        self._raised: float | None = None
        self._stop = threading.Event()
        self._tick = min(_TICK, seconds / 4)
        self._lookout = Lookout(peers, self._rank, self._own, self._tick)
        self._looks = 0
        self._store_silence = Silence(self._tick)
        # Two threads, as the store may not answer at all when its host has lost power.
        self._threads = [
            threading.Thread(target=self._repeat, args=(job,), name="slapo-watch", daemon=True)
            for job in (self._look, self._act)
        ]
        for thread in self._threads:
            thread.start()
        # Runs at the end of ordinary processes and of those that multiprocessing starts.
        self._finalizer = util.Finalize(None, self.close, exitpriority=0)

    @property
    def is_live(self) -> bool:
        """Whether it is at work, in this very process."""
        return self._pid == os.getpid() and not self._closing

    @contextmanager
    def guard(self, counted: bool = True) -> Iterator[None]:
        """See :meth:`Watch.guard`."""
        self._steps.begin(counted)
        try:
            self._refuse_to_wait(None)
            yield
        except BaseException as error:
            if not is_on_every_rank(error):
                self._refuse_to_wait(error)
                self.report(error)
            raise
        finally:
            self._steps.finish()

    def report(self, error: BaseException) -> None:
        """See :meth:`Watch.report`."""
        if not is_on_every_rank(error) and not self._steps.has_failed:
            self._steps.fail()
            self._tell("failed", f"failed with {shown(error)}")

    def close(self) -> None:
        """See :meth:`Watch.close`."""
        if not self.is_live:
            return
        self._closing = True
        error = uncaught_error()
        if error is not None:
            self.report(error)
        because = f", with {shown(error)}" if error is not None else ""
        self._tell("ended", f"ended after {self._steps.count} steps{because}")
        if keeper_of(self._store) == "rank 0" and self._rank == 0:
            self._wait_for_all()
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * _TICK)

    def _tell(self, kind: str, what: str) -> None:
        # A store that is gone is its keeper's failure, which the others see by themselves.
        with suppress(RuntimeError):
            text = f"{self._peers[self._rank].name} {what}"
            self._main.add(Event(kind, self._rank, self._steps.count, text))

    def _refuse_to_wait(self, error: BaseException | None) -> None:
        """Raise if a peer is gone, which makes a new step vain or explains ``error`` in one."""
        if error is None:
            event = self._steps.obstacle_to_begin()
        elif isinstance(error, RuntimeError) and not isinstance(error, SlapoError):
            event = self._cause_of(error)
        else:
            return
        if event is not None:
            self._raised = time.monotonic()
            message = f"{event.text}; the job cannot go on. See the output of that rank for more"
            # Each of the others gets to know by itself.
            raise on_every_rank(SlapoError(message)) from error

    def _cause_of(self, error: RuntimeError) -> Event | None:
        """Find the rank behind an error, with patience if it looks like a lost connection."""
        if not _BROKEN_CONNECTION.search(str(error)):
            return self._steps.obstacle()
        self._suspicious = True
        patience = _GRACE + (_SILENCE_WHEN_SUSPECT + _GRACE if self._lookout.is_far_sighted else 0)
        deadline = time.monotonic() + patience
        while self._steps.obstacle() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._steps.obstacle()

    def _repeat(self, job: Callable[[], None]) -> None:
        """Life of a thread."""
        while not self._stop.wait(self._tick):
            job()

    def _look(self) -> None:
        """Find out about the others."""
        try:
            self._find_out()
            self._looks += 1
        except RuntimeError as error:
            self._lose_store(str(error))

    def _find_out(self) -> None:
        patience = min(self.seconds, _SILENCE_WHEN_SUSPECT) if self._suspicious else self.seconds
        dead = self._lookout.find_dead(patience)
        # Read after looking: who is gone now and had something to say has said it.
        self._read_news()
        dead = [peer for peer in dead if peer.rank not in self._steps.gone()]
        for peer in dead:
            text = f"{peer.name} died without a word (process {peer.pid})"
            self._own.add_death(peer, self._steps.count, text)
        if dead:
            self._read_news()

    def _read_news(self) -> None:
        self._steps.note(event for event in self._own.news() if event.rank != self._rank)

    def _lose_store(self, error: str) -> None:
        """Take the loss of the store for the end of who kept it."""
        keeper = keeper_of(self._store)
        if keeper is None or 0 in self._steps.told():
            return
        name = self._peers[0].name if keeper == "rank 0" else keeper
        text = f"{name} died: the store that it keeps no longer answers ({error})"
        self._steps.note([Event("died", 0, self._steps.count, text.splitlines()[0])])

    def _act(self) -> None:
        """End this process if it waits for a rank that is gone."""
        now = time.monotonic()
        if self._store_silence.look(0, self._looks, now) > max(self.seconds, _STORE_SILENCE):
            self._lose_store("no answer")
        event = None if self._closing else self._steps.obstacle()
        if event is None:
            self._noticed = None
            return
        # A rank that comes to a step later than others may meet their error later.
        if self._noticed is None or self._noticed[1] != self._steps.count:
            self._noticed = now, self._steps.count
        noticed = self._noticed[0]
        if self._raised is not None:
            limit = self._raised + _AFTER_RAISING
        else:
            limit = noticed + (_GRACE if self._steps.is_inside else max(self.seconds, _GRACE))
        if now > limit:
            self._end(event)
        elif self._raised is None and now > noticed + _GRACE and not self._warned:
            self._warned = True
            name = self._peers[self._rank].name
            _say(
                f"{event.text}; this process ({name}) ends at its next step or in {self.seconds} s"
            )

    def _end(self, event: Event) -> None:
        _say(f"{event.text}; ending this process ({self._peers[self._rank].name})")
        os._exit(1)

    def _wait_for_all(self) -> None:
        """Keep the store open until all others have said goodbye."""
        deadline = time.monotonic() + _LAST_WAIT
        while time.monotonic() < deadline:
            if len(self._steps.gone()) >= len(self._peers) - 1:
                return
            time.sleep(0.05)


_current: JobWatch | None = None
_generation = 0


def start_watch(mesh: DeviceMesh | None = None, seconds: float | None = 30.0) -> Watch:
    """Look after the other ranks of the job; one thread serves all engines of a process.

    A collective: all ranks call it with the same arguments.

    Parameters
    ----------
    mesh
        Gives ranks the names that messages use.
    seconds
        Silence after which another host is taken for dead, and the longest time that a process
        outlives a dead peer outside of steps. None switches watching off.

    Returns
    -------
    Watch

    Raises
    ------
    ValueError
        If ``seconds`` is not positive.
    SlapoError
        If ranks pass different values.

    Examples
    --------
    >>> watch = start_watch()
    >>> with watch.guard():
    ...     loss = 0.5
    """
    global _current, _generation
    if seconds is not None and not seconds > 0:
        raise ValueError(f"watch is {seconds!r}; pass seconds, or None to switch watching off")
    same_on_all_ranks("watch", seconds)
    if seconds is None or not has_peers():
        return Watch()
    store = dist.distributed_c10d._get_default_store()
    if _current is not None and _current.is_live and _current._store is store:
        _current.seconds = seconds
        return _current
    if _current is not None:
        _current.close()
    _generation += 1
    _current = JobWatch(store, _generation, mesh, seconds)
    return _current


def _roster(mesh: DeviceMesh | None) -> list[Peer]:
    """Introduce the ranks to each other."""
    rank = dist.get_rank()
    name = f"rank {rank}" if mesh is None else describe_rank(mesh, rank)
    peers: list[Peer] = [this_process(rank, name)] * dist.get_world_size()
    dist.all_gather_object(peers, peers[0])
    return peers


def _say(message: str) -> None:
    with suppress(OSError, ValueError):
        print(f"slapo: {message}", file=sys.stderr, flush=True)
