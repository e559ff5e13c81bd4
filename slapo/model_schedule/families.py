"""Model families with a recipe, one table each."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slapo.model_schedule.recipe import Recipe, Region, Stack
from slapo.model_schedule.registry import register_recipe
from slapo.op.interface import GPTNeoAttention
from slapo.schedule import Schedule


def _cross_attention(config: Any) -> dict[str, str]:
    """Refuse tensor parallelism for BERT and GPT-2 as decoders with cross attention."""
    why = "its cross attention has no entry in the table"
    return {"tensor parallelism": why} if config.add_cross_attention else {}


@register_recipe("bert", "roberta")
def bert(config: Any) -> Recipe:
    """BERT and RoBERTa: encoders with the same layers under different names."""
    attention = Region(
        "attention.self",
        columns=" ".join(f"attention.self.{name}" for name in ("query", "key", "value")),
        rows="attention.output.dense",
        takes="hidden_states",
    )
    mlp = Region("intermediate", columns="intermediate.dense", rows="output.dense")
    return Recipe(
        stacks=(Stack("encoder.layer", (attention, mlp)),),
        embeddings="embeddings.word_embeddings",
        heads="cls.predictions.decoder lm_head.decoder",
        refuses=_cross_attention(config),
        bias_gelu="intermediate:dense",
    )


@register_recipe("albert")
def albert(config: Any) -> Recipe:
    """ALBERT: an encoder that runs the same layers repeatedly."""
    # Attention adds the residual itself, so each projection is entered by itself.
    projections = " ".join(f"attention.{name}" for name in ("query", "key", "value"))
    regions = (
        Region(projections, columns=projections, rows="attention.dense"),
        Region("ffn", columns="ffn", rows="ffn_output"),
    )
    groups = range(config.num_hidden_groups)
    again = "its layers run several times in one pass"
    return Recipe(
        stacks=tuple(
            Stack(f"encoder.albert_layer_groups.{group}.albert_layers", regions) for group in groups
        ),
        embeddings="embeddings.word_embeddings",
        heads="predictions.decoder",
        refuses={
            "pipeline_cuts": f"{again}, so several stages would hold them",
            "sequence_parallel": "attention takes its shapes from the residual, which is sharded "
            "by tokens",
        },
    )


_GPT_MLP = Region("mlp", columns="mlp.c_fc", rows="mlp.c_proj")


@register_recipe("gpt2")
def gpt2(config: Any) -> Recipe:
    """GPT-2: query, key and value in one layer, and transposed weights."""
    # Attention splits the packed output by an attribute of its own, split_size.
    attention = Region(
        "attn",
        columns="attn.c_attn",
        rows="attn.c_proj",
        blocks=3,
        counts="attn.num_heads attn.split_size",
    )
    return Recipe(
        stacks=(Stack("h", (attention, _GPT_MLP), last="ln_f"),),
        embeddings="wte",
        refuses=_cross_attention(config),
    )


@register_recipe("gpt_neo")
def gpt_neo(config: Any) -> Recipe:
    """GPT-Neo: GPT-2 with separate projections, and local attention in every other layer."""
    # Its attention ignores Transformers' attention table, so a module replaces it.
    projections = " ".join(f"attn.attention.{name}_proj" for name in "qkv")
    attention = Region(
        "attn",
        columns=projections,
        rows="attn.attention.out_proj",
        counts="attn.attention.num_heads",
        forked="attn.attention.attn_dropout",
    )
    return Recipe(
        stacks=(Stack("h", (attention, _GPT_MLP), last="ln_f"),),
        embeddings="wte",
        counts="num_heads",
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
    attention = Region(
        "self_attn",
        columns=" ".join(f"self_attn.{name}_proj" for name in "qkv"),
        rows="self_attn.out_proj",
        takes="hidden_states",
        counts="self_attn.num_heads",
    )
    mlp = Region("fc1", columns="fc1", rows="fc2", axis=0)
    norm = "decoder.final_layer_norm" if config.do_layer_norm_before else ""
    return Recipe(
        stacks=(Stack("decoder.layers", (attention, mlp), last=norm),),
        embeddings="decoder.embed_tokens",
    )


_ATTENTION = Region(
    "self_attn",
    columns="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    rows="self_attn.o_proj",
    # Gemma 3 is given two rotary tables, and multimodal models additional tensors.
    takes="hidden_states",
    key_values="self_attn.k_proj self_attn.v_proj",
    groups="self_attn.num_key_value_groups",
)
#: Attention that norms queries and keys per head, with one weight for all heads.
_ATTENTION_WITH_NORMS = replace(_ATTENTION, inside="self_attn.q_norm self_attn.k_norm")
_GATED_MLP = Region("mlp", columns="mlp.gate_proj mlp.up_proj", rows="mlp.down_proj")


@register_recipe("llama", "mistral", "qwen2")
def llama(config: Any) -> Recipe:
    """Llama, and decoders of the same structure: Mistral, Qwen2."""
    return _decoder(_ATTENTION, _GATED_MLP)


def _decoder(*regions: Region, within: str = "") -> Recipe:
    """Return a recipe of layers with these regions, between an embedding and a norm."""
    return Recipe(
        stacks=(Stack(f"{within}layers", regions, last=f"{within}norm"),),
        embeddings=f"{within}embed_tokens",
        key_value_heads="num_key_value_heads",
    )


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
    return _decoder(_ATTENTION, Region("mlp", experts="mlp.experts", whole="mlp.gate"))


@register_recipe("t5")
def t5(config: Any) -> Recipe:
    """T5: two stacks; every decoder layer reads the encoder's output by cross attention."""
    # Attention is given a position bias; each rank has the bias of its own heads.
    wide = "wi_0 wi_1" if config.is_gated_act else "wi"

    def attention(path: str) -> Region:
        columns = " ".join(f"{path}.{name}" for name in "qkv")
        counts = f"{path}.n_heads"
        return Region(path, columns, rows=f"{path}.o", takes="hidden_states", counts=counts)

    def mlp(path: str) -> Region:
        columns = " ".join(f"{path}.{name}" for name in wide.split())
        return Region(path, columns, rows=f"{path}.wo", forked=f"{path}.dropout")

    own = attention("layer.0.SelfAttention")
    own = replace(own, by_head="layer.0.SelfAttention.relative_attention_bias")
    cross = replace(attention("layer.1.EncDecAttention"), reads="key_value_states")
    encoder = (own, mlp("layer.1.DenseReluDense"))
    decoder = (own, cross, mlp("layer.2.DenseReluDense"))
    return Recipe(
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
    attention = Region(
        "attention",
        columns=" ".join(f"attention.{name}_proj" for name in "qkv"),
        rows="attention.o_proj",
    )
    mlp = Region("mlp", columns="mlp.fc1", rows="mlp.fc2")
    return Recipe(
        stacks=(Stack("layers", (attention, mlp), last="layernorm"),),
        heads="",
        bias_gelu="mlp:fc1",
    )


@register_recipe("wideresnet")
def wideresnet(config: Any) -> Recipe:
    """Wide ResNet: bottleneck blocks, named as in torchvision."""
    # The wide convolution in the middle takes slices of the channels.
    region = Region("conv1", columns="conv1 bn1", rows="conv2")
    no_tokens = "its activations are images, not tokens"
    return Recipe(
        stacks=tuple(Stack(f"layer{number}", (region,)) for number in range(1, 5)),
        heads="",
        counts="",
        refuses={"sequence_parallel": no_tokens, "attn_op_name": "it has no attention"},
        inputs=_images,
    )


def _images(config: Any) -> dict[str, Any]:
    """Return two small images; the sizes are arbitrary."""
    return {"x": torch.zeros(2, 3, 64, 64)}
