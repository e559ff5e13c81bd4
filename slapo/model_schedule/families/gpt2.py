"""GPT-2: query, key and value in one layer, and weights that lie the other way round."""

from __future__ import annotations

from typing import Any

from slapo.model_schedule.recipe import Recipe, Region, Stack
from slapo.model_schedule.registry import register_recipe

MLP = Region("mlp", columns="mlp.c_fc", rows="mlp.c_proj")


@register_recipe("gpt2")
def gpt2(config: Any) -> Recipe:
    """Its attention cuts the packed layer's output by numbers of its own."""
    attention = Region(
        "attn",
        columns="attn.c_attn",
        rows="attn.c_proj",
        blocks=3,
        counts="attn.num_heads attn.split_size",
    )
    refuses = {}
    if config.add_cross_attention:
        refuses["tensor parallelism"] = "its cross attention has no entry in the table"
    return Recipe(
        stacks=(Stack("h", (attention, MLP), last="ln_f"),), embeddings="wte", refuses=refuses
    )
