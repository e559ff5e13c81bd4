"""Qwen3: Llama with norms of heads."""

from __future__ import annotations

from typing import Any

from slapo.model_schedule.families.llama import ATTENTION, MLP, decoder, with_head_norms
from slapo.model_schedule.recipe import Recipe
from slapo.model_schedule.registry import register_recipe


@register_recipe("qwen3")
def qwen3(config: Any) -> Recipe:
    """Its norms see the heads of one rank."""
    return with_head_norms(decoder(ATTENTION, MLP))
