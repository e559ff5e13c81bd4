"""ViT: an encoder of image patches."""

from __future__ import annotations

from typing import Any

from slapo.model_schedule.recipe import Recipe, Region, Stack
from slapo.model_schedule.registry import register_recipe


@register_recipe("vit")
def vit(config: Any) -> Recipe:
    """No vocabulary; its tokens are the patches and one more."""
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
