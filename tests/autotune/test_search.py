"""The search: how soon it finds, what it leaves out, how it goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slapo.autotune import Database, Refused, TuneError, point_key, tune
from slapo.autotune.report import save_plot, summary
from slapo.autotune.space import Choices, survey
from slapo.errors import MissingPackageError, SlapoError
from tests.autotune import landscape

pytest.importorskip("optuna")


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


def grid(choose: Choices) -> dict[str, Any]:
    return {"a": choose("a", [1, 2, 3, 4]), "b": choose("b", [1, 2, 3])}


class Counting:
    """A trial that knows which points it ran."""

    def __init__(self, result: Callable[[dict[str, Any]], Any]) -> None:
        self.result, self.points = result, list[str]()

    def __call__(self, point: dict[str, Any]) -> Any:
        self.points.append(point_key(point))
        return self.result(point)


def test_no_point_runs_twice(tmp_path: Path) -> None:
    run = Counting(lambda point: point["a"] * point["b"])
    found = tune(grid, run=run, db=tmp_path / "db", trials=5)
    assert len(run.points) == 5
    for _ in range(2):  # the second has nothing left to do
        found = tune(grid, run=run, db=tmp_path / "db", trials=50)
        assert len(run.points) == len(set(run.points)) == 12
    assert found.best is not None
    assert (found.best.values, found.best.result) == ({"a": 4, "b": 3}, 12.0)
    assert [trial.number for trial in found.trials] == sorted(t.number for t in found.trials)


def test_a_space_of_one_point() -> None:
    found = tune(lambda choose: {"a": choose("a", [1])}, run=lambda point: 1.0)
    assert found.best is not None
    assert len(found.trials) == 1


def test_what_does_not_fit_is_not_run(tmp_path: Path) -> None:
    def predict(point: dict[str, Any]) -> Any:
        return SimpleNamespace(memory=point["a"], capacity=2, throughput=point["b"])

    run = Counting(lambda point: point["a"] * point["b"])
    found = tune(grid, run=run, db=tmp_path / "db", predict=predict, trials=12)
    assert run.points[:2] == [point_key({"a": 1, "b": 3}), point_key({"a": 2, "b": 3})]
    assert set(run.points) == {point_key({"a": a, "b": b}) for a in (1, 2) for b in (1, 2, 3)}
    assert found.does_not_fit == 6
    predictions = Database(tmp_path / "db").predictions
    left_out = predictions[point_key({"a": 4, "b": 1})]
    assert (left_out.memory, left_out.capacity, left_out.fits) == (4, 2, False)
    for trial in found.trials:
        assert trial.predicted is not None
        assert trial.outcome == ("ok" if trial.values["a"] <= 2 else "does_not_fit")
    assert "6 points do not fit by their prediction" in summary(found)


def test_predictions_are_asked_for_once(tmp_path: Path) -> None:
    asked = []

    def predict(point: dict[str, Any]) -> dict[str, Any]:
        asked.append(point_key(point))
        return {"memory": 1, "fits": point["a"] < 4, "throughput": 1.0}

    for trials in (2, 4):
        tune(grid, run=lambda point: 1.0, db=tmp_path / "db", predict=predict, trials=trials)
    assert len(asked) == len(set(asked)) == 12


def test_predictions_may_refuse() -> None:
    def predict(point: dict[str, Any]) -> dict[str, float] | None:
        if point["a"] == 1:
            raise Refused("no kernel")
        if point["a"] == 2:
            raise SlapoError("size 9 is not divisible")
        return None if point["a"] == 3 else {"memory": 1, "capacity": 2, "throughput": 1}

    run = Counting(lambda point: 1.0)
    found = tune(grid, run=run, predict=predict, trials=12)
    assert len(run.points) == 3
    assert found.refused == {
        "no kernel": 3,
        "SlapoError: size 9 is not divisible": 3,
        "the prediction is None": 3,
    }


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ({"capacity": 1, "throughput": 1}, r"predict\(\{'a': 1, 'b': 1\}\) .* has no 'memory'"),
        ({"memory": 1, "throughput": 1}, "has no 'capacity'"),
        ({"memory": 1, "capacity": 1}, "has no 'throughput'"),
        (7, "returned 7, which has no 'memory'"),
        ({"memory": "much", "capacity": 1, "throughput": 1}, "memory='much'; give a finite number"),
        ({"memory": float("nan"), "capacity": 1, "throughput": 1}, "memory=nan"),
        ({"memory": 10**400, "capacity": 1, "throughput": 1}, "memory=10.*; give a finite number"),
        ({"memory": 2**30, "capacity": 1, "throughput": 1}, "none of 12 .* needs 1.00 of 0.00 GiB"),
    ],
)
def test_predictions_that_say_too_little(prediction: Any, message: str) -> None:
    with pytest.raises(TuneError, match=message):
        tune(grid, run=lambda point: 1.0, predict=lambda point: prediction)


def test_a_prediction_that_fails() -> None:
    for predict, what in [
        (lambda point: point["c"], "KeyError: 'c'"),
        (sys.exit, "SystemExit: .*"),
    ]:
        with pytest.raises(TuneError, match=rf"predict\(.*\) failed with {what}; raise"):
            tune(grid, run=lambda point: 1.0, predict=predict)


def raises(error: Exception) -> Any:
    raise error


def test_failures_do_not_end_the_search() -> None:
    outcomes: dict[int, Callable[[], Any]] = {
        1: lambda: 1.0,
        2: lambda: raises(MemoryError()),
        3: lambda: raises(KeyError("a")),
        4: lambda: float("nan"),
    }
    found = tune(grid, run=lambda point: outcomes[point["a"]](), trials=12)
    kinds = {trial.values["a"]: trial.outcome for trial in found.trials}
    assert kinds == {1: "ok", 2: "out_of_memory", 3: "crash", 4: "garbage"}
    assert len(found.trials) == 12


def test_the_first_error_ends_it_if_asked() -> None:
    run = Counting(lambda point: raises(KeyError("a")))
    found = tune(grid, run=run, trials=12, error_stop="all")
    assert len(run.points) == 1
    assert found.best is None
    assert "no trial gave a result" in summary(found)


def test_larger_values_are_left_out_after_an_error() -> None:
    run = Counting(lambda point: 1.0 if point["a"] < 3 else raises(MemoryError()))
    found = tune(grid, run=run, trials=12, error_stop="symbol", grows=["a"])
    skipped = [trial for trial in found.trials if trial.outcome == "skipped"]
    assert len(run.points) + len(skipped) == 12
    failed = {(t.values["a"], t.values["b"]) for t in found.trials if t.outcome == "out_of_memory"}
    assert skipped
    for trial in skipped:
        assert trial.values["a"] == 4
        assert (3, trial.values["b"]) in failed
        assert "failed with a=3: out_of_memory" in trial.reason


def test_retry(tmp_path: Path) -> None:
    is_ill = True
    db = tmp_path / "db"

    def result(point: dict[str, Any]) -> float:
        if point["b"] == 3:
            raise MemoryError
        if is_ill and point["b"] == 2:
            raise KeyError
        return 1.0

    run = Counting(result)
    tune(grid, run=run, db=db, trials=12)
    tune(grid, run=run, db=db, trials=12)
    assert len(run.points) == 12
    is_ill = False
    found = tune(grid, run=run, db=db, trials=12, retry=True)
    assert len(run.points) == 16
    last = {trial.key: trial.outcome for trial in found.trials}
    assert sorted(last.values()) == ["ok"] * 8 + ["out_of_memory"] * 4
    tune(grid, run=run, db=db, trials=12, retry=True)
    assert len(run.points) == 16


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    def stop(point: dict[str, Any]) -> float:
        if len(run.points) == 4:
            raise KeyboardInterrupt
        return 1.0

    run = Counting(stop)
    with pytest.raises(KeyboardInterrupt):
        tune(grid, run=run, db=tmp_path / "db", trials=8)
    assert [t.outcome for t in Database(tmp_path / "db").trials] == ["ok"] * 3 + ["cut_off"]
    tune(grid, run=run, db=tmp_path / "db", trials=8)
    assert run.points[4] == run.points[3]
    assert len(run.points) == 9
    assert len(set(run.points)) == 8


def test_a_database_of_another_search(tmp_path: Path) -> None:
    db = tmp_path / "db"
    tune(grid, run=lambda point: 1.0, db=db, trials=1)
    with pytest.raises(TuneError, match=r"another space: there a of \[1, .*; here c of \[1, 2\]"):
        tune(lambda choose: {"c": choose("c", [1, 2])}, run=lambda point: 1.0, db=db)
    with pytest.raises(TuneError, match=r"another metric: there throughput; here speed. Name"):
        tune(grid, run=lambda point: 1.0, db=db, metric="speed")
    with pytest.raises(TuneError, match=r"another command: there ; here echo"):
        tune(grid, ["echo"], db=db)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", "text cannot be used as a database: it is not SQLite; name a new file"),
        ("old.json", r"is imported by .*import_json"),
        ("broken", "broken cannot be used as a database"),
        ("", "cannot be used as a database: .* directory"),
        ("no/where/db", "cannot be written: No such .*; name a file in a folder that can be"),
    ],
)
def test_files_that_are_no_database(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "old.json").write_text('{"a": 1}')
    (tmp_path / "broken").write_bytes(b"SQLite format 3\0" + b"\1" * 4096)
    with pytest.raises(TuneError, match=message):
        tune(grid, run=lambda point: 1.0, db=tmp_path / name)


def test_two_searches_do_not_share_a_database(tmp_path: Path) -> None:
    def inner(point: dict[str, Any]) -> float:
        with pytest.raises(TuneError, match="another search is using"):
            tune(grid, run=lambda point: 1.0, db=tmp_path / "db")
        return 1.0

    found = tune(grid, run=inner, db=tmp_path / "db", trials=1)
    assert found.best is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials=0: a search needs at least 1"),
        ({"timeout": 0}, "timeout=0: give the seconds"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"error_stop": "some"}, "error_stop='some'; choose one of none, symbol, all"),
        ({"command": ["echo"]}, "either a command or a function run="),
    ],
)
def test_options_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(TuneError, match=message):
        tune(grid, run=lambda point: 1.0, **options)


def test_without_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'slapo\[tune\]'"):
        tune(grid, run=lambda point: 1.0)


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


def test_a_space_that_changes_its_mind_ends() -> None:
    numbers = iter(range(10**6))

    def space(choose: Choices) -> dict[str, Any]:
        choose("a", [1, 2, 3])
        return {"n": next(numbers) if next(numbers) < 10 else 0}

    assert tune(space, run=lambda point: 1.0, trials=9).best is not None


def test_databases(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    database.commit({"a": 4, "b": 3}, 100)
    database.commit({"a": 1, "b": 1}, outcome="crash")
    assert database.best is not None
    assert database.best.result == 100.0
    assert database.get({"b": 1, "a": 1.0}).outcome == "crash"  # type: ignore[union-attr]
    assert database.get({"a": 2, "b": 1}) is None
    for wrong in ({"result": None, "outcome": "ok"}, {"result": 1, "outcome": "crash"}):
        with pytest.raises(ValueError, match="give a result, or one of"):
            database.commit({"a": 1}, **wrong)
    for number in (float("inf"), float("nan"), 10**400, "fast"):
        with pytest.raises(ValueError, match="cannot be compared"):
            database.commit({"a": 1}, number)  # type: ignore[arg-type]
    with pytest.raises(TuneError, match="JSON cannot hold"):
        database.commit({"a": object()}, 1.0)
    run = Counting(lambda point: point["a"] * point["b"])
    found = tune(grid, run=run, db=tmp_path / "db", trials=12)
    assert len(run.points) == 10
    assert found.best is not None
    assert found.best.source == "import"
    found = tune(grid, run=run, db=tmp_path / "db", trials=12, retry=True)
    assert run.points[10:] == [point_key({"a": 1, "b": 1})]


def test_old_databases(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(
        '{"batch_size-8-ckpt_ratio-0.5": {"throughput": 12.5, "error_code": 0},'
        ' "{\\"batch_size\\": 16, \\"ckpt_ratio\\": 1.0}": 20.0,'
        ' "batch_size:32,ckpt_ratio:0": [1, 0], "batch_size=64": [2, 0], "x": 1}'
    )
    database = Database(tmp_path / "db")
    assert database.import_json(tmp_path / "old.json") == 4
    assert database.import_json(tmp_path / "old.json") == 0
    assert [(t.values.get("batch_size"), t.result, t.outcome) for t in database.trials] == [
        (8, 12.5, "ok"),
        (16, 20.0, "ok"),
        (32, None, "out_of_memory"),
        (64, None, "crash"),
    ]
    assert database.trials[0].values == {"batch_size": 8, "ckpt_ratio": 0.5}
    for text, message in [
        ("nope", "cannot be read as JSON"),
        ("[]", "holds a list"),
        ('{"a-1": 2.0, "attn-flash-v2": 1.0}', "'attn-flash-v2', of which 'v2' cannot be read"),
        ('{"a-1-a-2": 2.0}', "'a-1-a-2', of which 'a-2'"),
        ('{"micro-batch-8": 2.0}', "of which '8'"),
    ]:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(TuneError, match=message):
            database.import_json(tmp_path / "bad.json")
    assert len(database.trials) == 4


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("batch_size-8-attn-flash", {"batch_size": 8, "attn": "flash"}),
        ("batch_size-8-attn-eager", {"batch_size": 8, "attn": "eager"}),
        ("{'bs': 4, 'kernel': 'flash'}", {"bs": 4, "kernel": "flash"}),
        ("lr-1e+5-x-1E5", {"lr": 1e5, "x": 1e5}),
        ("x-.5-y--2-z-08", {"x": 0.5, "y": -2, "z": 8}),
        ("v-1.2.3,flag=True, n: None", {"v": "1.2.3", "flag": True, "n": None}),
    ],
)
def test_names_of_points_in_old_databases(
    tmp_path: Path, name: str, values: dict[str, Any]
) -> None:
    (tmp_path / "old.json").write_text(json.dumps({name: 10.0}))
    database = Database(tmp_path / "db")
    assert database.import_json(tmp_path / "old.json") == 1
    assert database.trials[0].values == values


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = Counting(lambda point: 1.0 if point["a"] < 3 else raises(MemoryError()))
    predict = landscape_of_grid
    for name, found in [
        ("plain.png", tune(grid, run=run, trials=12)),
        ("predicted.png", tune(grid, run=run, trials=12, predict=predict)),
        ("empty.png", tune(grid, run=lambda point: None, trials=1)),
    ]:
        save_plot(found, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def landscape_of_grid(point: dict[str, Any]) -> dict[str, float]:
    return {"memory": 1, "capacity": 2, "throughput": point["b"]}


def test_names_of_the_library() -> None:
    import slapo
    import slapo.autotune.tune as module

    assert slapo.Database is Database
    assert slapo.autotune.Space is slapo.Space
    assert slapo.Symbol is slapo.autotune.Symbol
    assert {"autotune", "Symbol", "Space", "Database"} <= {*dir(slapo), *slapo.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = slapo.nope
    # Importing the module that `python -m` runs hides no function.
    assert module(grid, run=lambda point: 1.0, trials=1).best.result == 1.0


@pytest.mark.parametrize("name", ["r?a/t.db", "a {b} %41#.db"])
def test_paths_with_characters_of_urls(tmp_path: Path, name: str) -> None:
    db = tmp_path / name
    db.parent.mkdir(exist_ok=True)
    tune(grid, run=lambda point: 1.0, db=db, trials=1)
    assert len(Database(db).trials) == 1
    assert db.read_bytes().startswith(b"SQLite")


def test_a_link_to_a_database_has_its_lock(tmp_path: Path) -> None:
    def inner(point: dict[str, Any]) -> float:
        (tmp_path / "link").symlink_to(tmp_path / "db")
        with pytest.raises(TuneError, match="another search is using"):
            tune(grid, run=lambda point: 1.0, db=tmp_path / "link")
        return 1.0

    assert tune(grid, run=inner, db=tmp_path / "db", trials=1).best is not None


def test_another_function_for_the_command_is_another_search(tmp_path: Path) -> None:
    def make(point: dict[str, Any]) -> list[str]:
        return ["echo", '{"throughput": 1}']

    first = make

    def make(point: dict[str, Any]) -> list[str]:  # type: ignore[no-redef]
        return ["echo", '{"throughput": 2}']

    tune(grid, first, db=tmp_path / "db", trials=1)
    tune(grid, first, db=tmp_path / "db", trials=2)
    with pytest.raises(TuneError, match="holds a search with another command"):
        tune(grid, make, db=tmp_path / "db", trials=3)


def test_a_function_for_the_command_that_fails() -> None:
    def refuse(point: dict[str, Any]) -> list[str]:
        if point["a"] > 1:
            raise Refused("too many ranks")
        return ["echo", '{"throughput": 1}']

    found = tune(grid, refuse, trials=12)
    kinds = {trial.values["a"]: (trial.outcome, trial.reason) for trial in found.trials}
    assert kinds == {1: ("ok", ""), **dict.fromkeys((2, 3, 4), ("refused", "too many ranks"))}
    assert sum(trial.is_run for trial in found.trials) == 3
    for wrong, message in [
        (lambda point: point["c"], r"command\(\{'a': .*\) failed with KeyError: 'c'; raise"),
        (lambda point: None, r"command\(\{'a': .*\) returned None; return a list"),
    ]:
        with pytest.raises(TuneError, match=message):
            tune(grid, wrong, trials=1)


def test_placeholders_that_points_lack() -> None:
    def space(choose: Choices) -> dict[str, Any]:
        point = {"micro-batch": choose("micro-batch", [1, 2])}
        return point if point["micro-batch"] == 1 else {**point, "sched": "1f1b"}

    text = '{"throughput": 1, "got": "{micro-batch}"}'
    found = tune(space, ["echo", text], trials=2)
    assert {trial.figures["got"] for trial in found.trials} == {"1", "2"}
    with pytest.raises(TuneError, match=r"\{sched\}.* 'sched', which \{'micro-batch': 1\} lacks"):
        tune(space, ["echo", "{sched}"], trials=2)
    with pytest.raises(TuneError, match=r"\{micro-batches\}: did you mean 'micro-batch'"):
        tune(space, ["echo", "{micro-batches}"], trials=2)


def test_a_few_trials_without_a_figure_do_not_end_a_search_that_has_some(tmp_path: Path) -> None:
    for b in (1, 2, 3):
        Database(tmp_path / "db").commit({"a": 1, "b": b}, 5.0)
    found = tune(grid, ["echo", "nothing"], db=tmp_path / "db", trials=6)
    assert [trial.outcome for trial in found.trials] == ["ok"] * 3 + ["no_result"] * 3


def test_the_best_may_have_no_command(tmp_path: Path) -> None:
    def make(point: dict[str, Any]) -> list[str]:
        if point["a"] > 1:
            raise Refused("too many ranks")
        return ["echo", '{"throughput": 1}']

    Database(tmp_path / "db").commit({"a": 4, "b": 3}, 100.0)
    found = tune(grid, make, db=tmp_path / "db", trials=2)
    assert found.best is not None
    assert (found.best.result, found.command) == (100.0, "")
