"""``examples/hf_trainer.py`` and ``hf_accelerate.py``: scheduled models in loops of others."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.examples.launch import start

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import AutoModelForCausalLM, PreTrainedModel

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SMALL = "--hidden 32 --layers 2 --length 48 --batch 3 --steps 8 --lr 3e-3 --cpu"
KINDS = {"hf_trainer.py": "LlamaForCausalLM", "hf_accelerate.py": "GPT2LMHeadModel"}


def train(script: str, processes: int, options: str, where: Path) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of each step, with six digits at least."""
    where.mkdir()
    done = start(script, processes, [*SMALL.split(), *options.split()], where)
    assert done.returncode == 0, done.stderr[-3000:]
    if script == "hf_accelerate.py":
        found = re.findall(r"^step \d+: loss (\S+), norm of the gradient (\S+)$", done.stdout, re.M)
        return [(float(loss), float(norm)) for loss, norm in found]
    assert "trained has the weights of a LlamaForCausalLM: True" in done.stdout
    history = json.loads((where / "trained" / "trainer_state.json").read_text())["log_history"]
    return [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


def read(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder / "trained")


@pytest.mark.parametrize(
    ("script", "processes", "options"),
    [
        pytest.param(script, *given, marks=[pytest.mark.wide] if (number + place) % 2 else [])
        for number, script in enumerate(KINDS)
        for place, given in enumerate([(0, "--checkpoint-ratio 1.0"), (2, "--accumulate 2")])
    ],
)
def test_training_is_that_of_the_unscheduled_model(
    tmp_path: Path, script: str, processes: int, options: str
) -> None:
    ours = train(script, processes, options, tmp_path / "ours")
    theirs = train(script, processes, f"{options} --unscheduled", tmp_path / "theirs")
    assert len(ours) == len(theirs) == 8
    for step, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        # Sums in another order, which AdamW amplifies from step to step.
        assert got == pytest.approx(expected, rel=1e-5 if step == 0 else 2e-4), step
    assert ours[-1][0] < 0.95 * ours[0][0]

    mine, other = read(tmp_path / "ours"), read(tmp_path / "theirs")
    assert type(mine).__name__ == type(other).__name__ == KINDS[script]
    assert mine.config.to_diff_dict() == other.config.to_diff_dict()
    ids = torch.arange(2 * 29).reshape(2, 29)
    with torch.no_grad():
        torch.testing.assert_close(
            mine(ids, labels=ids).loss, other(ids, labels=ids).loss, rtol=1e-3, atol=0
        )
