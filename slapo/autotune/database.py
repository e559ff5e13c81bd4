"""The trials of a search as a program reads and adds them."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slapo.autotune.prediction import Prediction, saved_predictions
from slapo.autotune.space import TuneError, point_key
from slapo.autotune.study import (
    Trial,
    best_of,
    import_optuna,
    open_study,
    read_trial,
    report_of,
    state_of,
)
from slapo.autotune.trial import RUN, Outcome


class Database:
    """The trials of a search in a file.

    The file is SQLite with a study of optuna, which optuna's dashboard shows, too.

    Parameters
    ----------
    path
        The file; made if there is none.

    Raises
    ------
    TuneError
        If it is a file of another kind.
    MissingPackageError
        If optuna is not installed.

    Examples
    --------
    >>> import tempfile
    >>> db = Database(Path(tempfile.mkdtemp()) / "trials.db")
    >>> db.commit({"batch_size": 8}, 12.5)
    >>> db.commit({"batch_size": 16}, outcome="out_of_memory")
    >>> db.best.values, [trial.outcome for trial in db.trials]
    ({'batch_size': 8}, ['ok', 'out_of_memory'])
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._study = open_study(self.path)

    @property
    def trials(self) -> list[Trial]:
        """All that ended, in order."""
        found = map(read_trial, self._study.get_trials(deepcopy=False))
        return [trial for trial in found if trial is not None]

    @property
    def best(self) -> Trial | None:
        """The trial with the largest result; None if none has one."""
        return best_of(self.trials)

    @property
    def predictions(self) -> dict[str, Prediction]:
        """Key of a point (:func:`slapo.autotune.point_key`) -> what was predicted of it."""
        return saved_predictions(self.path)

    def get(self, values: Mapping[str, Any]) -> Trial | None:
        """The last trial of a point that was run."""
        key = point_key(values)
        same = [trial for trial in self.trials if trial.is_run and trial.key == key]
        return same[-1] if same else None

    def commit(
        self, values: Mapping[str, Any], result: float | None = None, outcome: str = ""
    ) -> None:
        """Add a trial that was run elsewhere.

        Parameters
        ----------
        values
            Of the point.
        result
            What it measured.
        outcome
            What became of it, where there is no result.
        """
        kind = outcome or ("no_result" if result is None else "ok")
        if kind not in RUN or (kind == "ok") != (result is not None):
            raise ValueError(
                f"outcome {outcome!r} with result {result!r}; give a result, or one of {RUN[1:]}"
            )
        optuna = import_optuna()
        report = report_of(Outcome(kind, None if result is None else float(result)), None, "")
        attributes = {"values": dict(values), "source": "import", "report": report}
        self._study.add_trial(
            optuna.trial.create_trial(
                state=state_of(kind), value=report["result"], user_attrs=attributes
            )
        )

    def import_json(self, path: str | Path) -> int:
        """Take over a JSON database: an object of texts that name points, and their results.

        Names and values of a point are read from ``name-value``, ``name:value`` or ``name=value``,
        or from JSON; a result is a number, or an object with ``throughput``.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        int
            How many were taken; points that are there already are left.
        """
        try:
            held = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise TuneError(f"{path} cannot be read as JSON: {error}; name another file") from None
        if not isinstance(held, dict):
            raise TuneError(f"{path} holds a {type(held).__name__}, not an object of results")
        known = {trial.key for trial in self.trials if trial.is_run}
        count = 0
        for key, entry in held.items():
            values, result = _old_values(key, entry), _old_result(entry)
            if values and point_key(values) not in known:
                failure = "out_of_memory" if _old_code(entry) == 1 else "crash"
                self.commit(values, result, "" if result is not None else failure)
                known.add(point_key(values))
                count += 1
        return count


def _old_values(key: str, entry: Any) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(key)
        if isinstance(found, dict):
            return found
    pairs = re.findall(r"([A-Za-z_]\w*)['\"]?\s*[-:=]\s*(-?[\d.]+(?:e-?\d+)?)", key)
    return {name: json.loads(number.rstrip(".")) for name, number in pairs}


def _old_result(entry: Any) -> float | None:
    if isinstance(entry, Mapping):
        entry = next((entry[n] for n in ("throughput", "samples_per_sec") if n in entry), None)
    elif isinstance(entry, list):  # an error code and the speed
        entry = entry[-1] if entry and not entry[0] else None
    is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
    return float(entry) if is_number and math.isfinite(entry) and entry > 0 else None


def _old_code(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return entry.get("error_code")
    return entry[0] if isinstance(entry, list) and entry else None
