"""The database: one SQLite file with a study of optuna, which finished trials survive in."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from slapo.autotune.prediction import Prediction
from slapo.autotune.space import TuneError, point_key
from slapo.autotune.trial import NOT_RUN, RUN, Outcome
from slapo.errors import MissingPackageError

if TYPE_CHECKING:
    import optuna

#: The name of the study in the file.
NAME = "slapo"


@dataclass(frozen=True)
class Trial:
    """A trial that ended.

    Attributes
    ----------
    number
        Of the trial in the study.
    values
        Those of the point.
    choices
        Name -> value of what the space asked for.
    outcome
        ``"ok"``, ``"out_of_memory"``, ``"crash"``, ``"timeout"``, ``"wrong_schedule"``,
        ``"no_result"``, ``"garbage"``, ``"refused"``; or, of a point that was not run,
        ``"does_not_fit"`` by its prediction, ``"skipped"`` by the rule of errors; or
        ``"cut_off"`` with the tuner.
    result
        What it measured; None unless it is ok.
    reason
        A line that says more.
    predicted
        What was predicted of it; None without a prediction.
    seconds
        How long it ran.
    log
        The file with what it printed.
    figures
        What else it reported.
    parameters
        Its parameters in the study.
    source
        Where the point came from: ``"prediction"``, ``"retry"``, ``"sampler"``, ...
    started
        Whether it was run, which may end in ``"refused"``, too.
    """

    number: int
    values: dict[str, Any]
    outcome: str
    result: float | None = None
    choices: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    predicted: Prediction | None = None
    seconds: float = 0.0
    log: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    started: bool = False

    @property
    def is_run(self) -> bool:
        """Whether it was run to its end."""
        return self.outcome in RUN or (self.started and self.outcome == "refused")

    @property
    def is_failure(self) -> bool:
        """Whether it was run and should have given a result."""
        return self.outcome in RUN[1:]

    @property
    def key(self) -> str:
        """The same text for equal points."""
        return point_key(self.values)


def import_optuna() -> Any:
    """The package optuna.

    Raises
    ------
    MissingPackageError
        If it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingPackageError(
            "the tuner needs optuna; install it by: pip install 'slapo[tune]'"
        ) from None
    return optuna


def open_study(db: Path | None, sampler: Any = None) -> optuna.Study:
    """The study of a file, new if there is none; without a file, one in memory.

    Raises
    ------
    TuneError
        If the file is no database of the tuner.
    """
    optuna = import_optuna()
    if db is None:
        return _quiet(lambda: optuna.create_study(sampler=sampler, direction="maximize"))
    _check_file(db)
    path = db.resolve()
    try:
        return _quiet(
            lambda: optuna.create_study(
                # A path may have characters that mean something else in a URL.
                storage=optuna.storages.RDBStorage(
                    f"sqlite:///{NAME}.db", engine_kwargs={"creator": lambda: _connect(path)}
                ),
                study_name=NAME,
                sampler=sampler,
                direction="maximize",
                load_if_exists=True,
            )
        )
    except Exception as error:
        raise TuneError(
            f"{db} cannot be opened as a database: {str(error).splitlines()[0]}; name another "
            "file, or one that a search has written"
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=60, check_same_thread=False)


def _quiet(make: Any) -> Any:
    """Call a function that optuna would report about."""
    optuna = import_optuna()
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return make()
    finally:
        optuna.logging.set_verbosity(before)


def _check_file(db: Path) -> None:
    if db.is_dir() or not db.absolute().parent.is_dir():
        what = "is a directory" if db.is_dir() else "lies in a directory that does not exist"
        raise TuneError(f"the database {db} {what}; name a file, such as trials.db")
    head = b""
    try:
        if db.exists():
            with db.open("rb") as file:
                head = file.read(16)
    except OSError as error:
        raise TuneError(f"{db} cannot be read: {error.strerror}; name another file") from None
    if head.lstrip()[:1] == b"{":
        raise TuneError(
            f"{db} is a JSON database of the published package; name a new file, and take over "
            f'what it holds by slapo.autotune.Database("trials.db").import_json("{db}")'
        )
    if head and not head.startswith(b"SQLite format 3"):
        raise TuneError(f"{db} is no database; name another file, or one a search has written")
    tables = _tables(db) if head else set()
    # Of a search that was killed while it made its tables, some may be missing.
    if tables and not tables & {"studies", "version_info", "alembic_version"}:
        raise TuneError(
            f"{db} is a database of another program, with {', '.join(sorted(tables)[:3])}; name "
            "another file, or one a search has written"
        )


def _tables(db: Path) -> set[str]:
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_connect(db)) as base:
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        return {name for (name,) in base.execute(query)}
    return set()


@contextlib.contextmanager
def locked(db: Path | None) -> Iterator[None]:
    """Hold the file against a second search; the system lets go when the process ends.

    Raises
    ------
    TuneError
        If another process holds it.
    """
    if db is None or sys.platform == "win32":
        yield
        return
    import fcntl

    _check_file(db)
    path = db.resolve()  # one lock, whatever links lead to the file
    try:
        file: IO[bytes] = path.with_name(path.name + ".lock").open("ab")
    except OSError as error:
        raise TuneError(
            f"the folder of the database {db} cannot be written: {error.strerror}; name a file in "
            "another folder"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TuneError(
                f"another search is using {db}; wait for it, end it, or name another database"
            ) from None
        yield


def read_trial(frozen: Any) -> Trial | None:
    """A trial from the study's; None of one that only repeats another, or is waiting."""
    attributes = frozen.user_attrs
    if "same_as" in attributes or frozen.state.name == "WAITING" or "values" not in attributes:
        return None
    report = {**attributes.get("report", {})}
    predicted = report.pop("predicted", None)
    return Trial(
        frozen.number,
        dict(attributes["values"]),
        # Without a report the tuner was killed before it could write one.
        report.pop("outcome", "cut_off"),
        choices=dict(attributes.get("choices", attributes["values"])),
        predicted=Prediction(**predicted) if predicted else None,
        parameters=frozen.params,
        source=attributes.get("source", "sampler"),
        **report,
    )


def report_of(
    outcome: Outcome, predicted: Prediction | None = None, log: str = "", started: bool = False
) -> dict[str, Any]:
    """What the study keeps of a trial that ended, to be written at once."""
    found: dict[str, Any] = {
        "outcome": outcome.kind,
        "result": outcome.value,
        "reason": outcome.reason,
        "predicted": None if predicted is None else asdict(predicted),
        "seconds": round(outcome.seconds, 3),
        "log": log,
        "figures": outcome.figures,
        "started": started,
    }
    return {name: value for name, value in found.items() if value or name == "result"}


def close(study: optuna.Study, number: int) -> Any:
    """End a trial of the study that runs: by its report, or as one cut off without."""
    frozen = study.get_trials(deepcopy=False)[number]
    if frozen.state != import_optuna().trial.TrialState.RUNNING:
        return frozen
    report = frozen.user_attrs.get("report", {"outcome": "cut_off"})
    study.tell(number, report.get("result"), state=state_of(report["outcome"]))
    return study.get_trials(deepcopy=False)[number]


def state_of(kind: str) -> Any:
    """How the study holds an outcome: its sampler keeps away from what was pruned."""
    states = import_optuna().trial.TrialState
    if kind == "ok":
        return states.COMPLETE
    return states.PRUNED if kind in ("out_of_memory", "timeout", *NOT_RUN) else states.FAIL


def best_of(trials: list[Trial]) -> Trial | None:
    """The one with the largest result."""
    measured = [trial for trial in trials if trial.result is not None]
    return max(measured, key=lambda trial: trial.result or 0.0, default=None)


def check_search(study: optuna.Study, db: Path | None, mine: Mapping[str, Any]) -> None:
    """Refuse a database that holds another search; write into a new one which it holds.

    Parameters
    ----------
    study
        The study of the database.
    db
        Its file, for the message.
    mine
        ``space``, ``metric`` and ``command`` of this search, and ``questions`` to show how spaces
        differ.
    """
    held = study.user_attrs
    for what in ("space", "metric", "command"):
        if what in held and held[what] != mine[what]:
            old, new = held[what], mine[what]
            if what == "space":
                old, new = _differing(held["questions"], mine["questions"])
            raise TuneError(
                f"{db} holds a search with another {what}: there {old}; here {new}. Name another "
                "database for this one"
            )
    for name, value in mine.items():
        if name not in held:
            study.set_user_attr(name, value)


def _differing(old: list[str], new: list[str]) -> tuple[str, str]:
    """What one list has and the other lacks, in short."""
    only_old, only_new = sorted(set(old) - set(new)), sorted(set(new) - set(old))
    return ", ".join(only_old[:3]) or "nothing else", ", ".join(only_new[:3]) or "nothing else"
