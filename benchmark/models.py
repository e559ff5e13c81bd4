"""The models that the benchmarks schedule and run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """A transformer layer: attention and a two-layer MLP, each with norm and residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.norm_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def split_heads(self, x: Tensor) -> Tensor:
        """``(batch, seq, hidden)`` -> ``(batch, heads, seq, hidden / heads)``."""
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape ``(batch, seq, hidden)``."""
        y = self.norm_1(x)
        query, key, value = self.query(y), self.key(y), self.value(y)
        context = F.scaled_dot_product_attention(
            self.split_heads(query),
            self.split_heads(key),
            self.split_heads(value),
            is_causal=True,
        )
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """GPT-2 in small: embeddings, layers, and a head over the vocabulary.

    Parameters
    ----------
    layers, hidden, heads, vocab_size, max_length
        Sizes.
    """

    def __init__(
        self,
        layers: int,
        hidden: int = 64,
        heads: int = 4,
        vocab_size: int = 1000,
        max_length: int = 256,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Embedding(max_length, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``input_ids`` of shape ``(batch, seq)`` -> logits ``(batch, seq, vocab_size)``."""
        places = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def transformer_on_meta(layers: int) -> Transformer:
    """A model of hidden size 64 that takes no memory."""
    with torch.device("meta"):
        return Transformer(layers)


def hf_gpt2(
    layers: int, hidden: int, vocab_size: int, heads: int = 4, length: int = 256, **settings: Any
) -> Any:
    """GPT-2 of the ``transformers`` package with random weights and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        vocab_size=vocab_size,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        **settings,
    )
    return GPT2LMHeadModel(config)
