"""ALBERT: an encoder that runs the same layers again and again."""

from __future__ import annotations

from typing import Any

from slapo.model_schedule.recipe import Recipe, Region, Stack
from slapo.model_schedule.registry import register_recipe


@register_recipe("albert")
def albert(config: Any) -> Recipe:
    """Attention adds the residual itself, so its projections are entered one by one."""
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
            "pipeline_cuts": f"{again}, and would do so in several stages",
            "sequence_parallel": "attention takes its shapes from the residual, a part of the "
            "tokens then",
        },
    )
