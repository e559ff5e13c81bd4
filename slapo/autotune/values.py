"""Functions for the script of a trial."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
from numbers import Real
from typing import Any

import torch

from slapo.autotune.space import Refused
from slapo.errors import MissingPackageError, SlapoError

#: Environment variable with the values of a trial.
VARIABLE = "SLAPO_TRIAL"
#: Environment variable with the path of a trial's result file: a JSON line per result and error, in
#: the order written by the trial's processes.
RESULTS = "SLAPO_RESULTS"
_OUT_OF_MEMORY = (
    "out of memory",
    "memoryerror",
    "bad_alloc",
    "cublas_status_alloc_failed",
    "cannot allocate memory",
    "can't allocate memory",
    "not enough memory",
)


def trial_values(**defaults: Any) -> dict[str, Any]:
    """Read the values of the trial that this process runs.

    In a trial it also sets ``sys.excepthook``, so that the error which ends this process is
    reported to the tuner. The previous hook runs too.

    Parameters
    ----------
    **defaults
        Values of names that the trial does not set; outside a search all are used.

    Returns
    -------
    dict
        Name -> value.

    Examples
    --------
    >>> trial_values(micro_batch=4, checkpoint=0.5)
    {'micro_batch': 4, 'checkpoint': 0.5}
    """
    if RESULTS in os.environ and not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    return {**defaults, **json.loads(os.environ.get(VARIABLE, "{}"))}


def report_result(throughput: float, **figures: Any) -> None:
    """Report the throughput of a trial to the tuner, and print it as a line of JSON.

    Call it at the end, on one rank.

    Parameters
    ----------
    throughput
        Samples per second; more is better.
    **figures
        Additional figures for the database.

    Raises
    ------
    ValueError
        If the throughput is not a finite number, or is negative.

    Examples
    --------
    >>> report_result(12.5, memory=3 * 2**30)
    {"throughput": 12.5, "memory": 3221225472}
    """
    number = float(throughput)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"a throughput of {throughput!r} cannot be compared; report samples/s")
    line = json.dumps({"throughput": number, **figures})
    print(line, flush=True)
    _append(line)


def report_failure(kind: str, reason: str) -> None:
    """Report why a trial has no result, for a script that handles its errors itself."""
    _append(json.dumps([kind, reason]))


def kind_of(error: BaseException) -> tuple[str, str]:
    """Return the outcome of a trial that ended by an exception, and a one-line reason."""
    if isinstance(error, Refused):
        return "refused", str(error)
    text = "".join(traceback.format_exception_only(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    memory = [line for line in lines if is_out_of_memory(line)]
    if memory or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "out_of_memory", (memory or lines)[0][:300]
    # Engines and launchers wrap an error of CUDA in their own.
    if error.__cause__ is not None and kind_of(error.__cause__)[0] == "out_of_memory":
        return kind_of(error.__cause__)
    is_schedule = isinstance(error, SlapoError) and not isinstance(error, MissingPackageError)
    return "wrong_schedule" if is_schedule else "crash", lines[0][:300]


def is_out_of_memory(line: str) -> bool:
    """Return whether an error message reports exhausted memory."""
    return any(text in line.lower() for text in _OUT_OF_MEMORY)


def finite_number(value: Any) -> float | None:
    """Return the value as a float, or None if it is not a finite number."""
    # True is a Real too, but no measurement.
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


class _Hook:
    """``sys.excepthook`` that first writes the error to the result file."""

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        # Ctrl-C says nothing about the point.
        if isinstance(error, Exception):
            report_failure(*kind_of(error))
        self._previous(kind, error, trace)


def _append(line: str) -> None:
    path = os.environ.get(RESULTS)
    with contextlib.suppress(OSError):
        if path:
            # Opened for each line: appended writes of several ranks do not overwrite one another.
            with open(path, "a") as file:
                file.write(line + "\n")
