"""``slapo train``: a folder and a text in, a folder out."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from slapo.command import main

transformers = pytest.importorskip("transformers")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model, and a text."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, **heads, vocab_size=256)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    lines = [f"line {number} of a text that repeats itself" for number in range(200)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    return tmp_path


ASK = ["train", "model", "--seq", "16", "--lr", "0.01", "--gpus", "2"]


@pytest.mark.distributed
@pytest.mark.slow
def test_a_folder_comes_out(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*ASK, "--data", "text.jsonl", "--steps", "12", "--tp", "2"]) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    losses = [float(line.partition("loss ")[2].partition(",")[0]) for line in said]
    assert losses[0] > 5
    assert losses[-1] < losses[0] - 1
    assert "eval_loss" in said[-1]
    trained = transformers.AutoModelForCausalLM.from_pretrained(here / "tuned")
    old = transformers.AutoModelForCausalLM.from_pretrained(here / "model")
    tokens = torch.tensor([list(b"line 3 of a text")])
    with torch.no_grad():
        new, before = (each(tokens, labels=tokens).loss for each in (trained, old))
    assert float(new) < float(before) - 1
    assert trained.config.use_cache  # as before: it is for generation
    program = (here / "tuned-run" / "train.py").read_text()
    assert "slapo.init_mesh(dp=1, tp=2)" in program
    assert main([*ASK, "--data", "text.jsonl"]) == 2
    assert "already holds files; pass a new folder" in capfd.readouterr().err


@pytest.mark.distributed
@pytest.mark.slow
def test_weights_of_half_precision(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are float32 while they are trained, and are rounded once, at the end."""
    config = transformers.AutoConfig.from_pretrained(here / "model", tie_word_embeddings=True)
    before = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    before.save_pretrained(here / "model", max_shard_size="20KB")
    given = [*ASK[:-2], "--data", "text.txt", "--steps", "2"]
    assert main([*given, "--lr", "1e-9"]) == 0  # nothing is left of such steps when rounded
    capfd.readouterr()
    tuned = transformers.AutoModelForCausalLM.from_pretrained(here / "tuned")
    assert tuned.lm_head.weight is tuned.model.embed_tokens.weight
    for name, tensor in before.state_dict().items():
        assert torch.equal(tuned.state_dict()[name], tensor), name


@pytest.mark.distributed
@pytest.mark.slow
def test_the_same_command_goes_on(here: Path) -> None:
    one = ["--gpus", "1", "--data", "text.txt", "--steps", "80"]
    command = [sys.executable, "-m", "slapo", *ASK, *one]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list(here.glob("tuned-run/step_*0")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does
    job.communicate(timeout=120)
    saved = max(int(path.name[5:]) for path in here.glob("tuned-run/step_????????"))
    assert 20 <= saved < 80
    assert not (here / "tuned").exists()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    steps = [int(line.split()[1][:-1]) for line in ended.stdout.splitlines() if "loss" in line]
    assert steps[0] > saved
    assert steps[-1] == 80
    assert (here / "tuned" / "model.safetensors").exists()


def test_the_program_is_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASK, "--data", "text.txt", "--print-script"]) == 0
    program = capsys.readouterr().out
    compile(program, "train.py", "exec")
    assert "$" not in program
    assert 'FOLDER, DATA = "model", "text.txt"' in program
    assert not (here / "tuned-run").exists()
