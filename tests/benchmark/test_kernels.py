"""The benchmarks for a GPU: runs with tiny models, and the published sizes without weights."""

import csv
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers")

import slapo
from benchmark import gpu, kernel_ranks, kernels
from benchmark.kernel_cases import check_losses
from slapo.model_schedule import apply_schedule


@pytest.mark.wide
def test_kernels_with_tiny_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--quick", "--results", str(tmp_path)])
    with (tmp_path / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["model"], row["side"]) for row in rows} == {
        (model, side) for model in ("gpt2", "llama") for side in ("hf", "ours, all")
    }
    assert all(float(row["seconds"]) > 0 for row in rows)
    with (tmp_path / "kernels_ranks.csv").open() as file:
        sides = {row["side"] for row in csv.DictReader(file)}
    assert {"ours", "DTensor"} <= sides
    with (tmp_path / "kernels_collectives.csv").open() as file:
        travels = {row["side"]: row for row in csv.DictReader(file)}
    assert [travels["ours"][way] for way in ("forward", "backward")] == ["2 all_reduce"] * 2
    assert travels["DTensor"]["backward"] == "5 all_reduce"  # each column layer sums by itself
    assert travels["ours"]["backward_mib"] == travels["least"]["backward_mib"]
    assert "two ranks: time of ours to DTensor's" in capsys.readouterr().out


@pytest.mark.parametrize("name", kernels.CASES["cuda"])
def test_published_sizes(name: str) -> None:
    """Scheduled with everything, and one step without memory: only a GPU is missing."""
    case = kernels.CASES["cuda"][name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        sch = apply_schedule(case.build(), case.key, fused_loss=True)
        model, _ = slapo.build(sch)
        loss: Any = model(**case.inputs(1, "cpu")).loss
        loss.backward()
    assert loss.shape == ()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert all("token_type" in name or "pooler" in name for name in missing), missing


def test_sides_are_those_of_the_options() -> None:
    assert set(kernels.OURS) <= set(kernels.SIDES)
    assert set(kernel_ranks.FEW) <= set(kernel_ranks.SIDES)
    with pytest.raises(RuntimeError, match="computes something else"):
        check_losses({"hf": [1.0], "ours": [2.0]})


@pytest.mark.slow
def test_gpu_with_tiny_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_tests", lambda: "left out: they are tests of this suite")
    gpu.main(["--small", "--results", str(tmp_path)])
    with (tmp_path / "gpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows if row["way"] == "ours"] == ["bert", "gpt2", "t5", "llama"]
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert all(float(row["predicted_seconds"]) > 0 for row in rows if row["way"] == "ours")
    assert (tmp_path / "gpu.md").read_text().count("\n") == 2 + len(rows)
    assert (tmp_path / "gpu.png").exists()


def test_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--small runs the same with tiny models" in capsys.readouterr().err
