"""Wide ResNet: bottleneck blocks, named as in torchvision."""

from __future__ import annotations

from typing import Any

from slapo.model_schedule.recipe import Recipe, Region, Stack
from slapo.model_schedule.registry import register_recipe


@register_recipe("wideresnet")
def wideresnet(config: Any) -> Recipe:
    """The wide convolution in the middle takes slices of the channels."""
    region = Region("conv1", columns="conv1 bn1", rows="conv2")
    no_tokens = "its activations are images, not tokens"
    return Recipe(
        stacks=tuple(Stack(f"layer{number}", (region,)) for number in range(1, 5)),
        heads="",
        counts="",
        refuses={"sequence_parallel": no_tokens, "attn_op_name": "it has no attention"},
        inputs=images,
    )


def images(config: Any) -> dict[str, Any]:
    """Two small images: sizes stay free."""
    import torch

    return {"x": torch.zeros(2, 3, 64, 64)}
