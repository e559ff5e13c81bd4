"""The entry point: keys, options, refusals, and that a failed call changes nothing."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from slapo.command import main
from slapo.model_schedule import (
    Recipe,
    Stack,
    apply_schedule,
    recipe_keys,
    recipe_of,
    register_recipe,
    register_schedule,
    unregister,
)
from slapo.op import RMSNorm
from slapo.op.linear_loss import LossHead
from slapo.verify.placement.offline import fake_world
from tests.fingerprint import refused
from tests.model_schedule.models import MODELS, transformers
from tests.primitives.models import Block


def llama(**changes: Any) -> nn.Module:
    return MODELS["llama"].build(**changes)


# --- keys ----------------------------------------------------------------------------------------
def test_own_recipe() -> None:
    @register_recipe("blocks")
    def blocks(config: Any) -> Recipe:
        """Blocks of my own."""
        block = {"fc1": "sum_grad, columns", "fc2": "rows"}
        return Recipe((Stack("blocks", block),), heads="", counts="")

    try:
        model = nn.Module()
        model.blocks = nn.ModuleList(Block() for _ in range(2))
        sch = apply_schedule(model, "blocks", ckpt_ratio=1.0)
        assert "CheckPointWrapper" in str(sch["blocks.1"].mod)
    finally:
        unregister("blocks")
    with pytest.raises(KeyError):
        unregister("blocks")


def test_own_schedule() -> None:
    @register_schedule()
    def mine(model: nn.Module, **config: Any) -> slapo.Schedule:
        assert config == {"prefix": "a", "depth": 3}
        return slapo.create_schedule(model)

    try:
        assert apply_schedule(nn.Linear(2, 2), "mine", prefix="a", depth=3).path == ""
    finally:
        unregister("mine")


def test_a_schedule_in_place_of_a_model() -> None:
    sch = slapo.create_schedule(llama())
    assert apply_schedule(sch, "llama") is sch


def test_classes_of_a_family() -> None:
    config = MODELS["bert"].build().config
    for name, prefix in (
        ("BertModel", ""),
        ("BertForSequenceClassification", "bert"),
        ("BertForPreTraining", ""),
        ("BertLMHeadModel", ""),
    ):
        model = getattr(transformers, name)(copy.deepcopy(config)).eval()
        ids = torch.randint(3, 100, (2, 7))
        before = model(ids)[0]
        sch = apply_schedule(model, "bert", model_config=config, prefix=prefix, ckpt_ratio=1.0)
        after = slapo.build(sch)[0](ids)[0]
        torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("t5", "T5EncoderModel"),
        ("t5", "T5Model"),
        ("gpt2", "GPT2ForSequenceClassification"),
        ("llama", "LlamaForSequenceClassification"),
        ("llama", "LlamaModel"),
        ("vit", "ViTModel"),
    ],
)
def test_other_classes_of_a_family_over_two_ranks(key: str, name: str) -> None:
    config = MODELS[key].build().config
    config.pad_token_id = 0
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    inputs = dict(MODELS[key].inputs(3, 8))
    labels = inputs.pop("labels")
    if name == "T5Model":
        inputs["decoder_input_ids"] = labels.clamp(min=0)
    with fake_world(2, 1):
        slapo.check(apply_schedule(model, key, ckpt_ratio=1.0), inputs)


# --- options -------------------------------------------------------------------------------------
def test_an_attention_that_is_not_installed() -> None:
    with pytest.raises((ValueError, ImportError), match="flash"):
        apply_schedule(llama(), "llama", attn_op_name="flash")


def test_a_failure_half_way_changes_nothing() -> None:
    sch = slapo.create_schedule(llama())
    attention = sch.mod.config._attn_implementation
    options: dict[str, Any] = {"ckpt_ratio": 1.0, "pipeline_cuts": 2, "bf16": True}
    options["example_inputs"] = {"no_such_input": 1}
    with refused(sch, slapo.SlapoError, r"need a trace, but .*forward itself fails, at"):
        apply_schedule(sch, "llama", **options)
    assert sch.mod.config._attn_implementation == attention


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_types(name: str, dtype: torch.dtype) -> None:
    sch = apply_schedule(llama(), "llama", **{name: True})
    assert {p.dtype for p in sch.mod.parameters()} == {dtype}
    assert {b.dtype for b in sch.mod.buffers()} == {torch.float32}  # rotary frequencies


def test_a_forward_put_on_a_module_stays_without_kernels() -> None:
    """``tests/golden/mistakes/apply_schedule.txt`` has the refusal with kernels."""
    model: Any = llama()
    norm = model.model.norm
    plain = norm.forward
    norm.forward = lambda x: 2.0 * plain(x)
    with pytest.raises(ValueError, match="'forward'"):
        RMSNorm.like(norm)
    apply_schedule(model, "llama", kernels=False, model_config=copy.deepcopy(model.config))


def test_no_values_yet() -> None:
    with slapo.init_empty_weights():
        model = llama()
    built, _ = slapo.build(apply_schedule(model, "llama", fused_loss=True))
    assert not any(p.is_meta for p in built.parameters())
    assert built(**MODELS["llama"].inputs(2, 5)).loss.isfinite()


def test_checkpoints_by_method() -> None:
    sch = apply_schedule(llama(), "llama", ckpt_ratio=0.5, checkpoint_method="head")
    wrapped = ["CheckPointWrapper" in str(sch[f"model.layers.{n}"].mod) for n in range(4)]
    assert wrapped == [True, True, False, False]


def test_fused_loss_without_labels_and_by_position() -> None:
    model = llama().eval()
    inputs = MODELS["llama"].inputs(2, 5)
    labels = inputs.pop("labels")
    whole = model(**inputs, labels=labels)
    built, _ = slapo.build(apply_schedule(model, "llama", fused_loss=True))
    assert isinstance(built.lm_head, LossHead)
    torch.testing.assert_close(built(**inputs).logits, whole.logits)
    by_position = built(inputs["input_ids"], inputs["attention_mask"], labels=labels)
    assert by_position.logits is None
    torch.testing.assert_close(by_position.loss, whole.loss)


def test_a_model_that_changes_its_logits_by_a_hook() -> None:
    model = llama()
    model.lm_head.register_forward_hook(lambda module, args, output: 0.5 * output)
    built, _ = slapo.build(apply_schedule(model, "llama", fused_loss=True))
    with pytest.raises(slapo.SlapoError, match="changes its logits after the head"):
        built(**MODELS["llama"].inputs(2, 5))


def test_a_record_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    inputs = MODELS["llama"].inputs(2, 5)
    sch = apply_schedule(llama(), "llama", ckpt_ratio=0.5, fused_loss=True)
    sch.record.save(path)
    again = slapo.replay(llama(), path)
    assert str(again.mod) == str(sch.mod)
    assert torch.equal(again.mod(**inputs).loss, sch.mod(**inputs).loss)


# --- command -------------------------------------------------------------------------------------
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{key} " in listed for key in [*recipe_keys(), "auto", "draft"])
    assert main(["recipes", "t5"]) == 0
    shown = capsys.readouterr().out
    assert "read=key_value_states" in shown
    assert "fused_loss" in shown
    assert str(recipe_of("t5", transformers.T5Config())) in shown
    assert main(["recipes", "wideresnet"]) == 0
    assert "refuses sequence_parallel" in capsys.readouterr().out
    for key, says in [("auto", "recipe of its family, or else"), ("draft", "``ckpt_ratio``")]:
        assert main(["recipes", key]) == 0
        assert says in capsys.readouterr().out


def test_command_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["recipes", "llama"]) == 1
    assert capsys.readouterr().err.startswith(
        "the table of a recipe needs the package transformers"
    )


@pytest.mark.parametrize("key", recipe_keys())
def test_recipes_are_short(key: str) -> None:
    """What is true of a family is a table: the published schedules had 250 to 660 lines."""
    import inspect

    maker = recipe_of.__globals__["_RECIPES"][key]
    assert len(inspect.getsource(maker).splitlines()) <= 40
