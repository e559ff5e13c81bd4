"""Gemma and Gemma 3: Llama with a scaled embedding; Gemma 3 with norms of heads, and windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slapo.model_schedule.families.llama import ATTENTION, MLP, decoder, with_head_norms
from slapo.model_schedule.recipe import Recipe
from slapo.model_schedule.registry import register_recipe


@register_recipe("gemma")
def gemma(config: Any) -> Recipe:
    """The layers of Llama."""
    return decoder(ATTENTION, MLP)


@register_recipe("gemma3", "gemma3_text")
def gemma3(config: Any) -> Recipe:
    """The layers of Qwen3, with more norms around them; in a model of images, those of its text."""
    recipe = with_head_norms(decoder(ATTENTION, MLP))
    if not hasattr(config, "vision_config"):
        return recipe
    (stack,) = recipe.stacks
    within = replace(stack, layers="language_model.layers", last="language_model.norm")
    why = "images are put between the embedded tokens"
    return replace(
        recipe,
        stacks=(within,),
        embeddings="language_model.embed_tokens",
        refuses={"fused_loss": why, "gather_logits": why},
    )
