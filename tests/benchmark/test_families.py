"""The runner of the forty families: what it calls equal is equal, what it meets it reports."""

import copy
import csv
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import slapo
from benchmark import families
from benchmark.__main__ import main
from benchmark.more_families import FAMILIES, MASKS

# One whose layers take a mask and one whose do not; their outcomes are the library's affair.
CHEAP = ("olmo2", "convnext")


class Toy(nn.Module):
    """Two outputs, gradients of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, use_cache: bool = True) -> dict[str, object]:
        hidden = self.first(x)
        found: dict[str, object] = {"logits": self.second(hidden)}
        return {**found, "cache": [hidden]} if use_cache else found


def _nudge(model: Toy) -> None:
    with torch.no_grad():
        model.second.weight[0, 0] += 1e-3


def _raise(error: Exception) -> Callable[[Toy], None]:
    def apply(model: Toy) -> None:
        def forward(**_inputs: Tensor) -> None:
            raise error

        model.forward = forward  # type: ignore[assignment]

    return apply


def _detach(model: Toy) -> None:
    model.first.register_forward_hook(lambda _m, _i, output: output.detach())


def _double_the_gradient(model: Toy) -> None:
    model.first.weight.register_hook(lambda grad: 2 * grad)


def _not_a_number(model: Toy) -> None:
    model.second.register_forward_hook(lambda _m, _i, output: output * float("nan"))


def _forget_the_cache(model: Toy) -> None:
    whole = model.forward
    model.forward = lambda x, use_cache=True: whole(x, False)  # type: ignore[method-assign]


def _answer_with_fakes(model: Toy) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def forward(x: Tensor) -> dict[str, Tensor]:
        with mode:
            return {"logits": torch.ones(3, 4) * model.first.weight.sum()}

    model.forward = forward  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda _model: None, "equal"),
        (_raise(slapo.SlapoError("traced\n for " + 200 * "x")), "refused: traced for " + 149 * "x"),
        (_raise(RuntimeError("sizes differ")), "CRASH: RuntimeError: sizes differ"),
        (_nudge, r"WRONG \d\.\de-.. of .* in (output dict\.logits|gradient first\.weight)"),
        (_double_the_gradient, r"WRONG .* of .* in gradient first\.weight"),
        (_detach, r"WRONG gradient first\.weight missing, 1 in all"),
        (_not_a_number, r"WRONG nan of .*"),
        (_forget_the_cache, r"WRONG output dict\.cache\.0 missing, 1 in all"),
        (_answer_with_fakes, r"WRONG values: fake tensors .*"),
    ],
)
def test_a_call_is_compared_in_outputs_caches_and_gradients(
    change: Callable[[Toy], None], expected: str
) -> None:
    eager = Toy()
    model = copy.deepcopy(eager)
    change(model)
    found = families.compare(model, eager, {"x": torch.randn(3, 4)}, True, default_cache=True)
    assert re.fullmatch(expected, found), found


def test_a_call_that_the_original_cannot_do_and_a_cache_are_left_out() -> None:
    eager, model, inputs = Toy(), Toy(), {"x": torch.randn(3, 4)}
    model.load_state_dict(eager.state_dict())
    _forget_the_cache(model)
    assert families.compare(model, eager, inputs, True) == "equal"
    _raise(RuntimeError("in-place"))(eager)
    assert families.compare(Toy(), eager, inputs, True) == LEFT_OUT


LEFT_OUT = "left out: the original fails with RuntimeError: in-place"
SIZES = {(2, 21): "equal", (5, 7): "refused: no", (1, 9): "WRONG 1.0e-01 of 1"}
CALLS = {"ones": "equal", "no mask, eval": "refused: None", "no mask, train": "refused: None"}


@pytest.mark.parametrize(
    ("sum_up", "outcomes", "expected"),
    [
        (families._in_a_word, ["equal", LEFT_OUT], "equal"),
        (families._in_a_word, CALLS.values(), "equal+refused"),
        (families._in_a_word, ["refused: a", "refused: b"], "refused"),
        (families._in_a_word, ["equal", "CRASH: a", "refused: b"], "crash"),
        (families._in_a_word, ["CRASH: a", "WRONG 1"], "wrong"),
        (families._of_all_sizes, {(2, 21): "equal", (5, 7): LEFT_OUT}, LEFT_OUT),
        (families._of_all_sizes, SIZES, "WRONG 1.0e-01 of 1 [at 1x9 only]"),
        (families._of_all_sizes, dict.fromkeys(SIZES, "refused: no"), "refused: no"),
        (
            families._grouped,
            CALLS,
            "1 of 3 calls equal | no mask, eval / no mask, train -> refused: None",
        ),
        (
            families._grouped,
            {"ones": "equal", "padded": LEFT_OUT},
            f"1 of 1 calls equal | padded -> {LEFT_OUT}",
        ),
        (families._counted, ["WRONG 1", "not traced: a", "WRONG x"], "2 WRONG, 1 not traced"),
    ],
)
def test_outcomes_are_summed_up(sum_up: Callable[..., str], outcomes: Any, expected: str) -> None:
    assert sum_up(outcomes) == expected


def test_the_families_are_forty_that_no_other_test_names() -> None:
    zoo = pytest.importorskip("tests.graph.zoo")
    named = {family.cls.removesuffix("ForCausalLM") for family in zoo.FAMILIES.values()}
    assert len(FAMILIES) == 40
    assert not named & {family.cls.removesuffix("ForCausalLM") for family in FAMILIES.values()}
    kinds = {family.kind for family in FAMILIES.values()}
    assert kinds >= {"decoder", "encoder", "encoder-decoder", "vision", "audio", "state space"}
    assert all(family.masks in (MASKS, MASKS[:1]) for family in FAMILIES.values())


def test_unknown_families_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["families", "--only", "bart,brat"])
    assert "no family brat; there are falcon" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "limit", "expected"),
    [
        ("1 / 0", 60, "CRASH: the process ended with 1: ZeroDivisionError: division by zero"),
        ("import time; time.sleep(60)", 0.5, "TIMEOUT after 0.5 s"),
    ],
    ids=["fails", "too slow"],
)
def test_a_process_that_fails_is_a_line_of_the_table(
    code: str, limit: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        fails = [sys.executable, "-c", code]
        works = [sys.executable, "-c", "print('noise'); print('{\"containers\": \"equal\"}')"]
        return whole(fails if command[-1] == "flat" else works, **options)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(families, "LIMIT", limit)
    row = families.measure_apart("bart")
    assert row["containers"] == "equal"
    assert row["flat"] == row["flat_without_cache"] == expected


@pytest.mark.wide
def test_two_families_give_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    main(["families", "--only", ",".join(CHEAP), "--results", str(tmp_path)])
    with (tmp_path / "families.csv").open(newline="") as file:
        rows = {row["family"]: row for row in csv.DictReader(file)}
    assert set(rows) == set(CHEAP)
    for name, row in rows.items():
        assert row["kind"] == FAMILIES[name].kind
        assert row["containers"] == "equal"
        assert row["flat"] in ("equal", "equal+refused")
        assert float(row["containers_s"]) > 0
        calls = 2 if name == "convnext" else 12
        assert f"of {calls} calls equal" in row["flat_detail"]
        assert row["command"].startswith("python -m benchmark families --only olmo2,convnext")
    shown = capsys.readouterr().out
    assert "olmo2 (1 of 2): containers equal" in shown, "progress is shown"
    assert "containers: 2 equal" in shown
