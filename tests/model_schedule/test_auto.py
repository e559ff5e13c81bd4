"""``auto``: models by the plan of their config, proved; and plans that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from slapo.model_schedule import apply_schedule, plans
from slapo.verify.placement.offline import fake_world
from tests.distributed import run_distributed
from tests.model_schedule.equality import difference
from tests.model_schedule.models import MODELS, tokens, transformers

MODES: dict[str, dict[str, Any]] = {
    "plan": {"parallel_vocabulary": False},
    "vocabulary": {},
    "slices": {"gather_logits": False},
    "fused": {"fused_loss": True, "ckpt_ratio": 0.5},
    "tokens": {"sequence_parallel": True},
    "all": {"sequence_parallel": True, "fused_loss": True, "ckpt_ratio": 1.0},
}
PLANNED = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "mixtral"]
TOLERANCE = 5e-6


def job(rank: int, world_size: int) -> dict[str, float]:
    return {
        f"{key} {mode}": max(difference(key, options, dist.group.WORLD, by="auto").values())
        for key in PLANNED
        for mode, options in MODES.items()
    }


def test_equal_to_the_model() -> None:
    for found in run_distributed(job, 2, timeout=300):
        assert all(value < TOLERANCE for value in found.values()), found


def few_heads(rank: int, world_size: int) -> dict[str, float]:
    return {
        f"{key} {mode}": max(difference(key, MODES[mode], dist.group.WORLD, by="auto").values())
        for key in ("llama", "qwen3", "mixtral")
        for mode in ("vocabulary", "tokens")
    }


def test_fewer_heads_of_keys_than_ranks() -> None:
    for found in run_distributed(few_heads, 4, timeout=300):
        assert all(value < TOLERANCE for value in found.values()), found


def test_packed_heads_of_keys_are_not_shared() -> None:
    sizes = {**SMALL, "intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, pad_token_id=0))
    before = str(model)
    with fake_world(4, 1), pytest.raises(ValueError, match="fewer than the 4 ranks"):
        apply_schedule(model, "auto")
    assert str(model) == before


def test_one_process() -> None:
    for key in PLANNED:
        assert max(difference(key, {"fused_loss": True}, by="auto").values()) < TOLERANCE


SMALL: dict[str, Any] = {"vocab_size": 131, "hidden_size": 32, "num_attention_heads": 4}
#: Families with neither a plan nor a recipe: class, config, whether logits change after the head.
UNKNOWN: list[tuple[str, str, dict[str, Any], bool]] = [
    ("DistilBertForMaskedLM", "DistilBertConfig", {"dim": 32, "n_layers": 2, "n_heads": 4}, False),
    ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, False),
    ("FalconForCausalLM", "FalconConfig", {**SMALL, "num_hidden_layers": 2}, False),
    ("MambaForCausalLM", "MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2}, False),
    (
        "BartForConditionalGeneration",
        "BartConfig",
        {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0},
        True,
    ),
]


def unknown(name: str, config: str, settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    off = {"vocab_size": 131, "dropout": 0.0, "attention_dropout": 0.0}
    made = getattr(transformers, config)(**{**off, **settings})
    made.use_cache = False
    return getattr(transformers, name)(made).train()


@pytest.mark.parametrize(("name", "config", "settings", "changes"), UNKNOWN)
def test_a_family_that_nothing_is_known_of(
    name: str, config: str, settings: dict[str, Any], changes: bool
) -> None:
    """One process: kernels, checkpoints, loss and stages need to know the layers alone."""
    model, other = (unknown(name, config, settings) for _ in range(2))
    inputs = {key: value for key, value in tokens(3, 9).items() if key != "attention_mask"}
    if changes:
        with pytest.raises(ValueError, match="changes its logits after the head"):
            apply_schedule(other, "auto", fused_loss=True)
    sch = apply_schedule(other, "auto", fused_loss=not changes, ckpt_ratio=0.5)
    assert str(sch.mod).count("CheckPointWrapper") == (2 if changes else 1)
    built, _ = slapo.build(sch)
    loss, new = model(**inputs).loss, built(**inputs).loss
    loss.backward()
    new.backward()
    assert float(new.detach()) == pytest.approx(float(loss.detach()), abs=TOLERANCE)
    gradients = {key: p.grad for key, p in built.named_parameters()}
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, atol=TOLERANCE, rtol=1e-4)
    parts = apply_schedule(unknown(name, config, settings), "auto", pipeline_cuts=2)
    assert "cut_pipeline_stage" in str(parts)


def test_a_model_without_a_plan() -> None:
    """It has the recipe of its family; without that it is drafted, or refused without layers."""
    by_key, by_auto = (apply_schedule(MODELS["gpt2"].build(), key) for key in ("gpt2", "auto"))
    assert str(by_auto) == str(by_key)
    with fake_world(2):
        drafted = apply_schedule(unknown(*UNKNOWN[2][:3]), "auto", kernels=False)
    assert drafted["transformer.h.1.mlp.dense_4h_to_h"].mod.weight.shape == (32, 64)
    with pytest.raises(ValueError, match="Linear carries no tensor-parallel plan"):
        apply_schedule(nn.Linear(2, 2), "auto")


def test_a_style_that_nothing_is_known_of() -> None:
    model: Any = MODELS["llama"].build()
    model._tp_plan = {**model._tp_plan, "model.layers.*.self_attn.q_proj": "diagonal"}
    with pytest.raises(ValueError, match="'diagonal'"):
        apply_schedule(model, "auto")


def qwen3(**plan: str | None) -> Any:
    """With other entries of the plan, by the ends of their paths."""
    model: Any = MODELS["qwen3"].build()
    changed = {k: plan.get(k.rpartition(".")[2], v) for k, v in model.tp_plan.items()}
    model._tp_plan = {path: style for path, style in changed.items() if style}
    return model


@pytest.mark.parametrize(("key", "by"), [("llama", "auto"), ("mistral", "gemma")])
def test_a_proof_with_tokens_dealt_out_over_four(key: str, by: str) -> None:
    with fake_world(4, 1):
        model = MODELS[key].build(num_key_value_heads=4)
        apply_schedule(model, by, sequence_parallel=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"q_norm": None, "k_norm": None},  # they see the heads of one rank
        {"o_proj": None},
        {"down_proj": "colwise"},
        {"up_proj": None},
    ],
)
def test_wrong_plans_are_refused(wrong: dict[str, str | None]) -> None:
    before = str(qwen3(**wrong))
    with fake_world(2, 1):
        model = qwen3(**wrong)
        with pytest.raises((slapo.PlacementError, ValueError)):
            apply_schedule(model, "auto")
    assert str(model) == before


def test_known_faults_are_mended() -> None:
    """The learned activation of Apertus sees a slice, and its plan does not say so."""
    config = transformers.ApertusConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    torch.manual_seed(0)
    with fake_world(2, 1):
        apply_schedule(transformers.ApertusForCausalLM(config), "auto")
        model = transformers.ApertusForCausalLM(config)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(slapo.PlacementError):
            patch.setattr(plans, "PLAN_FIXES", {})
            apply_schedule(model, "auto")


def test_the_proof_may_be_left_out() -> None:
    with fake_world(2, 1):
        sch = apply_schedule(qwen3(q_norm=None, k_norm=None), "auto", check=False)
        with pytest.raises(slapo.PlacementError, match=r"q_norm|k_norm"):
            slapo.check(sch, tokens(2, 6))


# --- where the check has no rule -----------------------------------------------------------------
@torch.library.custom_op("slapo_tests::squash", mutates_args=())
def squash(x: Tensor) -> Tensor:
    """An operation that nothing is known of."""
    return x.tanh()


squash.register_fake(torch.empty_like)
squash.register_autograd(
    lambda ctx, grad: grad * (1 - ctx.saved_tensors[0].tanh() ** 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Squash(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return squash(x)


class Squashed(transformers.Qwen3ForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = Squash()


def squashed(layers: int = 3) -> Any:
    config = MODELS["qwen3"].build().config
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    return Squashed(config)


def uncertain(rank: int, world_size: int) -> tuple[list[str], str]:
    sch = apply_schedule(squashed(), "auto", group=dist.group.WORLD, fused_loss=True)
    model = squashed()
    model._tp_plan = {k: v for k, v in model.tp_plan.items() if "k_norm" not in k}
    try:
        apply_schedule(model, "auto", group=dist.group.WORLD)
    except slapo.PlacementError as error:
        return [record.primitive for record in sch.history], str(error)
    return [], ""


def test_numbers_where_the_check_has_no_rule() -> None:
    for done, said in run_distributed(uncertain, 2, timeout=120):
        assert done.count("shard") > 3 * 5
        assert "does not hold on 2 ranks: Verify: " in said
        assert "k_norm" in said
        assert "The check alone was not certain" in said
        assert "squash" in said


def test_no_numbers_without_ranks() -> None:
    with fake_world(2, 1), pytest.raises(slapo.PlacementError, match="squash"):
        apply_schedule(squashed(), "auto")
