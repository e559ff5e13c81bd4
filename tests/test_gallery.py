"""The programs of the gallery, each from top to bottom as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import run_script

ROOT = Path(__file__).parent.parent
GALLERY = ROOT / "docs" / "gallery"

#: What each prints, in this order.
SHOWN = {
    "quick_start": [
        "BertIntermediate\n",
        "LinearWithSeparateBias(in_features=64, out_features=128, bias=True)  <- decompose()",
        "BiasGeLU_0",
        "loss of the model 6.2517, of the scheduled model 6.2517",
        "step 4: loss 5.",
    ],
    "mlp_on_several_devices": [
        "linear1: Linear(in_features=64, out_features=128, bias=True)  <- shard('weight', axis=0)",
        "16576 of 33088 parameters on each device",
        "step 2: loss 0.9",
    ],
    "attention_on_one_device": [
        "traced: True",
        "softmax(",
        "found: ['transpose_3', 'matmul', 'mul', 'softmax', 'dropout', 'matmul_1']",
        "self.FastAttention_0(",
        "refused: Verify: the output differs, first at '1.attention.Forgetful_0' (Forgetful)",
    ],
    "debugging_with_print": [
        "traced: True",
        "input: tensor([[1., 1., 1., 1.]])",
        "after the linear layer: tensor([[-0.5594,  0.4603]]",
        "input: tensor([[10., 10., 10., 10.]])",
        "into the activation: tensor(",
        "Shown_0: ReLU()",
    ],
}


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check(name: str, printed: str) -> None:
    at = 0
    for words in SHOWN[name]:
        at = printed.find(words, at)
        assert at >= 0, f"{words!r} is not where it belongs in\n{printed}"


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_it_runs_from_top_to_bottom(name: str) -> None:
    if name == "quick_start":
        pytest.importorskip("transformers")
    done = run_script(GALLERY / f"{name}.py", [], 0, ROOT, warn_by="error")
    assert done.returncode == 0, done.stderr[-3000:]
    check(name, done.stdout)


@pytest.mark.distributed
def test_several_devices_by_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    name = "mlp_on_several_devices"
    check(name, run(*launcher, str(GALLERY / f"{name}.py")))


def test_every_program_is_listed_and_run() -> None:
    programs = {path.stem for path in GALLERY.glob("*.py")}
    assert programs == set(SHOWN)
    page = (ROOT / "docs" / "README.md").read_text()
    assert all(f"(gallery/{name}.py)" in page for name in programs)
