"""``examples/train_3d.py`` and ``examples/finetune.py``."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from slapo.framework_dialect import get_dialect_cls
from slapo.model_schedule import recipe_keys
from tests.distributed import run_distributed
from tests.examples.launch import ROOT, start

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
from transformers import AutoModelForCausalLM

from examples import tiny_folder, train_3d
from examples.parallel_models import MODELS

SMALL = "--hidden 32 --length 16 --layers 2 --batch 4 --steps 30 --micro-batches 2 --device cpu"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def launch(
    processes: int, arguments: str, by_torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    given = [*SMALL.split(), *arguments.split()]
    return start("train_3d.py", processes, given, ROOT, by_torchrun)


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
    done = launch(processes, arguments, by_torchrun="deepspeed" in arguments)
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
        ("--pp 3", "pp=3, dp=1, tp=1 needs 3 processes, but the job has 2"),
        ("--pp 2 --batch 1", "a batch of 1 samples cannot be split into micro_batches=2"),
        ("--pp 2 --target deepspeed --zero 3", "ZeRO"),
        (
            "--pp 2 --model albert",
            "pipeline_cuts=2 does not fit this family: its layers run several",
        ),
    ],
)
def test_mistakes(arguments: str, message: str) -> None:
    if "deepspeed" in arguments:
        pytest.importorskip("deepspeed")
    done = launch(2, arguments)
    assert done.returncode != 0
    assert re.search(f"^train_3d.py: .*{re.escape(message)}", done.stderr, re.M), done.stderr
    assert "Traceback" not in done.stderr.partition("train_3d.py: ")[0]


# --- every model ---------------------------------------------------------------------------------
#: Batches differ, so that two losses tell little: the means of the first and the last five do.
EVERY = "--hidden 32 --length 16 --layers 2 --micro-batches 2 --device cpu"
TEXT, IMAGES = "--batch 8 --steps 16 --lr 5e-3", "--batch 32 --steps 40 --lr 1e-3"
#: Key of a recipe -> key of the model here that shows it.
SHOWN_BY = {"gemma3": "gemma3_text"}


def train_all(
    rank: int, world_size: int, keys: list[str], options: str
) -> dict[str, list[float] | str]:
    """Key -> losses; or what was refused."""
    found: dict[str, Any] = {}
    for key in keys:
        sizes = IMAGES if MODELS[key].pixels else TEXT
        arguments = f"{EVERY} {sizes} --model {key} {options}".split()
        try:
            found[key] = train_3d.run(train_3d.parse(arguments))
        except ValueError as error:
            found[key] = str(error)
    return found


def test_every_recipe_has_a_model() -> None:
    assert {SHOWN_BY.get(key, key) for key in recipe_keys()} == set(MODELS)


#: Cut in stages and by tensor parallelism.
BOTH = ["gpt2", "t5", "vit"]


@pytest.mark.parametrize(
    "others",
    [
        ["llama", "bert", "albert"],
        pytest.param(list(MODELS), marks=pytest.mark.wide, id="all"),
    ],
)
def test_every_model_trains(others: list[str]) -> None:
    """Each by tensor parallelism, or cut in stages; three in both ways, which compute the same.

    Losses differ by the order of sums in float32, which AdamW's division by small second moments
    amplifies from step to step.
    """
    runs = {
        options: run_distributed(train_all, 2, keys, options, timeout=280)[0]
        for options, keys in (
            ("--tp 2", [*BOTH, *others[::2]]),
            ("--pp 2", [*BOTH, *others[1::2], "albert"]),
        )
    }
    refused = runs["--pp 2"].pop("albert")
    assert "pipeline_cuts=2 does not fit this family" in refused
    assert {key for found in runs.values() for key in found} | {"albert"} == {*BOTH, *others}
    for options, found in runs.items():
        for key, losses in found.items():
            assert isinstance(losses, list), (options, key, losses)
            assert sum(losses[-5:]) < 0.99 * sum(losses[:5]), (options, key, losses)
    for key in BOTH:
        tensor, stages = (runs[options][key][:10] for options in ("--tp 2", "--pp 2"))
        assert stages == pytest.approx(tensor, rel=2e-5), key


def test_options_of_recipes_leave_the_loss_as_it_is() -> None:
    plain, spread, fused = (
        run_distributed(train_all, 2, ["llama", "t5"], f"--tp 2 {options}", timeout=280)[0]
        for options in ("", "--sequence-parallel", "--fused-loss")
    )
    for key, losses in plain.items():
        assert spread[key] == pytest.approx(losses, rel=1e-4)
        assert fused[key] == pytest.approx(losses, rel=1e-4)


# --- examples/finetune.py ------------------------------------------------------------------------
def test_fine_tuning(tmp_path: Path) -> None:
    """The script of the README with its tiny folder; then once more, at another layout."""
    tiny_folder.main(str(tmp_path / "tiny"))
    given = ["tiny", str(ROOT / "README.md"), "--steps"]
    first = start("finetune.py", 2, [*given, "5"], tmp_path)
    assert first.returncode == 0, first.stderr[-3000:]
    shutil.rmtree(tmp_path / "tuned")
    second = start("finetune.py", 2, [*given, "15", "--tp", "1"], tmp_path)
    assert second.returncode == 0, second.stderr[-3000:]
    losses = re.findall(r"^step (\d+): loss (\d\.\d+)", first.stdout + second.stdout, re.M)
    assert [int(step) for step, _ in losses] == [5, 10, 15]
    assert float(losses[0][1]) > float(losses[-1][1]) + 1
    before, tuned = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        for folder in ("tiny", "tuned")
    )
    assert {k: v.shape for k, v in tuned.items()} == {k: v.shape for k, v in before.items()}
    assert not any(torch.equal(tuned[name], before[name]) for name in before)
