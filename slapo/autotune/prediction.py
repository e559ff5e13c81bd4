"""Predictions of points, asked once for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from slapo.autotune.space import Point, Refused, TuneError, configured, source_of
from slapo.autotune.values import finite_number
from slapo.errors import SlapoError

if TYPE_CHECKING:
    import optuna

#: Seconds after which new predictions are written.
_PAUSE = 5.0


@dataclass(frozen=True)
class Prediction:
    """Bytes that the fullest device needs and has, samples per second, and why a point is refused.

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


class Predictor:
    """The function ``predict`` of a user; its answers are kept in the study."""

    def __init__(self, predict: Callable[[dict[str, Any]], Any], study: optuna.Study) -> None:
        self._predict, self._study = predict, study
        self._source = source_of(predict)
        held = study.user_attrs.get("predictions", {})
        # Without its source, a changed function looks like this one.
        same = self._source and held.get("source") == self._source
        self._known = saved_predictions(study) if same else {}
        self._saved, self._is_new = time.monotonic(), False

    def __call__(self, point: Point) -> Prediction:
        """The prediction of a point."""
        if point.key not in self._known:
            self._known[point.key] = self._ask(point.values)
            self._is_new = True
            if time.monotonic() - self._saved > _PAUSE:
                self.save()
        return self._known[point.key]

    def get(self, point: Point) -> Prediction | None:
        """The prediction of a point that was asked for."""
        return self._known.get(point.key)

    def save(self) -> None:
        """Write new predictions to the study."""
        if self._is_new:
            points = {key: asdict(found) for key, found in self._known.items()}
            self._study.set_user_attr("predictions", {"source": self._source, "points": points})
        self._saved, self._is_new = time.monotonic(), False

    def _ask(self, values: dict[str, Any]) -> Prediction:
        with configured(f"predict({values})"):
            try:
                found = self._predict(dict(values))
            except Refused as reason:
                return Prediction(fits=False, refused=str(reason) or "refused")
            except (SlapoError, ValueError) as error:  # raised by recipes and the dry run
                return Prediction(fits=False, refused=f"{type(error).__name__}: {error}")
        if found is None:
            return Prediction(fits=False, refused="the prediction is None")
        return _read(found, values)


def saved_predictions(study: optuna.Study) -> dict[str, Prediction]:
    """Key of a point -> its prediction in a study."""
    held = study.user_attrs.get("predictions", {"points": {}})
    return {key: Prediction(**figures) for key, figures in held["points"].items()}


def _read(found: Any, values: dict[str, Any]) -> Prediction:
    """A prediction from keys or attributes; `fits` overrules `capacity`."""
    memory, throughput = (_number(found, name, values) for name in ("memory", "throughput"))
    fits, capacity = _get(found, "fits"), None
    if fits is None or _get(found, "capacity") is not None:
        capacity = _number(found, "capacity", values)
    if fits is None:
        fits = capacity is not None and memory <= capacity
    return Prediction(memory, capacity, throughput, bool(fits))


def _get(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)


def _number(found: Any, name: str, values: dict[str, Any]) -> float:
    value = _get(found, name)
    if value is None:
        raise TuneError(
            f"predict({values}) returned {str(found)[:200]}, which has no {name!r}; give "
            "'memory' and 'capacity' in bytes and 'throughput' in samples/s, as keys or attributes"
        )
    number = finite_number(value.item() if hasattr(value, "item") else value)
    if number is None or number < 0:
        raise TuneError(f"predict({values}) gave {name}={value!r}; give a finite number from 0 on")
    return number
