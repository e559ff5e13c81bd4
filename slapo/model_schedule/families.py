"""Model families with a recipe, one table each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slapo.model_schedule.recipe import Recipe, Stack
from slapo.model_schedule.registry import register_recipe
from slapo.op.interface import GPTNeoAttention
from slapo.schedule import Schedule

#: The tables below are compared with the whole models by tests.
_family = functools.partial(Recipe, proven=True)


def _cross_attention(config: Any) -> dict[str, str]:
    """Refuse tensor parallelism for BERT and GPT-2 as decoders with cross attention."""
    why = "its cross attention has no entry in the table"
    return {"tensor parallelism": why} if config.add_cross_attention else {}


# Attention without ``divide`` views its projections as (..., -1, head_dim), which fits any number
# of heads. Only attributes that a forward reads otherwise are divided.
@register_recipe("bert", "roberta")
def bert(config: Any) -> Recipe:
    """BERT and RoBERTa: encoders with the same layers under different names."""
    layer = {
        "attention.self": "sum_grad(hidden_states)",
        "attention.self.query attention.self.key attention.self.value": "columns",
        "intermediate": "sum_grad",
        "intermediate.dense": "columns",
        "attention.output.dense output.dense": "rows",
    }
    return _family(
        stacks=(Stack("encoder.layer", layer),),
        embeddings="embeddings.word_embeddings",
        heads="cls.predictions.decoder lm_head.decoder",
        refuses=_cross_attention(config),
        bias_gelu="intermediate:dense",
    )


@register_recipe("albert")
def albert(config: Any) -> Recipe:
    """ALBERT: an encoder that runs the same layers repeatedly."""
    layer = {
        # Attention adds the residual itself, so each projection is entered by itself.
        "attention.query attention.key attention.value ffn": "sum_grad, columns",
        "attention.dense ffn_output": "rows",
    }
    groups = range(config.num_hidden_groups)
    again = "its layers run several times in one pass"
    return _family(
        stacks=tuple(
            Stack(f"encoder.albert_layer_groups.{group}.albert_layers", layer) for group in groups
        ),
        embeddings="embeddings.word_embeddings",
        heads="predictions.decoder",
        refuses={
            "pipeline_cuts": f"{again}, so several stages would hold them",
            "sequence_parallel": "attention takes its shapes from the residual, which is sharded "
            "by tokens",
        },
    )


_GPT_MLP = {"mlp": "sum_grad", "mlp.c_fc": "columns", "mlp.c_proj": "rows"}


@register_recipe("gpt2")
def gpt2(config: Any) -> Recipe:
    """GPT-2: query, key and value in one layer, and transposed weights."""
    layer = {
        # Attention splits the packed output by an attribute of its own, split_size.
        "attn": "sum_grad, divide(num_heads, split_size)",
        "attn.c_attn": "columns(3)",
        "attn.c_proj": "rows",
        **_GPT_MLP,
    }
    return _family(
        stacks=(Stack("h", layer, last="ln_f"),),
        embeddings="wte",
        refuses=_cross_attention(config),
    )


@register_recipe("gpt_neo")
def gpt_neo(config: Any) -> Recipe:
    """GPT-Neo: GPT-2 with separate projections, and local attention in every other layer."""
    layer = {
        "attn": "sum_grad",
        "attn.attention": "divide(num_heads)",
        "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj": "columns",
        "attn.attention.out_proj": "rows",
        # A module of the model's own attention; the replacing kernel draws by itself.
        "attn.attention.attn_dropout": "fork_rng",
        **_GPT_MLP,
    }
    return _family(
        stacks=(Stack("h", layer, last="ln_f"),),
        embeddings="wte",
        counts="num_heads",
        # Its attention ignores Transformers' attention table, so a module replaces it.
        attention=_use_own_attention,
        bias_gelu="mlp:c_fc",
    )


def _use_own_attention(base: Schedule, backend: str) -> None:
    """Replace attention by a module with the same layers and another kernel."""
    make = functools.partial(own_attention, backend=backend)
    base.select("h.*.attn.attention").replace(make)


def own_attention(path: str, module: nn.Module, backend: str) -> GPTNeoAttention:
    """Return the replacement of one attention module."""
    return GPTNeoAttention(module, backend)


@register_recipe("opt")
def opt(config: Any) -> Recipe:
    """OPT: a decoder that merges batch and token dimensions before its MLP."""
    layer = {
        "self_attn": "sum_grad(hidden_states), divide(num_heads)",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj": "columns",
        "self_attn.out_proj": "rows",
        # Gathering merged dimensions permutes the tokens. An MLP treats each by itself, and
        # ``rows`` scatters them in the same order.
        "fc1": "sum_grad(axis=0), columns",
        "fc2": "rows(axis=0)",
    }
    norm = "decoder.final_layer_norm" if config.do_layer_norm_before else ""
    return _family(
        stacks=(Stack("decoder.layers", layer, last=norm),), embeddings="decoder.embed_tokens"
    )


_ATTENTION = {
    # Gemma 3 is given two rotary tables, and multimodal models additional tensors.
    "self_attn": "sum_grad(hidden_states), "
    "regroup(num_key_value_groups, config.num_key_value_heads)",
    "self_attn.q_proj": "columns",
    "self_attn.k_proj self_attn.v_proj": "columns(parts=config.num_key_value_heads)",
    "self_attn.o_proj": "rows",
}
#: Attention that norms queries and keys per head, with one weight for all heads.
_ATTENTION_WITH_NORMS = {**_ATTENTION, "self_attn.q_norm self_attn.k_norm": "partial(weight)"}
_GATED_MLP = {
    "mlp": "sum_grad",
    "mlp.gate_proj mlp.up_proj": "columns",
    "mlp.down_proj": "rows",
}


def _decoder(*tables: Mapping[str, str], within: str = "") -> Recipe:
    """Return a recipe of layers with these tables, between an embedding and a norm."""
    layer = {paths: words for table in tables for paths, words in table.items()}
    return _family(
        stacks=(Stack(f"{within}layers", layer, last=f"{within}norm"),),
        embeddings=f"{within}embed_tokens",
        key_value_heads="num_key_value_heads",
    )


@register_recipe("llama", "mistral", "qwen2")
def llama(config: Any) -> Recipe:
    """Llama, and decoders of the same structure: Mistral, Qwen2."""
    return _decoder(_ATTENTION, _GATED_MLP)


@register_recipe("qwen3")
def qwen3(config: Any) -> Recipe:
    """Qwen3: Llama with per-head norms."""
    return _decoder(_ATTENTION_WITH_NORMS, _GATED_MLP)


@register_recipe("gemma")
def gemma(config: Any) -> Recipe:
    """Gemma: Llama with a scaled embedding."""
    return _decoder(_ATTENTION, _GATED_MLP)


@register_recipe("gemma3", "gemma3_text")
def gemma3(config: Any) -> Recipe:
    """Gemma 3: Gemma with per-head norms and sliding windows; for image models, the text part."""
    within = "language_model." if hasattr(config, "vision_config") else ""
    return _decoder(_ATTENTION_WITH_NORMS, _GATED_MLP, within=within)


@register_recipe("mixtral")
def mixtral(config: Any) -> Recipe:
    """Mixtral: Llama's attention; every expert is sharded, and the router is replicated."""
    # Each expert is sharded, so that all ranks have the same work whatever the routing.
    experts = {"mlp": "gather, sum", "mlp.gate": "", "mlp.experts": "experts"}
    return _decoder(_ATTENTION, experts)


@register_recipe("t5")
def t5(config: Any) -> Recipe:
    """T5: two stacks; every decoder layer reads the encoder's output by cross attention."""
    wide = "wi_0 wi_1" if config.is_gated_act else "wi"

    def attention(path: str, read: str = "") -> dict[str, str]:
        return {
            path: f"sum_grad(hidden_states{read}), divide(n_heads)",
            f"{path}.q {path}.k {path}.v": "columns",
            f"{path}.o": "rows",
        }

    def mlp(path: str) -> dict[str, str]:
        return {
            path: "sum_grad",
            " ".join(f"{path}.{name}" for name in wide.split()): "columns",
            f"{path}.wo": "rows",
            f"{path}.dropout": "fork_rng",  # it acts between wi and wo
        }

    # Attention is given a position bias; each rank has the bias of its own heads.
    bias = {"layer.0.SelfAttention.relative_attention_bias": "shard(weight, 1)"}
    own = {**attention("layer.0.SelfAttention"), **bias}
    cross = attention("layer.1.EncDecAttention", ", read=key_value_states")
    encoder = {**own, **mlp("layer.1.DenseReluDense")}
    decoder = {**own, **cross, **mlp("layer.2.DenseReluDense")}
    return _family(
        stacks=(
            Stack("encoder.block", encoder, last="encoder.final_layer_norm"),
            Stack(
                "decoder.block",
                decoder,
                last="decoder.final_layer_norm",
                reads="decoder:encoder_hidden_states",
                optional=True,
            ),
        ),
        embeddings="shared encoder.embed_tokens decoder.embed_tokens",
        counts="num_heads",
    )


@register_recipe("vit")
def vit(config: Any) -> Recipe:
    """ViT: an encoder of image patches."""
    layer = {
        "attention mlp": "sum_grad",
        "attention.q_proj attention.k_proj attention.v_proj mlp.fc1": "columns",
        "attention.o_proj mlp.fc2": "rows",
    }
    return _family(
        stacks=(Stack("layers", layer, last="layernorm"),),
        heads="",
        bias_gelu="mlp:fc1",
    )


@register_recipe("wideresnet")
def wideresnet(config: Any) -> Recipe:
    """Wide ResNet: bottleneck blocks, named as in torchvision."""
    # The wide convolution in the middle takes slices of the channels.
    block = {"conv1": "sum_grad, columns", "bn1": "columns", "conv2": "rows"}
    no_tokens = "its activations are images, not tokens"
    return _family(
        stacks=tuple(Stack(f"layer{number}", block) for number in range(1, 5)),
        heads="",
        counts="",
        refuses={"sequence_parallel": no_tokens, "attn_op_name": "it has no attention"},
        inputs=_images,
    )


def _images(config: Any) -> dict[str, Any]:
    """Return two small images; the sizes are arbitrary."""
    return {"x": torch.zeros(2, 3, 64, 64)}
