"""GPT-Neo: GPT-2 with separate projections, and windows in every other layer."""

from __future__ import annotations

from typing import Any

from slapo.model_schedule.families.gpt2 import MLP
from slapo.model_schedule.registry import register_recipe
from slapo.model_schedule.tables import Recipe, Region, Stack


@register_recipe("gpt_neo")
def gpt_neo(config: Any) -> Recipe:
    """Its attention is not asked for in Transformers' table, so it runs as it is."""
    projections = " ".join(f"attn.attention.{name}_proj" for name in "qkv")
    attention = Region(
        "attn",
        columns=projections,
        rows="attn.attention.out_proj",
        counts="attn.attention.num_heads",
        forked="attn.attention.attn_dropout",
    )
    return Recipe(
        stacks=(Stack("h", (attention, MLP), last="ln_f"),),
        embeddings="wte",
        counts="num_heads",
        refuses={"attn_op_name": "its attention computes by itself, unscaled and with windows"},
        bias_gelu="mlp:c_fc",
    )
