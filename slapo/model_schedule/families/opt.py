"""OPT: a decoder that makes one dimension of batch and tokens before its MLP."""

from __future__ import annotations

from typing import Any

from slapo.model_schedule.recipe import Recipe, Region, Stack
from slapo.model_schedule.registry import register_recipe


@register_recipe("opt")
def opt(config: Any) -> Recipe:
    """Its MLP has no module of its own."""
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
