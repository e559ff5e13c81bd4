"""Benchmarks run, their files can be read, and costs grow with the model as they should."""

import csv
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import slapo
from benchmark import matching, report
from benchmark.__main__ import BENCHMARKS, main
from benchmark.measure import Result, Target
from benchmark.models import transformer_on_meta
from benchmark.scheduling import WAYS, bias_gelu

ABOUT_THE_RUN = {"command", "date", "python", "torch", "transformers", "slapo", "cores"}
COLUMNS = {
    "import_time": {"code", "cpu_s", "wall_s"},
    "scheduling": {"way", "layers", "cpu_s", "cpu_ms_per_layer", "published_cpu_s"},
    "matching": {"pattern", "layers", "matches", "cpu_s"},
    "step_time": {"model", "form", "cpu_ms", "cpu_ratio", "wall_ratio"},
}


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_quick_run_writes_a_csv_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "step_time":  # recording a Transformers model takes seconds
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    main([name, "--quick", "--results", str(tmp_path)])
    rows = _read(tmp_path / f"{name}.csv")
    assert rows
    assert set(rows[0]) >= ABOUT_THE_RUN | COLUMNS[name]
    assert rows[0]["command"].startswith(f"python -m benchmark {name} --quick")
    assert rows[0]["slapo"] == slapo.__version__
    shown = capsys.readouterr().out
    assert f"{name} (1 of 1)" in shown, "progress is shown"


def test_every_benchmark_is_listed_here() -> None:
    assert set(COLUMNS) == set(BENCHMARKS)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["speed"])
    assert "no benchmark speed; there are import_time" in capsys.readouterr().err


def test_targets_say_whether_they_are_met(tmp_path: Path) -> None:
    targets = [Target("fast", 0.5, 1.0, "s"), Target("slow", 2.0, 1.0)]
    assert str(targets[0]) == "met    fast: 0.5 s, at most 1 s"
    assert str(targets[1]).startswith("MISSED")
    report.write("some", Result([{"a": 1}], targets), "command", tmp_path)
    assert [row["met"] for row in _read(tmp_path / "some_targets.csv")] == ["True", "False"]


def test_plot_is_drawn_from_the_csv_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report.plot_scheduling(tmp_path) is None, "nothing was measured yet"
    rows = [{"way": "flat", "layers": n, "cpu_ms_per_layer": 4.0} for n in (96, 12)]
    report.write("scheduling", Result(rows), "command", tmp_path)
    picture = report.plot_scheduling(tmp_path)
    assert picture == tmp_path / "scheduling.png"
    assert picture.stat().st_size > 1000


def _calls(run: Callable[[], Any]) -> int:
    """How many functions `run` calls: a cost that no other process disturbs."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(previous)
    return count


@pytest.mark.parametrize("way", list(WAYS))
def test_scheduling_is_linear_in_the_layers(way: str) -> None:
    schedule = WAYS[way]
    schedule(transformer_on_meta(1))  # what is done once per process
    small, large = transformer_on_meta(4), transformer_on_meta(24)
    first = _calls(functools.partial(schedule, small))
    last = _calls(functools.partial(schedule, large))
    # The parts outside of the layers make the small model dearer per layer; quadratic were 6.
    assert last / first <= 6 * 1.05


@pytest.mark.parametrize("name", ["last_absent", "not_connected", "in_every_layer"])
def test_a_search_is_linear_in_the_graph(name: str) -> None:
    counts = []
    for layers in (4, 24):
        sch = slapo.create_schedule(transformer_on_meta(layers))
        sch.trace(flatten=True)
        pattern, _ = matching.PATTERNS[name]
        sch.find(pattern)
        counts.append(_calls(functools.partial(sch.find, pattern)))
    assert counts[1] / counts[0] <= 6


def test_a_fusion_costs_about_the_same_in_a_larger_graph() -> None:
    costs = []
    for layers in (4, 24):
        sch = slapo.create_schedule(transformer_on_meta(layers))
        for index in range(layers):
            sch[f"layers.{index}.up"].decompose()
        sch.trace(flatten=True)
        first, second, *_ = sch.find(bias_gelu)
        sch.fuse(first)  # the first rewrite of a graph counts what its modules are used for
        costs.append(_calls(functools.partial(sch.fuse, second)))
    assert costs[1] / costs[0] <= 1.1
