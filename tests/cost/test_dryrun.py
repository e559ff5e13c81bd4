"""Predictions of one process against steps that were run; what the dry run refuses."""

import dataclasses
import gc
import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo
from benchmark.measure import allocated
from slapo.cost import MACHINES, Machine, Update, dryrun
from slapo.cost.command import main
from slapo.cost.models import for_training, shrink, training_inputs, whole_on_meta
from slapo.model_schedule import apply_schedule, register_schedule
from slapo.model_schedule.registry import unregister
from tests.cost.real import BATCH, LENGTH, config_of

FAMILIES = ("gpt2", "bert", "t5", "llama")


def measured_peak(key: str, count: int, **options: Any) -> int:
    """By the events of the allocator, over two steps."""
    torch.manual_seed(0)
    model = for_training(config_of(key)).train()
    apply_schedule(model, key, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = training_inputs(model, BATCH // count, LENGTH)
    tensors = [*model.parameters(), *model.buffers(), *inputs.values()]
    static = sum(
        {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()
    )

    def loss() -> Tensor:
        return model(**inputs).loss  # the output is gone before the backward

    def steps() -> None:
        for _ in range(2):
            for _ in range(count):
                loss().backward()
            optimizer.step()
            optimizer.zero_grad()

    gc.collect()
    return static + allocated(steps)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("key", FAMILIES)
def test_peak_of_one_process(key: str, ratio: float, count: int) -> None:
    found = dryrun(
        key,
        config_of(key),
        machine="cpu",
        batch=BATCH,
        micro_batches=count,
        seq_len=LENGTH,
        ckpt_ratio=ratio,
    )
    assert found.peak == pytest.approx(measured_peak(key, count, ckpt_ratio=ratio), rel=0.03)


def test_a_deep_model_is_its_layers() -> None:
    """Few layers for many give what all layers give, which a function of one's own runs."""
    config = config_of("llama", layers=9)
    options = {"machine": "cpu", "batch": 4, "seq_len": 32}
    few = dryrun("llama", config, **options)
    all_layers = dryrun(lambda sch: apply_schedule(sch, "llama"), config, **options)
    assert few.peak == all_layers.peak
    assert few.time.total == pytest.approx(all_layers.time.total)
    assert few.parameters == sum(p.numel() for p in for_training(config).parameters())


def test_layers_of_several_kinds_are_kept() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    (stack,) = shrink(whole_on_meta(config)).stacks
    kinds = config.layer_types
    assert len(set(kinds)) == 2
    assert len(stack.kept) == 4
    assert all(kinds[stack.kept[place]] == kinds[n] for n, place in enumerate(stack.stand_ins))
    found = dryrun("gemma3_text", config, machine="cpu", seq_len=32)
    whole = dryrun(
        lambda sch: apply_schedule(sch, "gemma3_text"), config, machine="cpu", seq_len=32
    )
    assert found.peak == whole.peak


def test_cuts_of_two_stacks_are_one_list_or_two() -> None:
    ask = partial(dryrun, "t5", config_of("t5", layers=2), mesh={"pp": 3}, batch=3, micro_batches=3)
    one, two = (ask(seq_len=16, pipeline_cuts=cuts) for cuts in ([0, 2], [[0], [0]]))
    assert one.stages == two.stages


def test_layout_of_a_cluster() -> None:
    """What shards, stages and replicas must do to figures, whatever these are."""
    config = config_of("llama", layers=8)
    ask = partial(
        dryrun, "llama", config, batch=8, seq_len=64, micro_batches=8, dtype=torch.bfloat16
    )
    one = ask(target="megatron")
    split = ask(target="megatron", mesh={"tp": 2})
    staged = ask(target="megatron", mesh={"pp": 4})
    shared = ask(target="megatron", mesh={"dp": 8}, zero=1)
    assert split.stages[0].parameters < 0.6 * one.stages[0].parameters
    assert len(staged.stages) == 4
    assert staged.time.bubble > 0 == one.time.bubble
    # 1F1B: the earlier a stage is, the more micro-batches are in flight.
    assert staged.stages[1].activations > staged.stages[2].activations
    gpipe = ask(target="megatron", mesh={"pp": 4}, schedule="gpipe")
    assert gpipe.stages[2].activations > staged.stages[2].activations
    assert shared.stages[0].optimizer < 0.2 * one.stages[0].optimizer
    assert shared.time.data_parallel > 0
    assert split.time.tensor_parallel > 0
    assert shared.tokens == 8 * one.tokens
    assert 0 < one.mfu < 1
    again = ask(target="megatron", ckpt_ratio=1.0)
    assert again.stages[0].activations < one.stages[0].activations
    assert again.time.backward > one.time.backward
    assert again.flops == one.flops


def test_words_and_data(tmp_path: Path) -> None:
    found = slapo.dryrun("gpt2", config_of("gpt2"), machine="a100-80gb", mesh={"pp": 2}, batch=2,
                         micro_batches=2, seq_len=32)  # fmt: skip
    text = str(found)
    assert "GPT2LMHeadModel" in text
    assert "2 x a100-80gb (data sheet)" in text
    assert "fits" in text
    data = json.loads(json.dumps(found.data()))
    assert data["peak"] == max(stage["peak"] for stage in data["stages"])
    assert data["seconds"]["total"] == pytest.approx(found.time.total)
    found.plot(str(tmp_path / "bars.png"))
    assert (tmp_path / "bars.png").stat().st_size > 1000


def test_updates_keep_what_optimizers_keep() -> None:
    assert Update.of(torch.optim.AdamW).state == 8
    assert Update.of(partial(torch.optim.SGD, momentum=0.9)).state == 4
    together = Update.of(partial(torch.optim.AdamW, foreach=True))
    assert together.of_all > 0 == Update.of(torch.optim.AdamW).of_all
    with pytest.raises(TypeError, match="returned a NoneType"):
        Update.of(lambda parameters: None)  # type: ignore[arg-type, return-value]


class Twice(nn.Module):
    """Its layers run twice, so that none can stand in for others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x).relu()
        return x


def test_layers_that_run_twice_are_all_run() -> None:
    @register_schedule("twice")
    def twice(model: Any, **options: Any) -> slapo.Schedule:
        sch = slapo.create_schedule(model)
        if options.get("ckpt_ratio"):
            for block in sch.select("blocks.*"):
                block.checkpoint()
        return sch

    try:
        given: dict[str, Any] = {
            "machine": "cpu",
            "batch": 64,
            "inputs": lambda samples: {"x": torch.ones(samples, 16, requires_grad=True)},
        }
        found = dryrun("twice", Twice, **given)
        assert found.stages[0].parameters == 4 * found.parameters
        assert found.parameters == 6 * (16 * 32 + 32 + 32 * 16 + 16)
        again = dryrun("twice", Twice, ckpt_ratio=1.0, **given)
        assert again.stages[0].activations < found.stages[0].activations
        with pytest.raises(slapo.SlapoError, match="run in order, each once"):
            dryrun("twice", Twice, mesh={"pp": 2}, **{**given, "micro_batches": 2})
    finally:
        unregister("twice")


def test_it_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Neither a group, nor random numbers drawn, nor Transformers changed, nor notes.

    Torch gives errors a prefix with the rank, and keeps it when a group ends.
    """
    from transformers.utils import import_utils

    before, asked = torch.random.get_rng_state(), import_utils.is_fake_tensor
    printed = sys.excepthook
    config = config_of("gpt2")
    text = config.to_json_string()
    level = logging.getLogger("slapo").level
    with caplog.at_level(logging.INFO):
        dryrun("gpt2", config, mesh={"tp": 2}, seq_len=16)
    assert not [record for record in caplog.records if record.name.startswith("slapo")]
    assert logging.getLogger("slapo").level == level
    assert not torch.distributed.is_initialized()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert import_utils.is_fake_tensor is asked
    assert sys.excepthook is printed
    assert config.to_json_string() == text


# --- the command --------------------------------------------------------------------------------
@pytest.fixture
def config_file(tmp_path: Path) -> str:
    config_of("llama", layers=8).save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_command_prints_a_table(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--nodes 2 --tp 2 --pp 2 --batch 4 --micro-batches 4 --seq-len 32 --sp"
    assert main(["llama", config_file, *layout.split()]) == 0
    out = capsys.readouterr().out
    assert "on 16 x h100-80gb" in out
    assert "dp 4" in out
    tiny = "1e6,1e12,1e11,1e10"
    assert main(["llama", config_file, "--machine", tiny, "--seq-len", "32", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main(["llama", config_file, "--tp", "3", "--nodes", "1"]) == 2
    assert "not divisible by" in capsys.readouterr().err


def test_a_config_that_makes_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    assert main(["llama", str(tmp_path)]) == 2
    assert "is not a Transformers config" in capsys.readouterr().err
    for entry in ('"num_hidden_layers": "six"', '"hidden_size": 60, "num_attention_heads": 8'):
        (tmp_path / "config.json").write_text(f'{{"model_type": "llama", {entry}}}')
        assert main(["llama", str(tmp_path)]) == 2
        assert "is not a Transformers config" in capsys.readouterr().err
    wrong = '{"model_type": "llama", "architectures": ["BertForMaskedLM"]}'
    (tmp_path / "config.json").write_text(wrong)
    assert main(["llama", str(tmp_path)]) == 2
    assert "LlamaConfig cannot make a model: " in capsys.readouterr().err


def test_every_machine_has_its_figures() -> None:
    for name, machine in MACHINES.items():
        assert machine.name == name
        assert machine.peak_flops(torch.float16) >= machine.peak_flops(torch.float32)


def test_an_accelerator_fuses_attention_with_dropout() -> None:
    """A processor keeps the scores of all heads, of ``length ** 2`` each, for its backward."""
    ask = partial(dryrun, "gpt2", config_of("gpt2"), batch=4, seq_len=256)
    scores = 4 * 8 * 256 * 256 * 4  # samples, heads, tokens by tokens, bytes
    here = ask(machine="cpu").stages[0].activations
    there = ask(machine="v100-32gb").stages[0].activations
    assert here - there > 4 * scores
    assert torch.nn.functional.scaled_dot_product_attention.__module__ != "slapo.cost.runs"


# --- what is kept from call to call -------------------------------------------------------------
def test_a_function_is_asked_at_every_call() -> None:
    """A sweep over a variable that it reads would else compare one model with itself."""
    count = 2

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))

    ask = partial(
        dryrun, lambda sch: None, make, machine="cpu", inputs=lambda n: {"input": torch.ones(n, 16)}
    )
    small = ask()
    assert small.tokens == 0
    assert "tokens/s" not in str(small)
    count = 8
    assert ask().parameters == 4 * small.parameters


def test_attention_of_a_config_tells_runs_apart() -> None:
    eager, sdpa = config_of("llama"), config_of("llama")
    eager._attn_implementation, sdpa._attn_implementation = "eager", "sdpa"
    ask = partial(dryrun, "llama", machine="cpu", batch=4, seq_len=128, attn_op_name=None)
    first = ask(model_config=sdpa).peak, ask(model_config=eager).peak
    assert first[0] < first[1]
    assert (ask(model_config=sdpa).peak, ask(model_config=eager).peak) == first


def test_operations_are_those_of_the_model_on_any_ranks() -> None:
    ask = partial(dryrun, "bert", config_of("bert"), machine="cpu", batch=4, seq_len=32)
    one = ask()
    assert ask(mesh={"tp": 2}).flops == one.flops
    assert ask(mesh={"dp": 2}).flops == 2 * one.flops
    # Six for each parameter in a matrix and token (Kaplan et al. 2020), and the attention's.
    assert one.flops == pytest.approx(6 * one.parameters * one.tokens, rel=0.15)


def test_gradients_travel_as_engines_add_them() -> None:
    """In float32 on PyTorch; of every micro-batch with ZeRO-2."""
    slow = Machine("slow", 1e12, 1e15, 1e13, inside=1e8)
    ask = partial(dryrun, "llama", config_of("llama"), machine=slow, mesh={"dp": 2}, seq_len=16)
    single, half = ask(), ask(dtype=torch.bfloat16)
    assert half.time.data_parallel == pytest.approx(single.time.data_parallel, rel=0.02)
    zero = partial(ask, target="deepspeed", batch=8)
    once, often = zero(zero=2, micro_batches=1), zero(zero=2, micro_batches=8)
    assert often.time.data_parallel > 3 * once.time.data_parallel
    assert zero(zero=1, micro_batches=8).time.data_parallel == pytest.approx(
        zero(zero=1, micro_batches=1).time.data_parallel, rel=0.05
    )


def test_who_reduces_and_who_scatters() -> None:
    """DeepSpeed all-reduces for ZeRO 1, and gathers; Megatron gives each rank its part at once."""
    slow = Machine("slow", 1e12, 1e15, 1e13, inside=1e8, overhead=0)
    ask = partial(dryrun, "llama", config_of("llama"), mesh={"dp": 2}, seq_len=16)

    def seconds(machine: Machine = slow, **options: Any) -> float:
        return ask(machine=machine, **options).time.data_parallel

    whole = seconds()
    assert seconds(target="deepspeed", zero=1) == pytest.approx(1.5 * whole, rel=0.02)
    assert seconds(target="megatron", zero=1) == pytest.approx(whole, rel=0.02)
    # As slow as gloo's, which has no ring for it.
    gloo = dataclasses.replace(slow, links={"reduce_scatter": 0.25e8})
    assert seconds(gloo) == whole
    assert seconds(gloo, target="megatron", zero=1) == pytest.approx(2.5 * whole, rel=0.02)
    assert seconds(gloo, data_parallel="fsdp") > 1.5 * seconds(data_parallel="fsdp")


def test_reductions_hide_behind_nothing_on_a_processor() -> None:
    """Its cores compute, copy and add; so gathering parameters at each use costs most."""
    device = Machine("device", 1e12, 1e10, 1e10, inside=1e9)
    cores = dataclasses.replace(device, is_asynchronous=False)
    ask = partial(dryrun, "llama", config_of("llama"), mesh={"dp": 2}, seq_len=16, batch=8)
    assert ask(machine=cores).time.data_parallel > ask(machine=device).time.data_parallel
    zero = partial(ask, machine=cores, target="deepspeed", micro_batches=2)
    once, each_use = (zero(zero=stage).time.data_parallel for stage in (1, 3))
    assert each_use > 1.5 * once


def test_computed_positions_have_no_end() -> None:
    dryrun("llama", config_of("llama"), seq_len=512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_named_class_has_the_dtype_of_its_config(dtype: torch.dtype) -> None:
    config = config_of("gpt2")
    config.architectures, config.dtype = ["GPT2LMHeadModel"], dtype
    assert dryrun("gpt2", config, seq_len=16).dtype is dtype
    assert dryrun("gpt2", config, seq_len=16, dtype=torch.float16).dtype is torch.float16
