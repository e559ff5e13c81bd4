"""What a recipe does not know: models of other families, wrappers, adapters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo
from slapo.model_schedule import apply_schedule
from slapo.verify.placement.offline import fake_world
from tests.distributed import run_distributed
from tests.model_schedule.models import MODELS, tokens, transformers

#: Of what PEFT asks Transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def stranger(name: str, config: str = "", **settings: Any) -> Any:
    made = getattr(transformers, config or f"{name}Config")(**{**SIZES, **settings})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(made)


# --- other families ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "key", "settings", "says"),
    [
        ("Qwen3", "llama", {}, r"\['self_attn.q_norm.weight', 'self_attn.k_norm.weight'\] in a"),
        ("Gemma3", "llama", {"config": "Gemma3TextConfig", "head_dim": 8}, "self_attn.q_norm"),
        ("Qwen2Moe", "mixtral", {"moe_intermediate_size": 32}, "mlp.shared_expert.gate_proj.w"),
        ("Starcoder2", "llama", {}, r"mlp.c_fc.weight.*key of the model's own family, or 'auto'"),
        (
            "StableLm",
            "llama",
            {},
            "given for StableLmForCausalLM, which is not that of its family, does not",
        ),
        # Of the same modules, with numbers of its own between them: proved, and so taken.
        ("Granite", "llama", {}, ""),
        ("Olmo", "llama", {}, ""),
    ],
)
def test_a_recipe_of_another_family(name: str, key: str, settings: Any, says: str) -> None:
    model = stranger(name, **settings)
    before = str(model)
    with fake_world(2, 1):
        if not says:
            apply_schedule(model, key)
            return
        with pytest.raises((ValueError, slapo.PlacementError), match=says):
            apply_schedule(model, key)
    assert str(model) == before


def test_a_plan_without_groups_of_heads() -> None:
    """GPT-NeoX has as many keys and values as queries, and no name for their number."""
    model = stranger("GPTNeoX")
    assert not hasattr(model.config, "num_key_value_heads")
    with fake_world(2, 1):
        apply_schedule(model, "auto")
    with fake_world(3, 1), pytest.raises(ValueError, match="num_attention_heads is 4"):
        apply_schedule(stranger("GPTNeoX"), "auto")


def test_heads_that_differ_from_layer_to_layer() -> None:
    config = transformers.EmbeddingGemma2TextConfig(num_hidden_layers=2)
    with torch.device("meta"):
        model = transformers.EmbeddingGemma2TextModel(config)
    with fake_world(2, 1), pytest.raises(ValueError, match="num_key_value_heads is not one number"):
        apply_schedule(model, "auto")


def test_layers_in_a_list_of_lists() -> None:
    """Funnel pools between lists of layers, which are a stack each."""
    sizes = {"block_sizes": [2, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
    config = transformers.FunnelConfig(vocab_size=131, num_decoder_layers=1, **sizes)
    torch.manual_seed(0)
    model = transformers.FunnelForMaskedLM(config).eval()
    batch = tokens(2, 8)
    wanted = model(**batch).logits
    sch = apply_schedule(model, "auto", ckpt_ratio=1.0)
    layers = ["encoder.blocks.0.0", "encoder.blocks.0.1", "encoder.blocks.1.0", "decoder.layers.0"]
    assert [record.path for record in sch.history if record.primitive == "checkpoint"] == [
        f"funnel.{layer}" for layer in layers
    ]
    torch.testing.assert_close(slapo.build(sch)[0].eval()(**batch).logits, wanted)


@pytest.mark.parametrize("key", ["llama", "auto"])
def test_a_wrapped_model(key: str) -> None:
    with pytest.raises(ValueError, match=r"is a wrapper, by its children \['_orig_mod'\]"):
        apply_schedule(torch.compile(MODELS["llama"].build()), key)


# --- adapters ------------------------------------------------------------------------------------
def adapted(model: nn.Module, *targets: str) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    return peft.get_peft_model(model, config)


def test_adapters_in_one_process() -> None:
    """Put into a scheduled model, or into one that is scheduled afterwards."""
    inputs = tokens(3, 9)
    plain = adapted(MODELS["llama"].build(), "o_proj", "q_proj")
    before = adapted(
        slapo.build(apply_schedule(MODELS["llama"].build(), "llama", ckpt_ratio=0.5))[0],
        "o_proj",
        "q_proj",
    )
    after = adapted(MODELS["llama"].build(), "o_proj", "q_proj")
    slapo.build(apply_schedule(after.base_model.model, "llama", ckpt_ratio=0.5))
    plain(**inputs).loss.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert len(wanted) == 16
    for model in (before, after):
        model(**inputs).loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            torch.testing.assert_close(found[name], grad, atol=2e-6, rtol=1e-4)


def over_ranks(rank: int, world_size: int) -> list[str]:
    said = []
    for targets in (["o_proj"], ["q_proj", "v_proj"], ["down_proj"]):
        built, _ = slapo.build(
            apply_schedule(MODELS["llama"].build(), "llama", group=dist.group.WORLD)
        )
        built(**tokens(3, 9))  # nothing is wrong yet
        model = adapted(built, *targets)
        with pytest.raises(slapo.SlapoError) as caught:
            model(**tokens(3, 9))
        said.append(str(caught.value))
        inside = adapted(MODELS["llama"].build(), *targets)
        with pytest.raises((ValueError, KeyError, slapo.SlapoError)):
            apply_schedule(inside.base_model.model, "llama", group=dist.group.WORLD)
    return said


def test_adapters_over_ranks() -> None:
    pytest.importorskip("peft")
    for said in run_distributed(over_ranks, 2):
        assert "split over ranks, at ['self_attn.o_proj']" in said[0]
        assert "['self_attn.q_proj', 'self_attn.v_proj']" in said[1]
        assert "['mlp.down_proj']" in said[2]


def test_wrapped_by_adapters() -> None:
    model = adapted(MODELS["llama"].build(), "q_proj")
    with pytest.raises(ValueError, match=r"wrapper, by its children \['base_model'\], around"):
        apply_schedule(model, "llama")
    assert copy.deepcopy(model)(**tokens(2, 5)).loss.isfinite()
