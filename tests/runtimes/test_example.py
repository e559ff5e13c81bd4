"""``examples/train_3d.py`` and ``examples/finetune.py`` as a user starts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slapo.framework_dialect import get_dialect_cls

pytest.importorskip("transformers")
from examples import finetune

ROOT = Path(__file__).parents[2]
SMALL = "--hidden 32 --length 16 --layers 2 --batch 4 --steps 30 --micro-batches 2 --device cpu"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def launch(processes: int, arguments: str) -> subprocess.CompletedProcess[str]:
    return start("train_3d.py", processes, [*SMALL.split(), *arguments.split()], ROOT)


def start(
    script: str, processes: int, arguments: list[str], where: Path
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(ROOT / "examples" / script)]
    return subprocess.run(
        [*command, *arguments],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("processes", "arguments"),
    [
        (4, "--model gpt2 --pp 2 --tp 2 --checkpoint-ratio 0.5 --meta"),
        (2, "--model t5 --pp 2 --target deepspeed --zero 1"),
        (2, "--model llama --dp 2 --data-parallel fsdp --dtype bfloat16"),
        (1, "--model bert"),
    ],
    ids=["torch", "deepspeed", "fsdp", "alone"],
)
def test_it_trains(processes: int, arguments: str) -> None:
    if "deepspeed" in arguments:
        pytest.importorskip("deepspeed")
    done = launch(processes, arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"loss (\d+\.\d+) -> (\d+\.\d+), (\d+) tokens/s", done.stdout)
    assert found, done.stdout
    assert float(found[2]) < float(found[1])
    target = "deepspeed" if "deepspeed" in arguments else "torch"
    read = get_dialect_cls("log_parser", target).parse_log(done.stdout)
    assert read.error_code == 0
    assert read.samples_per_sec == pytest.approx(float(found[3]) / 16, rel=0.05)
    assert read.param_per_gpu > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pp 3", "pp=3, dp=1, tp=1 makes 3 processes, and the job has 2"),
        ("--pp 2 --batch 5", "a batch of 5 samples is not divisible by micro_batches=2"),
        ("--pp 2 --target deepspeed --zero 3", "ZeRO"),
    ],
)
def test_mistakes(arguments: str, message: str) -> None:
    if "deepspeed" in arguments:
        pytest.importorskip("deepspeed")
    done = launch(2, arguments)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("pretrained", [False, True])
def test_fine_tuning(tmp_path: Path, pretrained: bool) -> None:
    arguments = ["--steps", "6"]
    if pretrained:
        finetune.load().save_pretrained(tmp_path / "model")
        arguments += ["--model", "model"]
    done = start("finetune.py", 4, arguments, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\d\.\d+)", done.stdout, re.M)]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    whole = finetune.load().state_dict()
    slices = [torch.load(tmp_path / f"model-tp{rank}-of-2.pt") for rank in range(2)]
    assert all(piece.keys() == whole.keys() for piece in slices)
    name = "model.layers.0.mlp.up_proj.weight"
    assert [piece[name].shape for piece in slices] == [(96, 64)] * 2
