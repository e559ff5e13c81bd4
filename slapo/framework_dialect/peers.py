"""What the processes of a job know of each other: who runs where, and what became of whom."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

# A store that has not answered by then is gone. Its operations here never wait for a key.
_STORE_PATIENCE = timedelta(seconds=20)


@dataclass(frozen=True)
class Peer:
    """A process of the job.

    Attributes
    ----------
    host
        Processes of one host see each other's process ids.
    started
        When the process started, in the terms of its system; ids are used again.
    name
        The rank, for messages.
    """

    rank: int
    host: str
    pid: int
    started: str
    name: str


@dataclass(frozen=True)
class Event:
    """The end of a rank.

    Attributes
    ----------
    kind
        ``"ended"`` as it should, ``"failed"`` with an error, or ``"died"`` without a word.
    step
        Steps that the rank had begun.
    text
        For messages; starts with the rank.
    """

    kind: str
    rank: int
    step: int
    text: str


class Bulletin:
    """Events that all ranks can read and add to, kept in a store.

    Parameters
    ----------
    store
        Gets another client: the calls of one client wait for each other, so that each thread needs
        a bulletin of its own.
    number
        Of this bulletin, where a store has several one after the other.

    Examples
    --------
    >>> board = Bulletin(dist.HashStore(), 1)
    >>> board.add(Event("ended", 0, 3, "rank 0 ended"))
    >>> [event.kind for event in board.news()], board.news()
    (['ended'], [])
    """

    def __init__(self, store: dist.Store, number: int) -> None:
        client: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch omits it
        client.set_timeout(_STORE_PATIENCE)
        self._store = dist.PrefixStore(f"slapo/watch/{number}", client)
        self._seen = 0
        self._unread: list[int] = []

    def add(self, event: Event) -> None:
        """Tell all ranks."""
        number = self._store.add("events", 1) - 1
        self._store.set(f"event/{number}", json.dumps(asdict(event)))

    def add_death(self, peer: Peer, step: int, text: str) -> None:
        """Tell all ranks that a peer died; the first of those who noticed does it."""
        if self._store.add(f"death/{peer.rank}", 1) == 1:
            self.add(Event("died", peer.rank, step, text))

    def news(self) -> list[Event]:
        """Events that this reader has not seen yet."""
        count = self._store.add("events", 0)
        self._unread += range(self._seen, count)
        self._seen = count
        # An event has its number before it has its text: one may be missing for a moment.
        ready = [n for n in self._unread if self._store.check([f"event/{n}"])]
        self._unread = [n for n in self._unread if n not in ready]
        return [Event(**json.loads(self._store.get(f"event/{n}"))) for n in ready]

    def beat(self, host: int, by: int = 1) -> int:
        """Count a sign of life of a host; by 0, only read the count."""
        return self._store.add(f"host/{host}", by)


def this_process(rank: int, name: str) -> Peer:
    """Describe the calling process.

    Examples
    --------
    >>> this_process(0, "rank 0").pid == os.getpid()
    True
    """
    pid = os.getpid()
    return Peer(rank, _host(pid), pid, _start_time(pid) or "", name)


def is_running(peer: Peer) -> bool:
    """Whether a process of this host is still there; a stopped or a busy one is.

    Examples
    --------
    >>> is_running(this_process(0, "rank 0"))
    True
    """
    return _start_time(peer.pid) == peer.started


def hosts_of(peers: list[Peer]) -> list[str]:
    """Hosts in the order of their first rank.

    Examples
    --------
    >>> len(hosts_of([this_process(0, "rank 0")]))
    1
    """
    return list(dict.fromkeys(peer.host for peer in peers))


def keeper_of(store: dist.Store) -> str | None:
    """Who goes when the store goes: ``"rank 0"``, ``"the launcher"``, or None if nobody does.

    Examples
    --------
    >>> keeper_of(dist.HashStore()) is None
    True
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    return "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def uncaught_error() -> BaseException | None:
    """The exception that ends this process, if one does.

    Examples
    --------
    >>> uncaught_error() is None
    True
    """
    # The first inside a process of multiprocessing, the second in an ordinary one.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) and not error.code else error


def shown(error: BaseException) -> str:
    """Type and beginning of the message: some bring a whole compiler's output.

    Examples
    --------
    >>> shown(ValueError("no such token"))
    'ValueError: no such token'
    """
    return f"{type(error).__name__}: {str(error)[:500]}"


def _host(pid: int) -> str:
    """Processes see each other if they share the machine and the space of process ids."""
    parts = [platform.node()]
    if sys.platform == "win32":
        # Asking for a process there would end it, so each process counts as a host.
        parts.append(str(pid))
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def _start_time(pid: int) -> str | None:
    """When a process started; None if it is gone, also when its parent has not yet noticed."""
    if not Path("/proc/self/stat").exists():
        return _is_known(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything; state and start time are fields 3 and 22.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _is_known(pid: int) -> str | None:
    """Stands in where the system does not tell when a process started."""
    if sys.platform == "win32":
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""


class Silence:
    """For how long counters have stood still.

    Time counts only while this process looks: after it was stopped itself, nobody else is late.

    Parameters
    ----------
    tick
        Seconds between two looks.

    Examples
    --------
    >>> silence = Silence(tick=1.0)
    >>> silence.look(1, 7, now=0.0), silence.look(1, 7, now=1.0), silence.look(1, 8, now=2.0)
    (0.0, 1.0, 0.0)
    """

    def __init__(self, tick: float) -> None:
        self._longest = 2 * tick
        self._last: dict[int, tuple[int, float, float]] = {}

    def look(self, key: int, count: int, now: float) -> float:
        """Note the state of a counter; return for how many seconds it has been the same."""
        before, seen_at, silent = self._last.get(key, (-1, now, 0.0))
        silent = silent + min(now - seen_at, self._longest) if count == before else 0.0
        self._last[key] = (count, now, silent)
        return silent


class Lookout:
    """Finds peers that are gone: on this host by the system, on the next two by their silence.

    Parameters
    ----------
    peers
        All processes of the job.
    rank
        This one's.
    board
        Where hosts count their signs of life.
    tick
        Seconds between two looks.
    """

    def __init__(self, peers: list[Peer], rank: int, board: Bulletin, tick: float) -> None:
        self._board, self._silence = board, Silence(tick)
        hosts = hosts_of(peers)
        self._here = hosts.index(peers[rank].host)
        following = [(self._here + i) % len(hosts) for i in range(1, min(3, len(hosts)))]
        self._near = [peer for peer in peers if peer.host == peers[rank].host]
        self._far = {i: [peer for peer in peers if peer.host == hosts[i]] for i in following}

    @property
    def is_far_sighted(self) -> bool:
        """Whether the job has other hosts."""
        return bool(self._far)

    def find_dead(self, patience: float) -> list[Peer]:
        """Look once; hosts silent for longer than ``patience`` seconds are dead."""
        if self._far:
            self._board.beat(self._here)
        dead = [peer for peer in self._near if not is_running(peer)]
        for host, peers in self._far.items():
            count = self._board.beat(host, 0)
            if self._silence.look(host, count, time.monotonic()) > patience:
                dead += peers
        return dead
