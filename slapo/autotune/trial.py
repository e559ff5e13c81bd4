"""A single trial: its command line, its processes, and its outcome."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slapo.autotune.space import Refused, TuneError, configured, point_key, source_of
from slapo.autotune.values import RESULTS, VARIABLE, finite_number, is_out_of_memory, kind_of
from slapo.errors import with_nearest
from slapo.framework_dialect import get_dialect_cls

#: Outcomes of a trial that ran, ``"ok"`` first; the others are failures.
RUN = ("ok", "out_of_memory", "crash", "timeout", "wrong_schedule", "no_result", "garbage")
#: Outcomes of a point that did not run, or refused itself.
NOT_RUN = ("refused", "does_not_fit", "skipped")

#: Seconds between SIGTERM and SIGKILL, and until processes that survive SIGKILL are given up.
_GRACE, _GIVE_UP = 5.0, 10.0
#: Bytes at the end of a log in which a result is looked for.
_KEPT = 2**20
_PLACE = re.compile(r"\{\{([A-Za-z_][\w.-]*)\}\}|\{([A-Za-z_][\w.-]*)\}")


# --- command lines -------------------------------------------------------------------------------
class Launcher:
    """Command lines of points, from a program with arguments or a function of the values.

    With `bare` an argument that equals a name is replaced by its value, without braces.
    """

    def __init__(
        self,
        command: str | Sequence[str] | Callable[[dict[str, Any]], Sequence[str]],
        bare: bool = False,
    ) -> None:
        self._bare = bare
        self._make = command if callable(command) else None
        words = [] if callable(command) else command
        self._words = shlex.split(words) if isinstance(words, str) else [str(w) for w in words]
        if self._make is None:
            self._words = _with_program(self._words)

    def __call__(self, values: Mapping[str, Any]) -> list[str]:
        """Return program and arguments of a point; raises `Refused` for a missing value."""
        if self._make is None:
            return [self._filled(word, values) for word in self._words]
        call = f"command({dict(values)})"
        with configured(call):
            made = self._make(dict(values))
        is_list = isinstance(made, list | tuple)
        if not is_list or not all(isinstance(w, str | int | float | Path) for w in made):
            raise TuneError(
                f"{call} returned {made!r}; return a list of the program and its arguments"
            )
        return _with_program([str(word) for word in made])

    def line(self, values: Mapping[str, Any]) -> str:
        """Return the shell command of a point; empty for a point without one."""
        try:
            words = self(values)
        except (Refused, TuneError):  # an imported trial, for example
            return ""
        # Compare the folders too: the Pythons of two environments may be links to one file.
        found, used = Path(shutil.which("python") or "nowhere"), Path(sys.executable)
        if found.parent == used.parent and found.samefile(used):
            words = ["python" if word == sys.executable else word for word in words]
        return f"{VARIABLE}={shlex.quote(json.dumps(dict(values)))} {shlex.join(words)}"

    @property
    def text(self) -> str:
        """Identity of the command in a database."""
        if self._make is not None:
            name, source = getattr(self._make, "__qualname__", "command"), source_of(self._make)
            return f"the function {name}" + (f" (text {source})" if source else "")
        return shlex.join("python" if word == sys.executable else word for word in self._words)

    def check(self, points: Iterable[Mapping[str, Any]]) -> None:
        """Refuse a placeholder without a value in one of these points."""
        try:
            for values in points:
                _ = [self._filled(word, values) for word in self._words]
        except Refused as reason:
            raise TuneError(
                f"{reason}; give it a value in every point of the space, or write a function "
                "command(point)"
            ) from None

    def _filled(self, word: str, values: Mapping[str, Any]) -> str:
        def value(name: str) -> str:
            if name not in values:
                rest = f"the point {dict(values)} lacks it; write {{{{{name}}}}} for braces"
                raise Refused(
                    f"the argument {word!r} has the placeholder {{{name}}}: "
                    + with_nearest(name, values, rest)
                )
            found = values[name]
            return json.dumps(found) if isinstance(found, list | dict) else str(found)

        if self._bare and word in values:
            return value(word)
        return _PLACE.sub(lambda m: f"{{{m[1]}}}" if m[1] else value(m[2]), word)


def _with_program(words: Sequence[str]) -> list[str]:
    if not words:
        raise TuneError("there is no script to run; name one, and its arguments, after the options")
    first, *rest = words
    if first.endswith((".py", ".sh")) and Path(first).is_file():
        return [sys.executable if first.endswith(".py") else "bash", first, *rest]
    if first in ("python", "python3"):
        return [sys.executable, *rest]
    if shutil.which(first) is not None:
        return list(words)
    # A program such as torchrun, in an environment that is not activated.
    beside = shutil.which(first, path=str(Path(sys.executable).parent))
    if beside is None:
        raise TuneError(
            f"there is no script {first!r} in {Path.cwd()}, and no executable of that name; name "
            "a .py or .sh file, or a program on the PATH, before its arguments"
        )
    return [beside, *rest]


# --- outcomes ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Prediction:
    """Required and available bytes of the fullest device, samples per second, and a refusal.

    `refused` is empty for a point that can run.
    """

    memory: float = 0.0
    capacity: float | None = None
    throughput: float = 0.0
    fits: bool = True
    refused: str = ""

    def __str__(self) -> str:
        of = "" if self.capacity is None else f" of {self.capacity / 2**30:.2f}"
        return f"{self.memory / 2**30:.2f}{of} GiB, {self.throughput:.4g} samples/s"


@dataclass(frozen=True)
class Trial:
    """A finished trial, or a point that a search decided not to run.

    Attributes
    ----------
    number
        Number in the study.
    values
        Values of the point.
    outcome
        ``"ok"``, ``"out_of_memory"``, ``"crash"``, ``"timeout"``, ``"wrong_schedule"``,
        ``"no_result"``, ``"garbage"`` or ``"refused"``; ``"cut_off"`` if the tuner ended first;
        ``"does_not_fit"`` or ``"skipped"`` if the point was not run.
    result
        Figure that the search maximizes; None unless the outcome is ``"ok"``.
    choices
        Name -> value of each question of the space.
    reason
        One-line reason for an outcome other than ``"ok"``.
    predicted
        Prediction, or None.
    seconds
        Run time.
    log
        Path of the output.
    figures
        Additional reported figures.
    parameters
        Parameters in the study.
    source
        Origin of the point: ``"prediction"``, ``"sampler"``, ``"neighbor"``, ``"unseen"``,
        ``"retry"``, ``"cut_off"`` or ``"import"``.
    started
        True if the trial ran, even if it refused itself.

    Examples
    --------
    >>> trial = Trial(0, {"tp": 2}, "ok", 12.5)
    >>> trial.is_run, trial.is_failure, trial.key
    (True, False, '{"tp": 2}')
    """

    number: int
    values: dict[str, Any]
    outcome: str
    result: float | None = None
    choices: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    predicted: Prediction | None = None
    seconds: float = 0.0
    log: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    started: bool = False

    @property
    def is_run(self) -> bool:
        """True if the trial ran to its end."""
        return self.outcome in RUN or (self.started and self.outcome == "refused")

    @property
    def is_failure(self) -> bool:
        """True if the trial ran without a result."""
        return self.outcome in RUN[1:]

    @property
    def key(self) -> str:
        """Text that is equal for equal points."""
        return point_key(self.values)


def judged(outcome: str, result: float | None = None, **more: Any) -> Trial:
    """Return a trial; the search adds its number and point."""
    return Trial(0, {}, outcome, result, **more)


def run_command(
    command: Sequence[str],
    values: Mapping[str, Any],
    log: Path,
    timeout: float,
    metric: str = "throughput",
) -> Trial:
    """Run a trial as a session of processes; all of them have ended when this returns or raises."""
    results = log.resolve().with_suffix(".results")
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        results.unlink(missing_ok=True)
    except OSError as error:
        raise TuneError(f"the log {log} cannot be written: {error}; free it, or move it") from None
    # Unbuffered, so that the last line of a log is the error, not an earlier print.
    environment = {"PYTHONUNBUFFERED": "1", **os.environ, RESULTS: str(results)}
    environment[VARIABLE] = json.dumps(dict(values))
    started, process, code = time.monotonic(), None, None
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # The trial and its children form one process group, which killpg() reaches.
                start_new_session=True,
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout)
    except (OSError, ValueError) as error:  # values that are too long, for example
        return judged("crash", reason=f"it could not be started: {error}")
    finally:
        seconds = time.monotonic() - started
        if process is not None:
            _end(process, str(results))
        else:  # perhaps interrupted while it started, and known by its mark alone
            _kill(None, str(results))
    entries = _entries(results)
    results.unlink(missing_ok=True)
    if code is None:
        reason = f"it timed out after {timeout:g} s"
        return judged("timeout", reason=reason, seconds=seconds)
    return replace(_outcome(code, entries, _tail(log), metric), seconds=seconds)


def run_function(
    run: Callable[[dict[str, Any]], Any], values: Mapping[str, Any], metric: str
) -> Trial:
    """Run a trial as a function of this process that returns the result."""
    try:
        value = run(dict(values))
    except (Exception, SystemExit) as error:
        kind, reason = kind_of(error)
        return judged(kind, reason=reason)
    # numpy scalars, and tensors with one element
    return _value(value.item() if hasattr(value, "item") else value, metric, {})


def _outcome(code: int, entries: Sequence[Any], text: str, metric: str) -> Trial:
    """Judge a process by its exit status, result file and log, in this order."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    last = lines[-1][:300] if lines else "it printed nothing"
    errors = [entry for entry in entries if isinstance(entry, list)]
    # A process that reports a result and then fails has not trained to its end.
    if code == 0:
        reported = [entry for entry in entries if isinstance(entry, dict)]
        # The last report counts, as a script may report several times.
        objects = [*reversed(reported), *map(_object, reversed(lines))]
        for figures in objects:
            if metric in figures:
                return _value(figures.pop(metric), metric, figures)
        speed = _logged_speed(text) if metric == "throughput" else 0.0
        if speed:
            return judged("ok", speed)
    if errors:
        # Other ranks fail as a consequence, and may report first.
        kind, reason = next((e for e in errors if e[0] != "crash"), errors[0])
        return judged(kind, reason=reason)
    # A shell returns 128 + the signal of its last command.
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        reason = "it was killed (signal 9), as the kernel does when memory runs out"
        return judged("out_of_memory", reason=reason)
    if is_out_of_memory(last):
        return judged("out_of_memory", reason=last)
    if code:
        return judged("crash", reason=f"exit status {code}: {last}")
    other = next(filter(None, objects), None)
    found = f"its last line of JSON has {list(other)[:20]}" if other else f"its last line: {last!r}"
    return judged("no_result", reason=f"no line of JSON with {metric!r}; {found}")


def _value(value: Any, metric: str, figures: dict[str, Any]) -> Trial:
    number = finite_number(value)
    if number is None:
        reason = f"{metric} is {repr(value)[:200]}; it must be a finite number"
        return judged("garbage", reason=reason, figures=figures)
    return judged("ok", number, figures=figures)


def _object(line: str) -> dict[str, Any]:
    """Return the JSON object in a line, which launchers prefix with the rank, or ``{}``."""
    begin = line.find('{"')
    if begin >= 0:
        with contextlib.suppress(ValueError, RecursionError):
            return dict(json.JSONDecoder().raw_decode(line, begin)[0])
    return {}


def _logged_speed(text: str) -> float:
    """Return samples per second from the training loops' logs; 0 without any."""
    for target in ("deepspeed", "megatron"):  # both also parse the log of the torch loop
        with contextlib.suppress(ValueError, ArithmeticError):
            found = get_dialect_cls("log_parser", target).parse_log(text + "\n")
            speed = finite_number(found.samples_per_sec)
            if speed:
                return speed
    return 0.0


def _entries(results: Path) -> list[Any]:
    entries = []
    lines = results.read_text(errors="replace").splitlines() if results.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError):  # cut off when its process was killed
            entries.append(json.loads(line))
    return entries


# --- processes -----------------------------------------------------------------------------------
def end_leftovers(logs: Path) -> None:
    """End the trial of a search that was killed before it could end the trial itself."""
    _kill(None, f"{logs.resolve()}/")


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _KEPT))
        return file.read().decode(errors="replace")
    return ""


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a trial: SIGTERM, by which a launcher ends its ranks, then SIGKILL for the rest."""
    try:
        _send(process, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while process.poll() is None or any(True for _ in _marked(mark)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
    finally:  # even if a second Ctrl-C interrupts the grace period
        _kill(process, mark)


def _kill(process: subprocess.Popen[bytes] | None, mark: str) -> None:
    """Kill until no process is left, so that its GPU memory is free again."""
    pids: set[int] = set()
    deadline = time.monotonic() + _GIVE_UP
    while time.monotonic() < deadline:
        # In a loop, since a process may start another one before the signal arrives.
        pids = {pid for pid in pids if _runs(pid)} | set(_marked(mark))
        _send(process, signal.SIGKILL, pids)
        if not pids and (process is None or process.poll() is not None):
            return
        time.sleep(0.01)


def _send(process: subprocess.Popen[bytes] | None, number: int, pids: Iterable[int] = ()) -> None:
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        # The name in parentheses may contain blanks and parentheses. Zombies hold no memory any
        # more.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _marked(mark: str) -> Iterator[int]:
    """Yield the processes of a trial, found by their inherited environment; on Linux only.

    torchrun starts each rank in its own session, so the trial's process group lacks them.
    """
    text = f"{RESULTS}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text in path.read_bytes():
                yield int(path.parent.name)
