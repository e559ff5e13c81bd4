"""``slapo.suggest``: layouts that fit, the fastest first, and lines that run."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import slapo
from slapo.command import main
from slapo.cost import MACHINES, Machine
from tests.distributed import run_distributed

transformers = pytest.importorskip("transformers")


def config(**changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return transformers.LlamaConfig(**{**sizes, **heads, "vocab_size": 256, **changes})


def machine(mebibytes: float) -> Machine:
    return Machine("small", mebibytes * 2**20, 10e12, 500e9, inside=50e9, devices=4)


def run_lines(rank: int, world_size: int, lines: str) -> float:
    model = transformers.LlamaForCausalLM(config())
    model.config.use_cache = False
    slapo.set_random_seed(0)
    names: dict[str, Any] = {"slapo": slapo, "functools": functools, "torch": torch}
    names |= {"model": model, "loss_fn": lambda output, labels: output.loss}
    exec(lines, names)
    ids = torch.randint(256, (16, 16))
    return float(names["engine"].train_batch(iter([({"input_ids": ids, "labels": ids}, ids)])))


@pytest.mark.distributed
def test_the_lines_run() -> None:
    found = slapo.suggest(config(), machine=machine(512), gpus=2, seq_len=16, batch=16)
    lines = next(
        each.lines()
        for each in found.fitting
        if each.dry_run.layout.tp == 2 and each.dry_run.layout.target == "torch"
    )
    assert "sequence_parallel=True" in lines
    first, second = run_distributed(run_lines, 2, lines)
    assert first == second
    assert 5 < first < 6


def test_the_fastest_is_first() -> None:
    found = slapo.suggest(config(), machine="h100-80gb", gpus=4, seq_len=32, batch=32)
    speeds = [each.dry_run.tokens_per_second for each in found.fitting]
    assert speeds == sorted(speeds, reverse=True)
    layouts = [each.dry_run.layout for each in found.fitting]
    assert {layout.ranks for layout in layouts} == {4}
    assert {layout.batch * layout.dp for layout in layouts} == {32}
    assert {(layout.tp, layout.pp) for layout in layouts} == {
        (1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)
    }  # fmt: skip
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert any(layout.micro > 1 for layout in layouts)
    text = str(found)
    assert f"the fastest 10 of {len(layouts)} that fit" in text
    assert "slapo.init_mesh(pp=" in text


def test_more_is_recomputed_where_memory_is_short() -> None:
    ask: dict[str, Any] = {"gpus": 1, "seq_len": 1024, "batch": 1}
    long = config(max_position_embeddings=1024)
    plain = slapo.suggest(long, machine=machine(4096), **ask).best
    assert "ckpt_ratio" not in plain.options
    short = machine(plain.dry_run.peak / 2**20)  # of which a share is used
    assert slapo.suggest(long, machine=short, **ask).best.options["ckpt_ratio"] > 0


def test_what_would_fit() -> None:
    big = config(hidden_size=512, intermediate_size=2048, vocab_size=4096)
    found = slapo.suggest(big, machine=machine(128), gpus=1, seq_len=64)
    assert not found.fitting
    said = str(found)
    assert "nothing fits: LlamaForCausalLM takes" in said
    assert "would fit:" in said
    assert "of them, with pp" in said
    with pytest.raises(slapo.SlapoError, match="nothing fits"):
        _ = found.best


def test_a_batch_that_replicas_do_not_share() -> None:
    found = slapo.suggest(config(), machine="h100-80gb", gpus=4, seq_len=32, batch=3)
    assert any("3 samples cannot form micro-batches" in said for said in found.refused)


def test_a_model_without_a_recipe() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3}
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
    stranger = transformers.StableLmConfig(**sizes, intermediate_size=96, vocab_size=256)
    found = slapo.suggest(stranger, machine="h100-80gb", gpus=2, seq_len=16, batch=4)
    assert any(each.dry_run.layout.tp == 2 for each in found.fitting)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config().save_pretrained(tmp_path)
    ask = ["suggest", str(tmp_path), "--gpus", "2", "--seq", "16", "--batch", "4", "--count", "3"]
    assert main(ask) == 0
    shown = capsys.readouterr()
    assert "the fastest 3 of" in shown.out
    assert "mesh = slapo.init_mesh(" in shown.out
    assert "layouts fit so far" in shown.err
    assert main([*ask, "--machine", f"{2**20},1e12,1e11,1e10"]) == 1
    assert "nothing fits" in capsys.readouterr().out
    assert set(MACHINES)
