"""GPT-Neo: GPT-2 with separate projections, and windows in every other layer."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from slapo.model_schedule.families.gpt2 import MLP
from slapo.model_schedule.recipe import Recipe, Region, Stack
from slapo.model_schedule.registry import register_recipe
from slapo.op.interface import GPTNeoAttention
from slapo.schedule import Schedule


@register_recipe("gpt_neo")
def gpt_neo(config: Any) -> Recipe:
    """Its attention does not ask Transformers' table, so a module takes its place."""
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
        attention=use_own_attention,
        bias_gelu="mlp:c_fc",
    )


def use_own_attention(base: Schedule, backend: str) -> None:
    """The same layers around another kernel."""
    make = functools.partial(own_attention, backend=backend)
    base.select("h.*.attn.attention").replace(make)


def own_attention(path: str, module: nn.Module, backend: str) -> GPTNeoAttention:
    """What takes the place of one."""
    return GPTNeoAttention(module, backend)
