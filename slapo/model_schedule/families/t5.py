"""T5: two stacks; cross attention reads the encoder's result in every layer of the decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slapo.model_schedule.recipe import Recipe, Region, Stack
from slapo.model_schedule.registry import register_recipe


@register_recipe("t5")
def t5(config: Any) -> Recipe:
    """Attention is given a bias of positions, of which each rank has its heads'."""
    wide = "wi_0 wi_1" if config.is_gated_act else "wi"

    def attention(path: str) -> Region:
        columns = " ".join(f"{path}.{name}" for name in "qkv")
        counts = f"{path}.n_heads"
        return Region(path, columns, rows=f"{path}.o", takes="hidden_states", counts=counts)

    def mlp(path: str) -> Region:
        columns = " ".join(f"{path}.{name}" for name in wide.split())
        return Region(path, columns, rows=f"{path}.wo", forked=f"{path}.dropout")

    own = attention("layer.0.SelfAttention")
    own = replace(own, by_head="layer.0.SelfAttention.relative_attention_bias")
    cross = replace(attention("layer.1.EncDecAttention"), reads="key_value_states")
    encoder = (own, mlp("layer.1.DenseReluDense"))
    decoder = (own, cross, mlp("layer.2.DenseReluDense"))
    return Recipe(
        stacks=(
            Stack("encoder.block", encoder, last="encoder.final_layer_norm"),
            Stack(
                "decoder.block",
                decoder,
                last="decoder.final_layer_norm",
                reads="decoder:encoder_hidden_states",
                optional=True,
            ),
        ),
        embeddings="shared encoder.embed_tokens decoder.embed_tokens",
        counts="num_heads",
    )
