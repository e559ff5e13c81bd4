"""Trials and predictions of a search: an optuna study in one SQLite file."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo.autotune.space import Point, Refused, TuneError, configured, point_key, source_of
from slapo.autotune.trial import NOT_RUN, RUN, Prediction, Trial
from slapo.autotune.values import finite_number
from slapo.errors import SlapoError, import_package

if TYPE_CHECKING:
    import optuna

#: Name of the study in the file.
_NAME = "slapo"


class Database:
    """The trials of a search in a file.

    The file is SQLite with an optuna study, so that optuna's dashboard shows it too.

    Parameters
    ----------
    path
        Path of the file, created if it does not exist.

    Raises
    ------
    TuneError
        If the file is not such a database.
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
        """All finished trials, in order."""
        found = map(read_trial, self._study.get_trials(deepcopy=False))
        return [trial for trial in found if trial is not None]

    @property
    def best(self) -> Trial | None:
        """The trial with the largest result; None if there is none."""
        return best_of(self.trials)

    @property
    def predictions(self) -> dict[str, Prediction]:
        """Key of a point (:func:`slapo.autotune.point_key`) -> its prediction."""
        return saved_predictions(self._study)

    def get(self, values: Mapping[str, Any]) -> Trial | None:
        """Return the last trial that ran a point, or None."""
        key = point_key(values)
        same = [trial for trial in self.trials if trial.is_run and trial.key == key]
        return same[-1] if same else None

    def commit(
        self, values: Mapping[str, Any], result: float | None = None, outcome: str = ""
    ) -> None:
        """Add a trial that ran elsewhere.

        Parameters
        ----------
        values
            Values of the point.
        result
            Measured figure.
        outcome
            Outcome of a trial without a result, such as ``"out_of_memory"``.
        """
        kind = outcome or ("no_result" if result is None else "ok")
        if kind not in RUN or (kind == "ok") != (result is not None):
            raise ValueError(
                f"outcome {outcome!r} with result {result!r}; give a result, or one of {RUN[1:]}"
            )
        number = finite_number(result)
        if result is not None and number is None:
            raise ValueError(f"the result is {result!r}, which cannot be compared; give a number")
        attributes = {"trial": asdict(Trial(0, dict(values), kind, number, source="import"))}
        self._study.add_trial(
            import_optuna().trial.create_trial(
                state=state_of(kind), value=number, user_attrs=attributes
            )
        )


# --- the study -----------------------------------------------------------------------------------
def import_optuna() -> Any:
    """Import optuna, or raise a clear error."""
    return import_package("optuna", "the tuner", "tune")


def open_study(db: Path | None) -> optuna.Study:
    """Open or create the study of a file; in memory without a file."""
    optuna = import_optuna()
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        if db is None:
            return optuna.create_study(direction="maximize")
        path = db.resolve()
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{_NAME}.db",  # a path may have characters with a meaning in a URL
            # Other threads of SQLAlchemy's pool use the connection too; a dashboard may hold the
            # file for a while.
            engine_kwargs={
                "creator": lambda: sqlite3.connect(path, timeout=60, check_same_thread=False)
            },
        )
        return optuna.create_study(
            storage=storage, study_name=_NAME, direction="maximize", load_if_exists=True
        )
    except Exception as error:
        raise TuneError(
            f"{db} cannot be used as a database: {str(error).splitlines()[0]}; name a new file, or "
            "one that a search wrote"
        ) from error
    finally:
        optuna.logging.set_verbosity(before)


@contextlib.contextmanager
def locked(db: Path | None) -> Iterator[None]:
    """Lock a database against a second search; the system unlocks it when the process ends."""
    if db is None or sys.platform == "win32":
        yield
        return
    import fcntl

    # A file of its own, since SQLite locks and unlocks the database in each transaction.
    path = db.resolve()  # one lock for all links to the file
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.with_name(path.name + ".lock").open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TuneError(
                f"another search is using {db}; wait for it, end it, or name another database"
            ) from None
        except OSError as error:
            raise TuneError(
                f"{db} cannot be written: {error.strerror}; name a file in a writable folder"
            ) from None
        yield


def read_trial(frozen: Any) -> Trial | None:
    """Read a trial of the study; None for a repetition, or one without a point yet."""
    held = frozen.user_attrs
    if "trial" in held:
        predicted = held["trial"]["predicted"]
        prediction = Prediction(**predicted) if predicted else None
        return Trial(**{**held["trial"], "number": frozen.number, "predicted": prediction})
    if "point" in held:  # the tuner was killed before the trial ended
        source = held.get("source", "sampler")
        return Trial(
            frozen.number,
            outcome="cut_off",
            parameters=frozen.params,
            source=source,
            **held["point"],
        )
    return None


def finish(study: optuna.Study, number: int, trial: Trial | None) -> None:
    """End a running trial of the study; without a `Trial` it was cut off."""
    # tell() raises for a trial that has ended already.
    if study.get_trials(deepcopy=False)[number].state == import_optuna().trial.TrialState.RUNNING:
        state = state_of("cut_off" if trial is None else trial.outcome)
        study.tell(number, None if trial is None else trial.result, state=state)


def state_of(kind: str) -> Any:
    """Return the state of an outcome in the study; the sampler avoids pruned points."""
    states = import_optuna().trial.TrialState
    if kind == "ok":
        return states.COMPLETE
    # TPE models pruned points as bad ones and ignores failed trials: a crash may have another cause
    # than the values.
    return states.PRUNED if kind in ("out_of_memory", "timeout", *NOT_RUN) else states.FAIL


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the largest result."""
    measured = [trial for trial in trials if trial.result is not None]
    return max(measured, key=lambda trial: trial.result or 0.0, default=None)


def check_search(study: optuna.Study, db: Path | None, mine: Mapping[str, Any]) -> None:
    """Refuse a database of another search; record this search in a new one."""
    held = study.user_attrs
    for what, new in mine.items():
        old = held.get(what, new)
        if old != new and what == "space":
            old, new = (
                ", ".join(sorted(set(one) - set(other))[:3]) or "nothing else"
                for one, other in ((old, new), (new, old))
            )
        if old != new:
            raise TuneError(
                f"{db} holds a search with another {what}: {old} there, {new} here; name another "
                "database for this one"
            )
        if what not in held:
            study.set_user_attr(what, new)


# --- predictions ---------------------------------------------------------------------------------
class Predictor:
    """A user's function ``predict``, called once for each point of a study."""

    def __init__(self, predict: Callable[[dict[str, Any]], Any], study: optuna.Study) -> None:
        self._predict, self._study = predict, study
        self._source = source_of(predict)
        held = study.user_attrs.get("predictions", {})
        # Without its source, a changed function looks like this one.
        same = self._source and held.get("source") == self._source
        self._known = saved_predictions(study) if same else {}
        self._is_new = False

    def __call__(self, point: Point) -> Prediction:
        if point.key not in self._known:
            self._known[point.key] = self._ask(point.values)
            self._is_new = True
        return self._known[point.key]

    def get(self, point: Point) -> Prediction | None:
        """Return the known prediction of a point, or None."""
        return self._known.get(point.key)

    def save(self) -> None:
        """Write new predictions to the study."""
        if self._is_new:
            points = {key: asdict(found) for key, found in self._known.items()}
            self._study.set_user_attr("predictions", {"source": self._source, "points": points})
            self._is_new = False

    def _ask(self, values: dict[str, Any]) -> Prediction:
        with configured(f"predict({values})"):
            try:
                found = self._predict(dict(values))
            except Refused as reason:
                return Prediction(fits=False, refused=str(reason) or "refused")
            except (SlapoError, ValueError) as error:  # from recipes and the dry run
                return Prediction(fits=False, refused=f"{type(error).__name__}: {error}")
        if found is None:
            return Prediction(fits=False, refused="the prediction is None")
        return _read(found, values)


def saved_predictions(study: optuna.Study) -> dict[str, Prediction]:
    """Return key of a point -> its prediction in a study."""
    held = study.user_attrs.get("predictions", {"points": {}})
    return {key: Prediction(**figures) for key, figures in held["points"].items()}


def _read(found: Any, values: dict[str, Any]) -> Prediction:
    """Read a prediction from keys or attributes; `fits` overrides `capacity`."""
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
        raise TuneError(
            f"predict({values}) gave {name}={value!r}; return a finite number, 0 or more"
        )
    return number
