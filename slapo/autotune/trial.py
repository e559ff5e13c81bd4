"""A trial: a process that gets the values of a point and prints what it measured."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo.autotune.space import Refused, TuneError
from slapo.autotune.values import VARIABLE, finite_number
from slapo.errors import MissingPackageError, SlapoError
from slapo.framework_dialect import get_dialect_cls

#: What becomes of a trial that is run, ``"ok"`` first; the others are errors.
RUN = (
    "ok",
    "out_of_memory",
    "crash",
    "timeout",
    "wrong_schedule",
    "no_result",
    "garbage",
)
#: What becomes of a point that is not run, or says that nothing can run it.
NOT_RUN = ("refused", "does_not_fit", "skipped")

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
#: Seconds that the supervisor gets to end a trial.
_GRACE = 30.0

#: How launchers and torch mark the lines of a rank.
_RANK = r"^(?:\[[^\]\n]*\](?:<\w+>)?:? ?|\d+: )*"
#: The last line of a traceback, which quotes source, too, but indented.
_EXCEPTION = re.compile(
    _RANK
    + r"(?P<name>(?:[\w<>]+\.)+_?[A-Z]\w*|(?:[\w<>]+\.)*\w+(?:[eE]rror|Exception|Exit|Interrupt))"
    r"(?:: (?P<text>.*))?$",
    re.MULTILINE,
)
_OUT_OF_MEMORY_NAME = re.compile(r"(?:^|\.)\w*(?:OutOfMemory|Memory)Error$")
_OUT_OF_MEMORY_TEXT = (
    r"\bout of memory\b|OutOfMemoryError:|bad_alloc|CUBLAS_STATUS_ALLOC_FAILED|"
    r"(?:can't|cannot) allocate memory|not enough memory"
)
#: What C++, CUDA, shells and the kernel print without a traceback, and the loops of this library.
_OUT_OF_MEMORY_LINE = re.compile(
    _RANK + r"(?:.*\b\w+ out of memory\. Tried to allocate|"
    r"\s*(?:terminate called .*|what\(\): +)?'?std::bad_alloc|"
    r"(?:error: )?(?:CUDA (?:error: )?)?out of memory\W*$|.*: cannot allocate memory$)",
    re.IGNORECASE | re.MULTILINE,
)
#: A rank that the kernel ended for its memory, as torchrun tells it.
_RANK_KILLED = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\) received")
#: What the other ranks, and the launcher, die of when one rank does.
_CONSEQUENCE = re.compile(
    r"ChildFailedError|ProcessExitedException|ProcessRaisedException|Dist\w*Error|SignalException|"
    r"ConnectionResetError|Connection (?:closed|reset) by peer"
)
_LIBRARY = re.compile(r"slapo(?:\.\w+)*\.(?:Refused|\w*Error)$")
#: Characters of JSON that are kept of the other figures of a trial, and how deep they may be.
_ROOM, _DEPTH = 10_000, 50


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes
    ----------
    kind
        One of ``RUN`` and ``NOT_RUN``.
    value
        What it measured, of kind ``"ok"`` only.
    reason
        A line that says more, for the other kinds.
    seconds
        How long it ran.
    figures
        What else it reported.
    """

    kind: str
    value: float | None = None
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


def run_command(
    command: Sequence[str],
    values: Mapping[str, Any],
    log: Path,
    timeout: float,
    metric: str = "throughput",
) -> Outcome:
    """Run a trial in processes of its own, none of which is left when this returns or raises.

    Parameters
    ----------
    command
        The program and its arguments.
    values
        What the trial gets as JSON in the environment's ``SLAPO_TRIAL``.
    log
        The file for what it prints: the first and the last MiB.
    timeout
        Seconds until it is killed.
    metric
        Which figure of the line of JSON that it prints is the result.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TuneError(
            f"the folder {log.parent} for what trials print cannot be made: {error.strerror}; "
            "move what is there, or name another database"
        ) from None
    ended = _supervised(command, values, log, timeout)
    with contextlib.suppress(OSError):
        text = log.read_text(errors="replace")
        return classify(text, ended, timeout, metric)
    return classify("", ended, timeout, metric)


def _supervised(
    command: Sequence[str], values: Mapping[str, Any], log: Path, timeout: float
) -> dict[str, Any]:
    ended = {"returncode": None, "timed_out": False, "seconds": 0.0, "error": ""}
    # Without the user's site and paths: it starts in milliseconds, whatever the environment.
    start = [sys.executable, "-I", "-S", str(_SUPERVISOR)]
    try:
        process = subprocess.Popen(
            [*start, str(log), str(timeout), str(os.getpid()), *command],
            env={**os.environ, VARIABLE: json.dumps(dict(values))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tuner, which ends the trial in its own way
        )
    except (OSError, ValueError) as error:  # values that are too long, or have a zero byte
        return {**ended, "error": f"it could not be started: {error}"}
    try:
        if process.stdout is None:
            raise RuntimeError("the supervisor has no pipe")
        # It says nothing before the end.
        ready, _, _ = select.select([process.stdout], [], [], timeout + _GRACE)
        if not ready:
            return {**ended, "timed_out": True, "seconds": timeout}
        said = process.stdout.read()
    finally:
        _end(process)
    try:
        return dict(json.loads(said))
    except ValueError:
        reason = f"the process that watches over it ended with status {process.returncode}"
        return {**ended, "error": reason}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe, by which the supervisor ends the trial if it still runs."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()


def classify(text: str, ended: Mapping[str, Any], timeout: float, metric: str) -> Outcome:
    r"""Tell what became of a trial by what it printed and how it ended.

    Parameters
    ----------
    text
        Its log.
    ended
        ``returncode``, ``timed_out``, ``seconds`` and ``error``, as its supervisor said.
    timeout
        Its limit, for the message.
    metric
        The figure to look for.

    Examples
    --------
    >>> ended = {"returncode": 1, "timed_out": False, "seconds": 2.0, "error": ""}
    >>> text = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    >>> classify(text, ended, 60, "throughput").kind
    'out_of_memory'
    >>> classify('{"throughput": 8.5}\n', {**ended, "returncode": 0}, 60, "throughput").value
    8.5
    """
    code, seconds = ended["returncode"], float(ended["seconds"])
    rest: dict[str, Any] = {"seconds": seconds}
    if ended["error"]:
        return Outcome("crash", reason=ended["error"], **rest)
    if ended["timed_out"]:
        return Outcome("timeout", reason=f"it was ended after {timeout:g} s", **rest)
    text = text.replace("\r", "\n")
    memory = _out_of_memory(text)
    if code == 0:
        outcome = _result(text, metric)
        if outcome.kind == "no_result" and memory:
            return Outcome("out_of_memory", reason=memory, **rest)
        return Outcome(outcome.kind, outcome.value, outcome.reason, figures=outcome.figures, **rest)
    if memory:
        return Outcome("out_of_memory", reason=memory, **rest)
    if code in (-9, 137) or _RANK_KILLED.search(text):
        reason = "it was killed (signal 9), as the kernel does where memory runs out"
        return Outcome("out_of_memory", reason=reason, **rest)
    kind, reason = _cause(text)
    if kind:
        return Outcome(kind, reason=reason, **rest)
    last = _lines(text)[-1:] or ["it printed nothing"]
    return Outcome("crash", reason=f"exit status {code}: {last[0][:300]}", **rest)


def _out_of_memory(text: str) -> str:
    """The line that says that memory ran out, of whichever rank; empty if none does."""
    lines = [found[0] for found in _EXCEPTION.finditer(text) if _is_out_of_memory(found)]
    other = None if lines else _OUT_OF_MEMORY_LINE.search(text)
    if other is not None:
        lines = [text[other.start() :].split("\n", 1)[0]]
    return lines[0].strip()[:300] if lines else ""


def _is_out_of_memory(found: re.Match[str]) -> bool:
    said = re.search(_OUT_OF_MEMORY_TEXT, found["text"] or "", re.IGNORECASE)
    return bool(said or _OUT_OF_MEMORY_NAME.search(found["name"]))


def _cause(text: str) -> tuple[str, str]:
    """The outcome by the exception that the trial died of, which is the last one of its own."""
    found = [one for one in _EXCEPTION.finditer(text) if not _CONSEQUENCE.search(one[0])]
    name = found[-1]["name"] if found else ""
    if not _LIBRARY.match(name) or name.endswith(".MissingPackageError"):
        return "", ""
    kind = "refused" if name.endswith(".Refused") else "wrong_schedule"
    return kind, found[-1][0].strip()[:300]


def _lines(text: str) -> list[str]:
    """Lines that are not empty; a progress bar begins a new one by a carriage return."""
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def _result(text: str, metric: str) -> Outcome:
    """The last line of JSON that has the figure; else what a log parser of a runtime finds."""
    lines = _lines(text)
    other: list[str] = []
    for line in reversed(lines):
        for data in _json_objects(line):
            if metric in data:
                value = data.pop(metric)
                return read_value(value, metric, _kept(data))
            other = other or list(data)[:20]
    speed = _logged_speed(text)
    if speed > 0 and metric == "throughput":
        return Outcome("ok", speed)
    last = f"its last line is {lines[-1][:200]!r}" if lines else "it printed nothing"
    if other:
        last = f"its line of JSON has {other} and no {metric!r}"
    return Outcome("no_result", reason=f"no line of JSON with {metric!r}: {last}")


def read_value(value: Any, metric: str, figures: dict[str, Any] | None = None) -> Outcome:
    """An outcome by a result: ok if it is a number that can be compared, else garbage.

    Examples
    --------
    >>> read_value(float("nan"), "throughput").kind
    'garbage'
    """
    number = finite_number(value)
    if number is None:
        reason = f"{metric} is {repr(value)[:200]}; it must be a finite number"
        return Outcome("garbage", reason=reason, figures=figures or {})
    return Outcome("ok", number, figures=figures or {})


def _json_objects(line: str) -> Iterator[dict[str, Any]]:
    """Objects of JSON in a line, which may have other braces, too."""
    at, decoder = 0, json.JSONDecoder()
    for _ in range(100):
        begin = line.find("{", at)
        if begin < 0:
            return
        at = begin + 1
        with contextlib.suppress(ValueError, RecursionError):
            found, at = decoder.raw_decode(line, begin)
            yield found


def _kept(figures: dict[str, Any]) -> dict[str, Any]:
    """Those that a database and its readers can take: not what is very long or deep."""
    kept: dict[str, Any] = {}
    room = _ROOM
    for name, value in figures.items():
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps({name: value})
            if len(text) <= room and text.count("[") + text.count("{") <= _DEPTH:
                kept[name] = value
                room -= len(text)
    return kept


def _logged_speed(text: str) -> float:
    """Samples per second as the training loop of a runtime prints them; 0 if none does."""
    for target in ("deepspeed", "megatron"):  # each reads what the loop for torch prints, too
        # What looks like a number may be none, such as 1.2.3, or have no end.
        with contextlib.suppress(ValueError, ArithmeticError):
            found = get_dialect_cls("log_parser", target).parse_log(text + "\n")
            speed = finite_number(found.samples_per_sec)
            if speed:
                return speed
    return 0.0


def run_function(
    run: Callable[[dict[str, Any]], Any], values: Mapping[str, Any], metric: str
) -> Outcome:
    """A trial in this process: a function in place of a command.

    Parameters
    ----------
    run
        Gets the values; returns the result, or raises.
    values
        Of the point.
    metric
        What the result is called.
    """
    try:
        value = run(dict(values))
        # Numbers of numpy, and tensors with one.
        return read_value(value.item() if hasattr(value, "item") else value, metric)
    except Refused as reason:
        return Outcome("refused", reason=str(reason))
    except (Exception, SystemExit) as error:
        line = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        is_library = isinstance(error, SlapoError) and not isinstance(error, MissingPackageError)
        if is_library:  # also by a class of the user's own, which no line tells
            return Outcome("wrong_schedule", reason=line[:300])
        ended = {"returncode": 1, "timed_out": False, "seconds": 0.0, "error": ""}
        return classify(line, ended, 0.0, metric)


def default_logs(db: Path | None) -> Path:
    """Where the logs of trials go: beside the database, or in a new folder."""
    if db is None:
        return Path(tempfile.mkdtemp(prefix="slapo-tune-"))
    return db.with_name(db.name + ".logs")
