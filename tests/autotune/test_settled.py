"""Which points a search runs, whatever its database holds of earlier starts and of elsewhere."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from slapo.autotune import Database, Refused, Trial, TuneError, tune
from slapo.autotune.report import summary
from slapo.autotune.space import Choices

pytest.importorskip("optuna")


def sizes(choose: Choices) -> dict[str, Any]:
    return {"bs": choose("bs", range(1, 7))}


class Runs:
    """A trial whose result is the batch size; it raises what is given for it."""

    def __init__(self, errors: dict[int, Exception] | None = None) -> None:
        self.errors = errors or {}
        self.points: list[int] = []

    def __call__(self, point: dict[str, Any]) -> float:
        self.points.append(point["bs"])
        if point["bs"] in self.errors:
            raise self.errors[point["bs"]]
        return float(point["bs"])


def last(trials: list[Trial]) -> dict[int, str]:
    return {trial.values["bs"]: trial.outcome for trial in trials}


def test_a_constraint_that_is_loosened(tmp_path: Path) -> None:
    run = Runs()
    tune(sizes, run=run, db=tmp_path / "db", constraint=lambda point: point["bs"] <= 3)
    assert sorted(run.points) == [1, 2, 3]
    found = tune(sizes, run=run, db=tmp_path / "db")
    assert sorted(run.points) == [1, 2, 3, 4, 5, 6]
    assert found.best is not None
    assert found.best.result == 6.0
    # And tightened: what it leaves out now is not the best.
    found = tune(sizes, run=run, db=tmp_path / "db", constraint=lambda point: point["bs"] <= 3)
    assert found.best is not None
    assert (found.best.result, found.foreign, len(run.points)) == (3.0, 3, 6)
    assert "3 trials of the database are of points of another space" in summary(found)


def test_a_prediction_that_changes(tmp_path: Path) -> None:
    def space(choose: Choices) -> dict[str, Any]:
        return {"bs": choose("bs", range(16))}

    def small(point: dict[str, Any]) -> dict[str, Any]:
        return {"memory": point["bs"], "capacity": 7, "throughput": 1}

    def large(point: dict[str, Any]) -> dict[str, Any]:
        return {"memory": point["bs"], "capacity": 30, "throughput": 1}

    run = Runs()
    for predict, trials in [(small, 7), (small, 8), (large, 16)]:
        found = tune(space, run=run, db=tmp_path / "db", predict=predict, trials=trials)
        assert len(run.points) == trials
        ruled_out = [t.values["bs"] for t in found.trials if t.outcome == "does_not_fit"]
        assert len(ruled_out) == len(set(ruled_out))


def test_predictions_without_a_text_of_their_own_are_asked_anew(tmp_path: Path) -> None:
    def predict(point: dict[str, Any], most: int) -> dict[str, Any]:
        return {"memory": point["bs"], "capacity": most, "throughput": 1}

    for most in (6, 3):
        partial = functools.partial(predict, most=most)
        found = tune(sizes, run=Runs(), db=tmp_path / "db", predict=partial, trials=1)
        assert found.does_not_fit == 6 - most
        assert Database(tmp_path / "db").predictions['{"bs": 4}'].fits == (most == 6)


@pytest.mark.parametrize("error_stop", ["none", "symbol"])
def test_what_was_skipped_runs_when_its_reason_is_gone(tmp_path: Path, error_stop: str) -> None:
    run = Runs(dict.fromkeys(range(1, 7), KeyError()))
    options: dict[str, Any] = {"run": run, "db": tmp_path / "db", "trials": 6}
    for _ in range(2):
        found = tune(sizes, **options, error_stop="symbol")
    assert "skipped" in last(found.trials).values()
    run.errors.clear()
    found = tune(sizes, **options, retry=True, error_stop=error_stop)
    assert last(found.trials) == dict.fromkeys(range(1, 7), "ok")
    assert summary(found).count("6 trials of 6 points: 6 ok") == 1


def test_trials_of_other_points_do_not_count(tmp_path: Path) -> None:
    db = Database(tmp_path / "db")
    for other in range(10):
        db.commit({"other": other}, 100.0 + other)
        db.commit({"lost": other}, outcome="crash")
    run = Runs()
    found = tune(sizes, run=run, db=tmp_path / "db", trials=6, retry=True)
    assert sorted(run.points) == [1, 2, 3, 4, 5, 6]
    assert found.best is not None
    assert (found.best.result, found.foreign) == (6.0, 20)
    assert {trial.source for trial in found.trials}.isdisjoint({"retry", "import"})


def test_the_rule_holds_for_trials_from_elsewhere(tmp_path: Path) -> None:
    def space(choose: Choices) -> dict[str, Any]:
        return {**sizes(choose), "dp": 8}  # not chosen, but a trial gets it

    Database(tmp_path / "db").commit({"bs": 2, "dp": 8}, outcome="out_of_memory")
    run = Runs()
    found = tune(space, run=run, db=tmp_path / "db", trials=6, error_stop="symbol")
    assert run.points == [1]
    assert set(last(found.trials).values()) == {"ok", "out_of_memory", "skipped"}


def test_the_rule_leaves_the_points_that_may_run() -> None:
    def space(choose: Choices) -> dict[str, Any]:
        return {"bs": choose("bs", range(1, 1001))}

    run = Runs(dict.fromkeys(range(5, 1001), MemoryError()))
    tune(space, run=run, trials=9, error_stop="symbol")
    assert len(run.points) == 9 or {1, 2, 3, 4} <= set(run.points)


def test_the_rule_is_about_names_of_the_space() -> None:
    with pytest.raises(TuneError, match=r"grows has 'bss': did you mean 'bs'"):
        tune(sizes, run=Runs(), error_stop="symbol", grows=["bss"])


def test_a_trial_that_refuses_was_run(tmp_path: Path) -> None:
    run = Runs(dict.fromkeys(range(1, 7), Refused("never")))
    found = tune(sizes, run=run, db=tmp_path / "db", trials=3, error_stop="all")
    assert len(run.points) == 3
    assert "3 trials of 6 points: 3 refused" in summary(found)
    tune(sizes, run=run, db=tmp_path / "db", trials=6)
    assert sorted(run.points) == [1, 2, 3, 4, 5, 6]


def test_seeds() -> None:
    with pytest.raises(TuneError, match="seed=-1: give a whole number"):
        tune(sizes, run=Runs(), seed=-1)
    assert tune(sizes, run=Runs(), seed=2**40, trials=1).best is not None
