"""Benchmarks of the dry run and of the tuner; their quick runs are in ``test_benchmarks.py``."""

import csv
import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("optuna")
from benchmark import dry_run, report, tuning, tuning_space
from benchmark.measure import kendall_tau
from benchmark.tuning_ranks import Run
from slapo.autotune.space import survey
from slapo.autotune.symbols import load_config
from slapo.cost import MACHINES, Layout
from slapo.model_schedule.options import Options

POINTS = survey(tuning_space.space).points
FOUR = survey(tuning.quick_space).points


def _job(folder: Path, passes: int = 1) -> Any:
    return tuning._RecipeRun(tuning.quick_space, tuning_space.WORK, passes, [0], 1.0, folder, 0.0)


# --- the space -----------------------------------------------------------------------------------
def test_the_space_has_many_points_and_each_can_be_built() -> None:
    assert len(POINTS) >= 60
    assert len({point.key for point in POINTS}) == len(POINTS)
    work = tuning_space.WORK
    for point in POINTS:
        values = point.values
        assert tuning_space.ranks_of(values) <= 2
        Options(**tuning_space.recipe_options(values))
        layout = Layout(
            **{name: values[name] for name in ("tp", "pp", "dp")},
            batch=work.samples // values["dp"],
            length=work.length,
            micro_batches=values["micro_batches"],
            schedule=values.get("schedule", "1f1b"),
        )
        assert layout.batch * layout.dp == work.samples, "all points do the same work"
        # Some questions depend on earlier answers.
        assert ("sequence_parallel" in values) == (values["tp"] == 2)
        assert ("schedule" in values) == (values["pp"] == 2)
        if values.get("schedule") == "1f1b":
            assert values["micro_batches"] >= values["pp"]


def test_the_space_is_a_configuration_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = load_config(tuning_space.__file__)
    assert config.predict is not None
    assert config.command is not None
    assert config.command(POINTS[0].values)[1:] == ["-m", "benchmark.tuning_script"]
    assert len(survey(config.space).points) == len(POINTS)


def test_numbers_of_a_machine_are_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machines.json"
    one = dataclasses.replace(MACHINES["cpu"], curve=((1.0, 2.0), (3.0, 4.0)))
    path.write_text(json.dumps({1: dataclasses.asdict(one)}))
    assert tuning_space.machines(path) == {1: one}


# --- the tuner's benchmark -----------------------------------------------------------------------
def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Mapping[str, Any]] = []

    def on_ranks(ranks: int, main: Any, arguments: tuple[Any, ...], say: Any) -> Run:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(arguments[1])
        return Run((0.5, 0.25, 1.0), others=0.0)

    monkeypatch.setattr(tuning, "on_ranks", on_ranks)
    with pytest.raises(KeyboardInterrupt):
        tuning.measure_all(FOUR, _job(tmp_path, 2), lambda text: None)
    before, said = ran, []
    ran = []
    monkeypatch.setattr(
        tuning, "on_ranks", lambda *given: ran.append(given[2][1]) or Run((0.5,), 0.0)
    )
    found = tuning.measure_all(FOUR, _job(tmp_path, 2), said.append)
    assert (len(before), len(ran)) == (3, 1)
    assert "3 runs are kept in" in said[0]
    assert set(found.values()) == {tuning_space.WORK.samples / 0.5}
    assert tuning.measure_all(FOUR, _job(tmp_path, 2), said.append) == found
    assert len(ran) == 1


def test_a_point_that_others_disturbed_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([*[Run((1.0,), 0.5)] * 4, *[Run((0.5,), 0.0)] * 4])
    monkeypatch.setattr(tuning, "on_ranks", lambda *given: next(runs))
    found = tuning.measure_all(FOUR, _job(tmp_path, 3), lambda text: None)
    assert set(found.values()) == {tuning_space.WORK.samples / 0.5}, "the quieter run counts"
    assert next(runs, None) is None


def test_a_search_of_what_was_measured(tmp_path: Path) -> None:
    measured = {point.key: float(number) for number, point in enumerate(FOUR, 1)}
    wrong = {
        key: {"throughput": 9 - speed, "memory": 1, "capacity": 2}
        for key, speed in measured.items()
    }
    rows = [
        *tuning.search(FOUR, _job(tmp_path), measured, None, "sampler alone", 0),
        *tuning.search(FOUR, _job(tmp_path), measured, wrong, "predictions", 0),
    ]
    alone = [row for row in rows if row["way"] == "sampler alone"]
    assert len(alone) == 4, "without predictions it runs them all"
    assert alone[-1]["of_best"] == 1.0
    assert 1 <= tuning.first_near(rows, "sampler alone")[0] <= 4
    assert tuning.first_near(rows, "predictions") == [math.inf], "the worst one is all it runs"


def test_agreement_of_two_orders() -> None:
    assert kendall_tau([1, 2, 3, 4], [2, 3, 5, 9]) == 1.0
    assert kendall_tau([1, 2, 3, 4], [9, 5, 3, 2]) == -1.0
    assert kendall_tau([1, 2, 3], [1, 1, 1]) == 0.0


# --- the dry run's benchmark ---------------------------------------------------------------------
def test_targets_of_the_kept_files_follow_from_their_rows() -> None:
    with (report.RESULTS / "dry_run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("time", "memory")}
    assert len(kinds["time"]) == len(dry_run.STEP_CASES)
    assert len(kinds["memory"]) == len(dry_run.MEMORY_CASES)
    assert dry_run._largest(kinds["memory"]) <= dry_run.ERROR_MEMORY
