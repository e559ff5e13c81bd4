"""The search: how soon it finds the best point, which points it runs, how it continues."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slapo.autotune import Database, Refused, Trial, TuneError, point_key, tune
from slapo.autotune.report import save_plot, summary
from slapo.autotune.space import Choices, survey
from slapo.errors import SlapoError
from tests.autotune import landscape

pytest.importorskip("optuna")


def grid(choose: Choices) -> dict[str, Any]:
    return {"a": choose("a", [1, 2, 3, 4]), "b": choose("b", [1, 2, 3])}


def sizes(choose: Choices) -> dict[str, Any]:
    return {"bs": choose("bs", range(1, 7))}


class Runs:
    """A trial that counts its points. The result is the product of the values.

    `errors` are raised for values of the first name.
    """

    def __init__(self, errors: dict[int, BaseException] | None = None) -> None:
        self.errors, self.points = errors or {}, list[str]()

    def __call__(self, point: dict[str, Any]) -> float:
        self.points.append(point_key(point))
        first, *rest = point.values()
        if first in self.errors:
            raise self.errors[first]
        return float(first * (rest[0] if rest else 1))

    @property
    def firsts(self) -> list[int]:
        return [next(iter(json.loads(point).values())) for point in self.points]


def every(values: Any, error: BaseException) -> dict[int, BaseException]:
    return dict.fromkeys(values, error)


def last(trials: list[Trial]) -> dict[int, str]:
    """Value of the first name -> outcome of its last trial."""
    return {next(iter(trial.values.values())): trial.outcome for trial in trials}


# --- how soon it finds ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def best() -> float:
    """The largest throughput of all layouts that fit."""
    points = [point.values for point in survey(landscape.layouts).points]
    assert len(points) == 1960
    return max(map(landscape.throughput, [p for p in points if landscape.memory(p) < 80 * 2**30]))


@pytest.mark.parametrize("seed", range(5))
def test_predictions_lead_to_the_best(seed: int, best: float) -> None:
    """Within 5 % of the best in a tenth of the points; here a fortieth does."""
    predict = landscape.noisy_prediction(seed)
    found = tune(landscape.layouts, run=landscape.measure, predict=predict, trials=49, seed=seed)
    assert found.size == 1960
    assert sum(trial.is_run for trial in found.trials) == 49
    assert found.best is not None
    assert (found.best.result or 0) >= 0.95 * best


def test_without_predictions(best: float) -> None:
    found = tune(landscape.layouts, run=landscape.measure, trials=60, seed=0)
    assert found.best is not None
    assert (found.best.result or 0) >= 0.8 * best


def test_equal_seeds_give_equal_searches() -> None:
    def searched(seed: int) -> list[Any]:
        return [
            t.values
            for t in tune(landscape.layouts, run=landscape.measure, trials=12, seed=seed).trials
        ]

    assert searched(2**40) == searched(2**40) != searched(1)


def test_spaces_too_large_to_enumerate() -> None:
    def space(choose: Choices) -> dict[str, Any] | None:
        values = {name: choose(name, range(9)) for name in "abcdef"}
        return values if sum(values.values()) % 7 else None

    def predict(point: dict[str, Any]) -> dict[str, float]:
        return {"memory": point["a"], "capacity": 7, "throughput": sum(point.values())}

    found = tune(space, run=lambda p: float(sum(p.values())), predict=predict, trials=12)
    assert found.size > 400_000
    assert found.best is not None
    assert (found.best.result or 0) > 35


def test_small_and_odd_spaces() -> None:
    found = tune(lambda choose: {"a": choose("a", [1])}, run=lambda point: 1.0)
    assert len(found.trials) == 1
    numbers = iter(range(10**6))

    def changes(choose: Choices) -> dict[str, Any]:
        choose("a", [1, 2, 3])
        return {"n": next(numbers) if next(numbers) < 10 else 0}

    assert tune(changes, run=lambda point: 1.0, trials=9).best is not None


# --- predictions ---------------------------------------------------------------------------------
def test_points_that_do_not_fit_do_not_run(tmp_path: Path) -> None:
    def predict(point: dict[str, Any]) -> Any:
        return SimpleNamespace(memory=point["a"], capacity=2, throughput=point["b"])

    run = Runs()
    found = tune(grid, run=run, db=tmp_path / "db", predict=predict, trials=12)
    assert run.points[:2] == [point_key({"a": 1, "b": 3}), point_key({"a": 2, "b": 3})]
    assert set(run.points) == {point_key({"a": a, "b": b}) for a in (1, 2) for b in (1, 2, 3)}
    assert found.does_not_fit == 6
    left_out = Database(tmp_path / "db").predictions[point_key({"a": 4, "b": 1})]
    assert (left_out.memory, left_out.capacity, left_out.fits) == (4, 2, False)
    for trial in found.trials:
        assert trial.predicted is not None
        assert trial.outcome == ("ok" if trial.values["a"] <= 2 else "does_not_fit")
    assert "6 points are predicted not to fit" in summary(found)


def test_predictions_are_asked_for_once(tmp_path: Path) -> None:
    asked = []

    def predict(point: dict[str, Any], most: int = 3) -> dict[str, Any]:
        asked.append(point_key(point))
        return {"memory": 1, "fits": point["a"] <= most, "throughput": 1.0}

    for trials in (2, 4):
        tune(grid, run=Runs(), db=tmp_path / "db", predict=predict, trials=trials)
    assert len(asked) == len(set(asked)) == 12
    for most in (3, 2):  # no source tells a partial from another
        partial = functools.partial(predict, most=most)
        found = tune(grid, run=Runs(), db=tmp_path / "db", predict=partial, trials=1)
        assert found.does_not_fit == 12 - 3 * most
        assert Database(tmp_path / "db").predictions['{"a": 3, "b": 1}'].fits == (most == 3)


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


def test_predictions_may_refuse() -> None:
    def predict(point: dict[str, Any]) -> dict[str, float] | None:
        if point["a"] == 1:
            raise Refused("no kernel")
        if point["a"] == 2:
            raise SlapoError("size 9 is not divisible")
        if point == {"a": 3, "b": 1}:
            raise ValueError("7 heads and 3 ranks")  # as recipes and the dry run do
        return None if point["a"] == 3 else {"memory": 1, "capacity": 2, "throughput": 1}

    run = Runs()
    found = tune(grid, run=run, predict=predict, trials=12)
    assert len(run.points) == 3
    assert found.refused == {
        "no kernel": 3,
        "SlapoError: size 9 is not divisible": 3,
        "ValueError: 7 heads and 3 ranks": 1,
        "the prediction is None": 2,
    }


def test_a_prediction_beyond_all_numbers() -> None:
    found = {"memory": 10**400, "capacity": 1, "throughput": 1}
    with pytest.raises(TuneError, match=r"memory=10.*; return a finite number"):
        tune(grid, run=lambda point: 1.0, predict=lambda point: found)


# --- failures ------------------------------------------------------------------------------------
def test_failures_do_not_end_the_search() -> None:
    run = Runs({2: MemoryError(), 3: KeyError("a")})
    found = tune(grid, run=lambda p: float("nan") if p["a"] == 4 else run(p), trials=12)
    assert last(found.trials) == {1: "ok", 2: "out_of_memory", 3: "crash", 4: "garbage"}
    assert len(found.trials) == 12


def test_the_first_error_ends_it_if_asked() -> None:
    run = Runs(every(range(5), KeyError("a")))
    found = tune(grid, run=run, trials=12, error_stop="all")
    assert len(run.points) == 1
    assert found.best is None
    assert "no trial gave a result" in summary(found)


def test_larger_values_are_skipped_after_an_error() -> None:
    run = Runs(every((3, 4), MemoryError()))
    found = tune(grid, run=run, trials=12, error_stop="symbol", grows=["a"])
    skipped = [trial for trial in found.trials if trial.outcome == "skipped"]
    assert len(run.points) + len(skipped) == 12
    failed = {(t.values["a"], t.values["b"]) for t in found.trials if t.outcome == "out_of_memory"}
    assert skipped
    for trial in skipped:
        assert trial.values["a"] == 4
        assert (3, trial.values["b"]) in failed
        assert "failed with a=3: out_of_memory" in trial.reason


@pytest.mark.parametrize("error_stop", ["none", "symbol"])
def test_a_skipped_point_runs_when_its_reason_is_gone(tmp_path: Path, error_stop: str) -> None:
    run = Runs(every(range(1, 7), KeyError()))
    options: dict[str, Any] = {"run": run, "db": tmp_path / "db", "trials": 6}
    for _ in range(2):
        found = tune(sizes, **options, error_stop="symbol")
    assert "skipped" in last(found.trials).values()
    run.errors.clear()
    found = tune(sizes, **options, retry=True, error_stop=error_stop)
    assert last(found.trials) == dict.fromkeys(range(1, 7), "ok")
    assert summary(found).count("6 trials of 6 points: 6 ok") == 1


def test_the_rule_holds_for_imported_trials(tmp_path: Path) -> None:
    def space(choose: Choices) -> dict[str, Any]:
        return {**sizes(choose), "dp": 8}  # not chosen, but a trial gets it

    Database(tmp_path / "db").commit({"bs": 2, "dp": 8}, outcome="out_of_memory")
    run = Runs()
    found = tune(space, run=run, db=tmp_path / "db", trials=6, error_stop="symbol")
    assert run.firsts == [1]
    assert set(last(found.trials).values()) == {"ok", "out_of_memory", "skipped"}


def test_the_rule_leaves_the_points_that_may_run() -> None:
    def space(choose: Choices) -> dict[str, Any]:
        return {"bs": choose("bs", range(1, 1001))}

    run = Runs(every(range(5, 1001), MemoryError()))
    tune(space, run=run, trials=9, error_stop="symbol")
    assert len(run.points) == 9 or {1, 2, 3, 4} <= set(run.firsts)


def test_a_trial_that_refuses_did_run(tmp_path: Path) -> None:
    run = Runs(every(range(1, 7), Refused("never")))
    found = tune(sizes, run=run, db=tmp_path / "db", trials=3, error_stop="all")
    assert len(run.points) == 3
    assert "3 trials of 6 points: 3 refused" in summary(found)
    tune(sizes, run=run, db=tmp_path / "db", trials=6)
    assert sorted(run.firsts) == [1, 2, 3, 4, 5, 6]


# --- going on ------------------------------------------------------------------------------------
def test_no_point_runs_twice(tmp_path: Path) -> None:
    run = Runs()
    found = tune(grid, run=run, db=tmp_path / "db", trials=5)
    assert len(run.points) == 5
    for _ in range(2):  # the second has nothing left to do
        found = tune(grid, run=run, db=tmp_path / "db", trials=50)
        assert len(run.points) == len(set(run.points)) == 12
    assert found.best is not None
    assert (found.best.values, found.best.result) == ({"a": 4, "b": 3}, 12.0)
    assert [trial.number for trial in found.trials] == sorted(t.number for t in found.trials)


def test_retry(tmp_path: Path) -> None:
    run = Runs({3: MemoryError(), 2: KeyError()})
    options: dict[str, Any] = {"run": run, "db": tmp_path / "db", "trials": 12}
    for _ in range(2):
        tune(grid, **options)
    assert len(run.points) == 12
    del run.errors[2]
    found = tune(grid, **options, retry=True)
    assert len(run.points) == 15
    assert last(found.trials) == {1: "ok", 2: "ok", 3: "out_of_memory", 4: "ok"}
    tune(grid, **options, retry=True)
    assert len(run.points) == 15


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    def stop(point: dict[str, Any]) -> float:
        run(point)
        if len(run.points) == 4:
            raise KeyboardInterrupt
        return 1.0

    run = Runs()
    with pytest.raises(KeyboardInterrupt):
        tune(grid, run=stop, db=tmp_path / "db", trials=8)
    assert [t.outcome for t in Database(tmp_path / "db").trials] == ["ok"] * 3 + ["cut_off"]
    tune(grid, run=stop, db=tmp_path / "db", trials=8)
    assert run.points[4] == run.points[3]
    assert len(run.points) == 9
    assert len(set(run.points)) == 8


#: Ten searches that are ended in the middle of a trial, and one that goes on to the end.
KILLED = """
import os, random, signal, time
from slapo.autotune import Database, tune
from tests.autotune.test_search import last
Database("db").trials  # imports what databases need
chance, kept, starts = random.Random(0), {}, []
for kill in range(11):
    seconds = chance.uniform(0, 0.1)  # 0.53 in all: fewer than the 30 trials take
    def run(point):
        with open("starts", "a") as file: print(point["n"], file=file)
        if kill < 10 and not signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # whose signal ends a process at once
        time.sleep(0.02)
        return point["n"] + 1.0
    child = os.fork()
    if not child:
        tune(lambda choose: {"n": choose("n", range(30))}, run=run, db="db", trials=30)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == (signal.SIGALRM if kill < 10 else 0)
    trials = Database("db").trials
    found = {trial.key: trial.result for trial in trials if trial.is_run}
    assert kept.items() <= found.items()
    kept, starts = found, open("starts").read().split()
assert last(trials) == dict.fromkeys(range(30), "ok")
cut = {str(trial.values["n"]) for trial in trials if trial.outcome == "cut_off"}
assert {n for n in starts if starts.count(n) > 1} <= cut
assert len(starts) <= 30 + 10
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_ten_times_and_started_again(tmp_path: Path) -> None:
    """No finished trial is lost, and none runs twice but those that were cut off."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_constraint_that_changes(tmp_path: Path) -> None:
    run = Runs()
    tune(sizes, run=run, db=tmp_path / "db", constraint=lambda point: point["bs"] <= 3)
    assert sorted(run.firsts) == [1, 2, 3]
    found = tune(sizes, run=run, db=tmp_path / "db")
    assert sorted(run.firsts) == [1, 2, 3, 4, 5, 6]
    assert found.best is not None
    assert found.best.result == 6.0
    found = tune(sizes, run=run, db=tmp_path / "db", constraint=lambda point: point["bs"] <= 3)
    assert found.best is not None
    assert (found.best.result, found.foreign, len(run.points)) == (3.0, 3, 6)
    assert "3 trials of the database belong to another space" in summary(found)


def test_trials_of_other_points_do_not_count(tmp_path: Path) -> None:
    db = Database(tmp_path / "db")
    for other in range(10):
        db.commit({"other": other}, 100.0 + other)
        db.commit({"lost": other}, outcome="crash")
    run = Runs()
    found = tune(sizes, run=run, db=tmp_path / "db", trials=6, retry=True)
    assert sorted(run.firsts) == [1, 2, 3, 4, 5, 6]
    assert found.best is not None
    assert (found.best.result, found.foreign) == (6.0, 20)
    assert {trial.source for trial in found.trials}.isdisjoint({"retry", "import"})


def test_two_searches_do_not_share_a_database(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "db")

    def inner(point: dict[str, Any]) -> float:
        for name in ("db", "link"):
            with pytest.raises(TuneError, match="another search is using"):
                tune(grid, run=lambda point: 1.0, db=tmp_path / name)
        return 1.0

    assert tune(grid, run=inner, db=tmp_path / "db", trials=1).best is not None


# --- databases -----------------------------------------------------------------------------------
def test_databases(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    database.commit({"a": 4, "b": 3}, 100)
    database.commit({"a": 1, "b": 1}, outcome="crash")
    assert database.best is not None
    assert database.best.result == 100.0
    assert database.get({"b": 1, "a": 1.0}).outcome == "crash"  # type: ignore[union-attr]
    assert database.get({"a": 2, "b": 1}) is None
    with pytest.raises(ValueError, match="cannot be compared"):
        database.commit({"a": 1}, 10**400)
    run = Runs()
    found = tune(grid, run=run, db=tmp_path / "db", trials=12)
    assert len(run.points) == 10
    assert found.best is not None
    assert found.best.source == "import"
    tune(grid, run=run, db=tmp_path / "db", trials=12, retry=True)
    assert run.points[10:] == [point_key({"a": 1, "b": 1})]


@pytest.mark.parametrize("name", ["r?a/t.db", "a {b} %41#.db"])
def test_paths_with_characters_of_urls(tmp_path: Path, name: str) -> None:
    db = tmp_path / name
    db.parent.mkdir(exist_ok=True)
    tune(grid, run=lambda point: 1.0, db=db, trials=1)
    assert len(Database(db).trials) == 1
    assert db.read_bytes().startswith(b"SQLite")


# --- arguments -----------------------------------------------------------------------------------
def test_a_command_and_a_function() -> None:
    with pytest.raises(TuneError, match="either a command or a function run="):
        tune(grid, ["echo"], run=lambda point: 1.0)


def test_the_module_that_python_runs_hides_no_function() -> None:
    import slapo.autotune.tune as module

    assert module(grid, run=lambda point: 1.0, trials=1).best.result == 1.0


def refuse_many(point: dict[str, Any]) -> list[str]:
    if point["a"] > 1:
        raise Refused("too many ranks")
    return ["echo", '{"throughput": 1}']


def test_a_function_for_the_command(tmp_path: Path) -> None:
    found = tune(grid, refuse_many, trials=12)
    kinds = {trial.values["a"]: (trial.outcome, trial.reason) for trial in found.trials}
    assert kinds == {1: ("ok", ""), **dict.fromkeys((2, 3, 4), ("refused", "too many ranks"))}
    assert sum(trial.is_run for trial in found.trials) == 3
    Database(tmp_path / "db").commit({"a": 4, "b": 3}, 100.0)
    found = tune(grid, refuse_many, db=tmp_path / "db", trials=2)
    assert found.best is not None
    assert (found.best.result, found.command) == (100.0, ""), "the best may have no command"


def test_placeholders_that_points_lack() -> None:
    def space(choose: Choices) -> dict[str, Any]:
        point = {"micro-batch": choose("micro-batch", [1, 2])}
        return point if point["micro-batch"] == 1 else {**point, "sched": "1f1b"}

    text = '{"throughput": 1, "got": "{micro-batch}"}'
    found = tune(space, ["echo", text], trials=2)
    assert {trial.figures["got"] for trial in found.trials} == {"1", "2"}


def test_a_search_that_has_results_goes_on_without(tmp_path: Path) -> None:
    for b in (1, 2, 3):
        Database(tmp_path / "db").commit({"a": 1, "b": b}, 5.0)
    found = tune(grid, ["echo", "nothing"], db=tmp_path / "db", trials=6)
    assert [trial.outcome for trial in found.trials] == ["ok"] * 3 + ["no_result"] * 3


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def predict(point: dict[str, Any]) -> dict[str, float]:
        return {"memory": 1, "capacity": 2, "throughput": point["b"]}

    run = Runs(every((3, 4), MemoryError()))
    for name, found in [
        ("plain.png", tune(grid, run=run, trials=12)),
        ("predicted.png", tune(grid, run=run, trials=12, predict=predict)),
        ("empty.png", tune(grid, run=lambda point: None, trials=1)),
    ]:
        save_plot(found, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
