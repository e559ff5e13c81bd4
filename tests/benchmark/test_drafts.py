"""The benchmark of drafts judges rightly, and what it has found still stands."""

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from benchmark import draft_ranks, drafts
from benchmark.draft_cases import cases
from benchmark.draft_ranks import EQUAL, NOT_RUNNABLE, REFUSED, WRONG


def test_every_model_is_in_the_table() -> None:
    rows = {(row["group"], row["family"], row["config"]) for row in drafts.stored()}
    assert rows == {(case.group, case.family, case.name) for case in cases()}


@pytest.mark.parametrize("way", drafts.WAYS)
def test_what_the_table_says(way: str) -> None:
    """None is wrong, as many are equal as promised, and all else says why."""
    rows = [row for row in drafts.stored() if row["draft"] != NOT_RUNNABLE and row[way]]
    words = Counter(row[way] for row in rows)
    assert words[WRONG] == 0
    assert words[EQUAL] >= drafts.PROMISED.get(way, 1.0) * len(rows)
    for row in rows:
        if row[way] == EQUAL:
            assert float(row[f"{way}_output"]) < draft_ranks.OUTPUT
            assert float(row[f"{way}_gradient"]) < draft_ranks.GRADIENT
            assert 0 < float(row[f"{way}_share"]) <= 1
        else:
            assert row[f"{way}_said"], row


def test_drafts_shard_as_recipes_do() -> None:
    rows = [row for row in drafts.stored() if row["recipe"] == EQUAL]
    assert len(rows) >= 15
    for row in rows:
        assert float(row["draft_share"]) > float(row["recipe_share"]) - 0.01, row
        assert int(row["draft_collectives"]) <= int(row["recipe_collectives"]), row


def test_the_page_has_the_rows() -> None:
    rows = drafts.stored()
    command = rows[0]["command"]
    assert command == "python -m benchmark drafts"
    page = (drafts.report.RESULTS / "drafts.md").read_text().splitlines()
    tables = [line for line in drafts.markdown(rows, command).splitlines() if line[:2] == "| "]
    assert [line for line in page if line[:2] == "| "] == tables


@pytest.mark.distributed
@pytest.mark.slow
def test_three_live(tmp_path: Path) -> None:
    """A family with a recipe, one with a plan alone, and a model of one's own."""
    by_name = {case.name: case for case in cases()}
    chosen = [by_name[name] for name in ("gpt2", "ApertusConfig", "literal halves")]
    said: list[str] = []
    rows = drafts.measure(chosen, said.append)
    assert len(said) == 3
    stored = {row["config"]: row for row in drafts.stored()}
    for row in rows:
        known = stored[row["config"]]
        for way in ("draft", "tokens", "recipe", "check_4"):
            assert row[way] == known[way], (row["config"], way)
        assert str(row["draft_share"]) == known["draft_share"]
    paths = drafts.write(rows, "test", tmp_path, whole=False)
    assert [path.name for path in paths] == ["drafts.csv", "drafts.md"]
    assert drafts.stored(tmp_path)[0]["model"] == "GPT2LMHeadModel"


def test_a_fault_is_seen() -> None:
    """The judge itself: a gradient that is off, one that lacks, and outputs of another shape."""
    import torch

    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    right = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert draft_ranks.worst_gradient(model, right)[0] == 0
    off = {**right, "weight": right["weight"] * 1.01}
    assert draft_ranks.worst_gradient(model, off) == (pytest.approx(0.01, rel=1e-3), "weight")
    assert draft_ranks.worst_gradient(model, {"weight": right["weight"]}) == (float("inf"), "bias")


def test_words() -> None:
    rows = [{"draft": word} for word in (WRONG, EQUAL, EQUAL, REFUSED)]
    assert drafts.counted(rows, "draft") == "2 equal, 1 refused, 1 wrong"
