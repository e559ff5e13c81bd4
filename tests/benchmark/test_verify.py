"""The tables of what Verify catches: counted right, and readable."""

from __future__ import annotations

from typing import Any

from benchmark import verify

PLANTED: list[dict[str, Any]] = [
    {"mistake": "eps", "ranks": 1, "caught": True, "place": "h.0.ln", "right_place": True},
    {"mistake": "sum", "ranks": 2, "caught": False, "place": "", "right_place": False},
]
RIGHT: list[dict[str, Any]] = [{"schedule": "checkpoints", "ranks": 1, "refused": False}]
LEFT_OUT: list[dict[str, Any]] = [
    {"family": "gpt2", "parallel": "tensor", "caught": caught, "changes": changes, "near": near}
    for caught, changes, near in ((True, True, "exact"), (False, False, ""), (True, True, "inside"))
]
COST: list[dict[str, Any]] = [
    {"model": "GPT-2", "verify_cpu_ms": 6.0, "plain_cpu_ms": 2.0, "ratio": 3.0, "rounds": 1}
]


def test_what_is_missed_is_counted() -> None:
    targets = verify._targets(PLANTED, RIGHT, LEFT_OUT, COST)
    told = {target.what: (target.value, target.met) for target in targets}
    assert told == {
        "mistakes that pass, of 2": (1, False),
        "places that are wrong, of 2": (1, False),
        "lines left out that pass, of 2 that change numbers": (0, True),
        "places far from the line, of 2": (0, True),
        "right schedules refused, of 1": (0, True),
        "cost in passes of both models, the median": (3.0, True),
    }


def test_the_page_has_all_tables() -> None:
    targets = verify._targets(PLANTED, RIGHT, LEFT_OUT, COST)
    page = verify.page_of(PLANTED, RIGHT, LEFT_OUT, COST, targets, "python -m benchmark verify")
    assert "| eps | 1 | yes | `h.0.ln` | yes |" in page
    assert "| gpt2 | tensor | 3 (2) | 2 | 2 |" in page
    assert "- MISSED mistakes that pass, of 2: 1, at most 0" in page
