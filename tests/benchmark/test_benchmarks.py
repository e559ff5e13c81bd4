"""Benchmarks run, their files can be read, and costs grow with the model as they should."""

import csv
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
from benchmark.scheduling import WAYS, bias_gelu, schedule_flat

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
    """How many Python functions and built-ins `run` calls: a cost that no other process disturbs."""
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
    first, last = _calls(lambda: schedule(small)), _calls(lambda: schedule(large))
    # The parts outside of the layers make the small model dearer per layer; quadratic were 6.
    assert last / first <= 6 * 1.1


@pytest.mark.parametrize("name", ["last_absent", "not_connected", "in_every_layer"])
def test_a_search_is_linear_in_the_graph(name: str) -> None:
    counts = []
    for layers in (4, 24):
        sch = slapo.create_schedule(transformer_on_meta(layers))
        sch.trace(flatten=True)
        pattern, _ = matching.PATTERNS[name]
        sch.find(pattern)
        counts.append(_calls(lambda: sch.find(pattern)))
    assert counts[1] / counts[0] <= 6 * 1.1


def test_a_fusion_costs_the_same_in_any_flat_graph() -> None:
    costs = []
    for layers in (4, 24):
        sch = schedule_flat(transformer_on_meta(layers))  # every layer has its bias_gelu fused
        fresh = slapo.create_schedule(transformer_on_meta(layers))
        fresh["layers.0.up"].decompose()
        fresh.trace(flatten=True)
        (match,) = fresh.find(bias_gelu)
        fresh.fuse(match)  # the first rewrite of a graph counts its nodes
        assert len(sch.find(bias_gelu)) == 0
        costs.append(_calls(lambda: sch.fuse(sch.find_node(_is_first_norm)[:1])))
    assert costs[1] / costs[0] <= 6 * 1.1


def _is_first_norm(node: Any) -> bool:
    return str(node.target) == "layers.0.norm_1"
