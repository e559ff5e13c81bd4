"""What a dry run says of a point, and the memory for it."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slapo.autotune.space import Point, Refused, TuneError, configured
from slapo.errors import SlapoError

_MISSING = object()


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a point.

    Attributes
    ----------
    memory, capacity
        Bytes that the fullest device needs, and bytes that it has.
    throughput
        Samples per second.
    fits
        Whether it fits the device.
    refused
        Why nothing can run it; empty if something can.
    """

    memory: float = 0.0
    capacity: float | None = None
    throughput: float = 0.0
    fits: bool = True
    refused: str = ""

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        of = "" if self.capacity is None else f" of {self.capacity / 2**30:.2f}"
        return f"{self.memory / 2**30:.2f}{of} GiB, {self.throughput:.4g} samples/s"


def read_prediction(found: Any, values: Mapping[str, Any]) -> Prediction:
    """A prediction from what a user's function returned: a mapping, or an object.

    Parameters
    ----------
    found
        Has ``memory``, ``throughput``, and ``capacity`` or ``fits``.
    values
        The point, for the message.

    Raises
    ------
    TuneError
        If a figure is missing or is no number.

    Examples
    --------
    >>> read_prediction({"memory": 3.0, "capacity": 2.0, "throughput": 5.0}, {}).fits
    False
    """
    memory = _number(found, "memory", values)
    throughput = _number(found, "throughput", values)
    fits, capacity = _get(found, "fits"), None
    if _get(found, "capacity") not in (_MISSING, None) or fits in (_MISSING, None):
        capacity = _number(found, "capacity", values)
    if fits in (_MISSING, None):
        fits = capacity is not None and memory <= capacity
    return Prediction(memory, capacity, throughput, bool(fits))


def _get(found: Any, name: str) -> Any:
    if isinstance(found, Mapping):
        return found.get(name, _MISSING)
    return getattr(found, name, _MISSING)


def _number(found: Any, name: str, values: Mapping[str, Any]) -> float:
    value = _get(found, name)
    if value is _MISSING:
        raise TuneError(
            f"predict({dict(values)}) returned {str(found)[:200]}, which has no {name!r}; give "
            "'memory' and 'capacity' in bytes and 'throughput' in samples/s, as keys or attributes"
        )
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        if math.isfinite(number) and number >= 0 and not isinstance(value, (str, bool)):
            return number
    raise TuneError(
        f"predict({dict(values)}) gave {name}={value!r}; give a finite number from 0 on"
    )


class Predictor:
    """A user's function ``predict``, asked once for each point.

    Parameters
    ----------
    predict
        Values -> figures, or None or :class:`Refused` for what nothing can run.
    db
        Where answers are kept, in a table of their own beside the study; None: in memory alone.
    """

    def __init__(self, predict: Callable[[dict[str, Any]], Any], db: Path | None = None) -> None:
        self._predict = predict
        self._known: dict[str, Prediction] = {}
        self._rows: list[tuple[str, str, str]] = []
        self._db = db
        self._source = source_of(predict)
        if db is not None:
            self._load(db)

    def __call__(self, point: Point) -> Prediction:
        """The prediction of a point.

        Raises
        ------
        TuneError
            If the function fails, or what it returns lacks a figure.
        """
        key = point.key
        if key not in self._known:
            self._known[key] = self._ask(point.values)
            self._rows.append((key, self._source, json.dumps(asdict(self._known[key]))))
            if len(self._rows) >= 50:
                self.save()
        return self._known[key]

    def _ask(self, values: dict[str, Any]) -> Prediction:
        with configured(f"predict({values})"):
            try:
                found = self._predict(dict(values))
            except Refused as reason:
                return Prediction(fits=False, refused=str(reason) or "refused")
            except (SlapoError, ValueError) as error:  # what recipes and the dry run refuse with
                return Prediction(fits=False, refused=f"{type(error).__name__}: {error}")
        if found is None:
            return Prediction(fits=False, refused="the prediction is None")
        return read_prediction(found, values)

    def save(self) -> None:
        """Write what is not written yet."""
        if self._db is not None and self._rows:
            with contextlib.closing(sqlite3.connect(self._db, timeout=60)) as base, base:
                base.executemany("INSERT OR REPLACE INTO predictions VALUES (?, ?, ?)", self._rows)
        self._rows.clear()

    def _load(self, db: Path) -> None:
        with contextlib.closing(sqlite3.connect(db, timeout=60)) as base, base:
            base.execute(
                "CREATE TABLE IF NOT EXISTS predictions "
                "(point TEXT, source TEXT, figures TEXT, PRIMARY KEY (point, source))"
            )
            if not self._source:  # whose, nobody knows
                base.execute("DELETE FROM predictions WHERE source = ''")
            query = "SELECT point, figures FROM predictions WHERE source = ?"
            for key, figures in base.execute(query, (self._source,)):
                self._known[key] = Prediction(**json.loads(figures))


def saved_predictions(db: Path) -> dict[str, Prediction]:
    """Key of a point -> its last prediction that a database holds."""
    with contextlib.closing(sqlite3.connect(db, timeout=60)) as base:
        has = "SELECT 1 FROM sqlite_master WHERE name = 'predictions'"
        if base.execute(has).fetchone() is None:
            return {}
        rows = base.execute("SELECT point, figures FROM predictions ORDER BY rowid").fetchall()
    return {key: Prediction(**json.loads(figures)) for key, figures in rows}


def source_of(function: Callable[..., Any]) -> str:
    """Tells functions apart, so that an edited one is known as another; empty if nothing does.

    What is no plain function, such as a method or a partial, has a state that no text shows.
    """
    if inspect.isfunction(function):
        with contextlib.suppress(OSError, TypeError):
            return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    return ""
