"""``python -m benchmark gpu``."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmark import gpu

pytest.importorskip("transformers")


@pytest.mark.slow
def test_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
