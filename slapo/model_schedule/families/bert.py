"""BERT and RoBERTa: encoders whose layers are the same but for their names around."""

from __future__ import annotations

from typing import Any

from slapo.model_schedule.recipe import Recipe, Region, Stack
from slapo.model_schedule.registry import register_recipe


@register_recipe("bert", "roberta")
def bert(config: Any) -> Recipe:
    """Split from the projections to the dense layer of each half of a layer."""
    attention = Region(
        "attention.self",
        columns=" ".join(f"attention.self.{name}" for name in ("query", "key", "value")),
        rows="attention.output.dense",
        takes="hidden_states",
    )
    mlp = Region("intermediate", columns="intermediate.dense", rows="output.dense")
    refuses = {}
    if config.add_cross_attention:
        refuses["tensor parallelism"] = "its cross attention has no entry in the table"
    return Recipe(
        stacks=(Stack("encoder.layer", (attention, mlp)),),
        embeddings="embeddings.word_embeddings",
        heads="cls.predictions.decoder lm_head.decoder",
        refuses=refuses,
        bias_gelu="intermediate:dense",
    )
