"""The benchmark of Transformers' plans judges rightly, and what it has found still stands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from benchmark import plan_ranks, plans
from benchmark.plan_models import cases
from benchmark.plan_ranks import EQUAL, NOT_RUNNABLE, REFUSED, WRONG
from slapo.model_schedule.plans import PLAN_FIXES


def test_every_config_with_a_plan_is_in_the_table() -> None:
    rows = {(row["family"], row["config"]): row for row in plans.stored()}
    assert set(rows) == {(case.family, case.name) for case in cases()}


@pytest.mark.parametrize("way", plans.WAYS)
def test_what_the_table_says(way: str) -> None:
    """None is wrong, as many are equal as promised, and all else says why."""
    rows = plans.stored()
    words = Counter(row[way] for row in rows)
    assert words[WRONG] == 0
    assert words[EQUAL] >= plans.PROMISED[way]
    for row in rows:
        if row[way] == EQUAL:
            assert float(row[f"{way}_output"]) < plan_ranks.OUTPUT
            assert float(row[f"{way}_gradient"]) < plan_ranks.GRADIENT
            assert 0 < float(row[f"{way}_share"]) <= 1
        elif row["plan"] != NOT_RUNNABLE:
            assert row[f"{way}_said"], row


def test_the_page_has_the_rows() -> None:
    rows = plans.stored()
    command = rows[0]["command"]
    assert command == "python -m benchmark plans"
    page = (plans.report.RESULTS / "plans.md").read_text().splitlines()
    tables = [line for line in plans.markdown(rows, command).splitlines() if line[:2] == "| "]
    assert [line for line in page if line[:2] == "| "] == tables


@pytest.mark.distributed
@pytest.mark.slow
def test_three_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that holds, one that a fix mends, and this one without its fix."""
    by_name = {case.name: case for case in cases()}
    chosen = [by_name[name] for name in ("LlamaConfig", "ApertusConfig", "Glm4MoeConfig")]
    said: list[str] = []
    rows = plans.measure(chosen, said.append)
    assert len(said) == 3
    assert [row["plan"] for row in rows] == [EQUAL] * 3
    stored = {row["config"]: row for row in plans.stored()}
    assert [row["tokens"] for row in rows] == [stored[row["config"]]["tokens"] for row in rows]
    paths = plans.write(rows, "test", tmp_path, whole=False)
    assert [path.name for path in paths] == ["plans.csv", "plans.md"]
    assert plans.stored(tmp_path)[0]["model"] == "LlamaForCausalLM"


def test_a_fault_is_seen() -> None:
    """The judge itself: a gradient that is off, one that lacks, and outputs of another shape."""
    import torch

    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    right = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert plan_ranks.worst_gradient(model, right)[0] == 0
    off = {**right, "weight": right["weight"] * 1.01}
    assert plan_ranks.worst_gradient(model, off) == (pytest.approx(0.01, rel=1e-3), "weight")
    assert plan_ranks.worst_gradient(model, {"weight": right["weight"]}) == (float("inf"), "bias")


def test_words() -> None:
    rows = [{"plan": word} for word in (WRONG, EQUAL, EQUAL, REFUSED)]
    assert plans.counted(rows, "plan") == "2 equal, 1 refused, 1 wrong"


def test_fixes_are_of_plans_that_there_are() -> None:
    """One for a name that no config has would mend nothing."""
    assert set(PLAN_FIXES) <= {case.load().model_type for case in cases()}
