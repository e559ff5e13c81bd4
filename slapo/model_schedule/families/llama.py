"""Llama, and the decoders that are built like it: Mistral, Qwen2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slapo.model_schedule.recipe import Recipe, Region, Stack
from slapo.model_schedule.registry import register_recipe

ATTENTION = Region(
    "self_attn",
    columns="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    rows="self_attn.o_proj",
    # Gemma 3 is given two rotary tables, and multimodal models further tensors.
    takes="hidden_states",
    key_values="self_attn.k_proj self_attn.v_proj",
    groups="self_attn.num_key_value_groups",
)
MLP = Region("mlp", columns="mlp.gate_proj mlp.up_proj", rows="mlp.down_proj")


@register_recipe("llama", "mistral", "qwen2")
def llama(config: Any) -> Recipe:
    """Grouped heads and a gated MLP."""
    return decoder(ATTENTION, MLP)


def decoder(*regions: Region) -> Recipe:
    """Layers of these regions, between an embedding and a norm."""
    return Recipe(
        stacks=(Stack("layers", regions, last="norm"),),
        embeddings="embed_tokens",
        key_value_heads="num_key_value_heads",
    )


def with_head_norms(recipe: Recipe) -> Recipe:
    """Queries and keys are normalised head by head, with one weight for all heads."""
    (stack,) = recipe.stacks
    attention, *others = stack.regions
    attention = replace(attention, inside="self_attn.q_norm self_attn.k_norm")
    return replace(recipe, stacks=(replace(stack, regions=(attention, *others)),))
