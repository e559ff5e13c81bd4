"""Runs one trial, and leaves none of its processes behind.

A program of its own that needs the standard library alone: ``supervisor.py LOG TIMEOUT PARENT
COMMAND...``. Its standard input is a pipe from the tuner that never carries a byte. When the pipe
ends, or the system says that the tuner died, the trial is killed. On Linux it adopts what the
trial's processes leave behind, so that a rank that made itself a session of its own ends too;
elsewhere it kills the trial's process group.

What the trial prints goes to the log: its beginning and its end, however much it is. The last thing
that the supervisor prints is JSON: ``returncode``, ``timed_out``, ``seconds``, ``error``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Bytes kept of the beginning and of the end of what a trial prints.
KEEP = 2**20
#: Seconds until processes that cannot be killed are given up.
PATIENCE = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Log:
    """A file with the beginning and the end of a stream of any length."""

    def __init__(self, path: str, keep: int = KEEP) -> None:
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115, closed at the end
        self._room, self._keep = keep, keep
        self._end = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        head, data = data[: self._room], data[self._room :]
        if head:
            self._room -= len(head)
            self._write(head)
        self._end += data
        # In big steps: to cut a little off the front at each write is slow.
        if len(self._end) > 2 * self._keep:
            self._cut()

    def close(self) -> None:
        """Write the end."""
        self._cut()
        if self._dropped:
            self._write(b"\n[... %d bytes left out ...]\n" % self._dropped)
        self._write(bytes(self._end))
        self._file.close()

    def _cut(self) -> None:
        excess = len(self._end) - self._keep
        if excess > 0:
            del self._end[:excess]
            self._dropped += excess

    def _write(self, data: bytes) -> None:
        # A full disk costs the log, not the trial.
        with contextlib.suppress(OSError):
            self._file.write(data)


class Supervisor:
    """The processes of one trial."""

    def __init__(self, log: str, timeout: float, parent: int) -> None:
        self._log, self._timeout, self._parent = Log(log), timeout, parent
        self._status: int | None = None
        self._child = 0
        self._signals, waker = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def run(self, command: Sequence[str]) -> dict[str, object]:
        """Start a command and wait for it; what became of it."""
        adopts = _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        started = time.monotonic()
        output, sink = os.pipe()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_before_the_trial,
            )
        except (OSError, ValueError) as error:
            self._log.close()
            reason = f"it could not be started: {error}"
            return {"returncode": None, "timed_out": False, "seconds": 0.0, "error": reason}
        finally:
            os.close(sink)
        self._child = process.pid
        ended = self._wait(output, started + self._timeout)
        seconds = time.monotonic() - started
        self._kill(adopts)
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(output, 2**16):
                self._log.add(data)
        self._log.close()
        # Its status is known here, and nobody else asks for it.
        process.returncode = -signal.SIGKILL if self._status is None else self._status
        return {
            "returncode": process.returncode,
            "timed_out": ended == "timeout",
            "seconds": seconds,
            # The tuner may be there: then a signal came to this process alone.
            "error": "it was ended, as the process that watches over it was" * (ended == "tuner"),
        }

    def _wait(self, output: int, deadline: float) -> str:
        """Read until the trial ends; why it did: "exit", "timeout" or "tuner"."""
        sources = [output, self._signals, 0]
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            ready, _, _ = select.select(sources, [], [], min(left, 3600.0))
            if output in ready:
                data = os.read(output, 2**16)
                self._log.add(data)
                if not data:
                    sources.remove(output)
            if 0 in ready and not os.read(0, 1):
                return "tuner"
            if self._signals in ready:
                received = set(os.read(self._signals, 512))
                if received & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
                    return "tuner"
                self._reap()
            if self._status is not None:
                return "exit"
            if os.getppid() != self._parent:  # it died before the system was asked to tell
                return "tuner"

    def _reap(self) -> bool:
        """Take the status of children that ended; whether some are left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                if pid == self._child:
                    self._status = os.waitstatus_to_exitcode(status)
        return False

    def _kill(self, adopts: bool) -> None:
        """End all that is left of the trial."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child, signal.SIGKILL)
            for pid in descendants(os.getpid()) if adopts else ():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not self._reap():
                return
            time.sleep(0.002)


def descendants(pid: int) -> Iterator[int]:
    """Processes that descend from one, by Linux's ``/proc``."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may contain anything.
                fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    found = list(children.get(pid, ()))
    for one in found:
        found.extend(children.get(one, ()))
        yield one


def _before_the_trial() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Where memory runs out, the kernel shall end the trial, and not the tuner.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


def main(arguments: Sequence[str]) -> int:
    """Run the trial that the command line describes."""
    log, timeout, parent, *command = arguments
    found = Supervisor(log, float(timeout), int(parent)).run(command)
    with contextlib.suppress(OSError):  # the tuner may be gone
        os.write(1, json.dumps(found).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
