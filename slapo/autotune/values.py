"""What the script of a trial calls."""

from __future__ import annotations

import contextlib
import json
import math
import os
from numbers import Real
from typing import Any

#: The variable of the environment that holds the values of a trial.
VARIABLE = "SLAPO_TRIAL"


def finite_number(value: Any) -> float | None:
    """A number that can be compared, as a float; None of anything else.

    Examples
    --------
    >>> finite_number(3), finite_number(True), finite_number(float("nan")), finite_number(10**400)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def trial_values(**defaults: Any) -> dict[str, Any]:
    """The values of the trial that this process runs.

    Parameters
    ----------
    **defaults
        Values of names that the trial does not give: all of them outside of a search.

    Returns
    -------
    dict
        Name -> value.

    Raises
    ------
    ValueError
        If the environment's ``SLAPO_TRIAL`` is no JSON object.

    Examples
    --------
    >>> trial_values(micro_batch=4, checkpoint=0.5)
    {'micro_batch': 4, 'checkpoint': 0.5}
    """
    text = os.environ.get(VARIABLE, "{}")
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"{VARIABLE}={text!r} is no JSON object; unset it, or write one")
    return {**defaults, **given}


def report_result(throughput: float, **figures: Any) -> None:
    """Print what a trial measured, as the line of JSON that the tuner looks for.

    Call it at the end, on one rank.

    Parameters
    ----------
    throughput
        Samples per second: more is better.
    **figures
        Others to be kept with it.

    Raises
    ------
    ValueError
        If the throughput is no number that a search can compare.

    Examples
    --------
    >>> report_result(12.5, memory=3 * 2**30)
    {"throughput": 12.5, "memory": 3221225472}
    """
    number = float(throughput)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"a throughput of {throughput!r} cannot be compared; report samples/s")
    print(json.dumps({"throughput": number, **figures}), flush=True)
