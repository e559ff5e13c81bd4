"""The trials of a search as a program reads and adds them."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slapo.autotune.prediction import Prediction, saved_predictions
from slapo.autotune.space import TuneError, check_json, point_key
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
from slapo.autotune.values import finite_number


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
        number = finite_number(result)
        if result is not None and number is None:
            raise ValueError(f"the result is {result!r}, which cannot be compared; give a number")
        check_json(f"the values of a trial are {str(dict(values))[:200]}", dict(values))
        optuna = import_optuna()
        report = report_of(Outcome(kind, number))
        attributes = {"values": dict(values), "source": "import", "report": report}
        self._study.add_trial(
            optuna.trial.create_trial(
                state=state_of(kind), value=report["result"], user_attrs=attributes
            )
        )

    def import_json(self, path: str | Path) -> int:
        """Take over a JSON database: an object of texts that name points, and their results.

        Names and values of a point are read from ``name-value``, ``name:value`` or ``name=value``,
        or from JSON; a result is a number, or an object with ``throughput``. A name without any
        value is no point, and left.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        int
            How many were taken; points that are there already are left.

        Raises
        ------
        TuneError
            If the file, or the name of a point in it, cannot be read; then nothing is taken.
        """
        try:
            held = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise TuneError(f"{path} cannot be read as JSON: {error}; name another file") from None
        if not isinstance(held, dict):
            raise TuneError(f"{path} holds a {type(held).__name__}, not an object of results")
        known = {trial.key for trial in self.trials if trial.is_run}
        new: dict[str, tuple[dict[str, Any], Any]] = {}
        for key, entry in held.items():
            values = _old_values(key, path)
            if values and point_key(values) not in known:
                new.setdefault(point_key(values), (values, entry))
        for values, entry in new.values():
            result = _old_result(entry)
            failure = "out_of_memory" if _old_code(entry) == 1 else "crash"
            self.commit(values, result, "" if result is not None else failure)
        return len(new)


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
#: A name and its value: a number, which may have the sign of the next pair in it, or a text.
_PAIR = re.compile(
    rf"\s*([A-Za-z_]\w*)\s*[-:=]\s*({_NUMBER}(?=[-,;\s]|$)|[^-,;:=\s'\"]+)(?:\s*[-,;]|\s+|$)"
)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def _old_values(key: str, path: object) -> dict[str, Any]:
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(key)
            if isinstance(found, dict):
                return found
    if not re.search(r"[-:=]", key):
        return {}
    values, at = {}, 0
    while at < len(key):
        pair = _PAIR.match(key, at)
        if pair is None or pair[1] in values:
            raise TuneError(
                f"{path} names a point {key!r}, of which {key[at:]!r} cannot be read; write "
                "name-value, name:value or name=value for each of its values, or JSON"
            )
        at = pair.end()
        values[pair[1]] = _old_value(pair[2])
    return values


def _old_value(text: str) -> Any:
    if re.fullmatch(_NUMBER, text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return _WORDS.get(text, text)


def _old_result(entry: Any) -> float | None:
    if isinstance(entry, Mapping):
        entry = next((entry[n] for n in ("throughput", "samples_per_sec") if n in entry), None)
    elif isinstance(entry, list):  # an error code and the speed
        entry = entry[-1] if entry and not entry[0] else None
    number = finite_number(entry)
    return number if number is not None and number > 0 else None


def _old_code(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return entry.get("error_code")
    return entry[0] if isinstance(entry, list) and entry else None
