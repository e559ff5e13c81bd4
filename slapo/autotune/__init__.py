"""Tuner: search for the schedule, layout and batch that train a model fastest.

Use ``slapo tune --config space.py --db trials.db train.py ARGUMENTS`` on the command line, or
:func:`tune` in a program. Needs the extra ``tune``.
"""

from slapo.autotune.database import Database
from slapo.autotune.report import Result
from slapo.autotune.search import tune
from slapo.autotune.space import Choices, Refused, TuneError, point_key
from slapo.autotune.symbols import Space, Symbol
from slapo.autotune.trial import Trial
from slapo.autotune.values import report_result, trial_values

__all__ = [
    "Choices",
    "Database",
    "Refused",
    "Result",
    "Space",
    "Symbol",
    "Trial",
    "TuneError",
    "point_key",
    "report_result",
    "trial_values",
    "tune",
]
