"""A trial: a process that gets the values of a point and prints what it measured."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo.autotune.space import Refused
from slapo.autotune.values import VARIABLE
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

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|\bMemoryError\b|bad_alloc|CUBLAS_STATUS_ALLOC_FAILED|"
    r"(can't|cannot) allocate memory|not enough memory",
    re.IGNORECASE,
)
#: A rank that the kernel ended for its memory, as torchrun tells it.
_RANK_KILLED = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\) received")
_EXCEPTION = r"^(?:\[rank\d+\]:\s*)?slapo(?:\.\w+)*\.{}\b.*"
_REFUSED = re.compile(_EXCEPTION.format("Refused"), re.MULTILINE)
_WRONG_SCHEDULE = re.compile(_EXCEPTION.format(r"(?!MissingPackageError)\w*Error"), re.MULTILINE)


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
    log.parent.mkdir(parents=True, exist_ok=True)
    ended = _supervised(command, values, log, timeout)
    with contextlib.suppress(OSError):
        text = log.read_text(errors="replace")
        return classify(text, ended, timeout, metric)
    return classify("", ended, timeout, metric)


def _supervised(
    command: Sequence[str], values: Mapping[str, Any], log: Path, timeout: float
) -> dict[str, Any]:
    # Without the user's site and paths: it starts in milliseconds, whatever the environment.
    start = [sys.executable, "-I", "-S", str(_SUPERVISOR)]
    process = subprocess.Popen(
        [*start, str(log), str(timeout), str(os.getpid()), *command],
        env={**os.environ, VARIABLE: json.dumps(dict(values))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the tuner, which ends the trial in its own way
    )
    try:
        if process.stdout is None:
            raise RuntimeError("the supervisor has no pipe")
        # It says nothing before the end.
        ready, _, _ = select.select([process.stdout], [], [], timeout + _GRACE)
        if not ready:
            return {"returncode": None, "timed_out": True, "seconds": timeout, "error": ""}
        said = process.stdout.read()
    finally:
        _end(process)
    try:
        return dict(json.loads(said))
    except ValueError:
        error = f"the process that watches over it ended with status {process.returncode}"
        return {"returncode": None, "timed_out": False, "seconds": 0.0, "error": error}


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
    found = _OUT_OF_MEMORY.search(text)
    if code == 0:
        outcome = _result(text, metric)
        if outcome.kind == "no_result" and found:
            return Outcome("out_of_memory", reason=_line_at(text, found), **rest)
        return Outcome(outcome.kind, outcome.value, outcome.reason, figures=outcome.figures, **rest)
    if found:
        return Outcome("out_of_memory", reason=_line_at(text, found), **rest)
    if code in (-9, 137) or _RANK_KILLED.search(text):
        reason = "it was killed (signal 9), as the kernel does where memory runs out"
        return Outcome("out_of_memory", reason=reason, **rest)
    for kind, pattern in (("refused", _REFUSED), ("wrong_schedule", _WRONG_SCHEDULE)):
        if found := pattern.search(text):
            return Outcome(kind, reason=_line_at(text, found), **rest)
    last = _lines(text)[-1:] or ["it printed nothing"]
    return Outcome("crash", reason=f"exit status {code}: {last[0][:300]}", **rest)


def _line_at(text: str, found: re.Match[str]) -> str:
    start = text.rfind("\n", 0, found.start()) + 1
    return text[start:].split("\n", 1)[0].strip()[:300]


def _lines(text: str) -> list[str]:
    """Lines that are not empty; a progress bar begins a new one by a carriage return."""
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def _result(text: str, metric: str) -> Outcome:
    """The last line of JSON that has the figure; else what a log parser of a runtime finds."""
    lines = _lines(text)
    other: list[str] = []
    for line in reversed(lines):
        data = _json_object(line)
        if data is not None and metric in data:
            value = data.pop(metric)
            return read_value(value, metric, data)
        if data is not None and not other:
            other = list(data)
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
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < 0
    ):
        reason = f"{metric} is {value!r}; it must be a finite number of at least 0"
        return Outcome("garbage", reason=reason, figures=figures or {})
    return Outcome("ok", float(value), figures=figures or {})


def _json_object(line: str) -> dict[str, Any] | None:
    at = line.find("{")
    if at < 0:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        found, _ = json.JSONDecoder().raw_decode(line[at:])
        return found if isinstance(found, dict) else None
    return None


def _logged_speed(text: str) -> float:
    """Samples per second as the training loop of a runtime prints them; 0 if none does."""
    for target in ("deepspeed", "megatron"):  # each reads what the loop for torch prints, too
        speed = float(get_dialect_cls("log_parser", target).parse_log(text + "\n").samples_per_sec)
        if speed > 0:
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
        return read_value(run(dict(values)), metric)
    except Refused as reason:
        return Outcome("refused", reason=str(reason))
    except Exception as error:
        line = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        ended = {"returncode": 1, "timed_out": False, "seconds": 0.0, "error": ""}
        return classify(line, ended, 0.0, metric)


def default_logs(db: Path | None) -> Path:
    """Where the logs of trials go: beside the database, or in a new folder."""
    if db is None:
        return Path(tempfile.mkdtemp(prefix="slapo-tune-"))
    return db.with_name(db.name + ".logs")
