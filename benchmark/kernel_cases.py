"""The models of ``python -m benchmark kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model to train.

    Parameters
    ----------
    key
        Of its recipe.
    cls, config
        Names in Transformers.
    settings
        Of the config.
    """

    key: str
    cls: str
    config: str
    settings: dict[str, Any]
    length: int = 512

    def build(self) -> nn.Module:
        """Random weights, the same at each call."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        model: nn.Module = getattr(transformers, self.cls)(config)
        return model.train()

    def inputs(self, batch: int, device: str) -> dict[str, Tensor]:
        """Random tokens without padding; each is its own label."""
        generator = torch.Generator().manual_seed(1)
        vocabulary = self.settings["vocab_size"]
        ids = torch.randint(3, vocabulary, (batch, self.length), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids}


_OFF = {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_NONE = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _gpt2(hidden: int, layers: int, heads: int, vocabulary: int, length: int) -> Case:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": length}
    settings = {**sizes, "vocab_size": vocabulary, **_OFF, **_NONE}
    return Case("gpt2", "GPT2LMHeadModel", "GPT2Config", settings, length)


def _llama(
    hidden: int, wide: int, layers: int, heads: int, groups: int, vocabulary: int, length: int
) -> Case:
    settings = {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
        **_OFF,
    }
    return Case("llama", "LlamaForCausalLM", "LlamaConfig", settings, length)


def _bert(hidden: int, layers: int, heads: int, wide: int, vocabulary: int, length: int) -> Case:
    settings = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": wide,
        "vocab_size": vocabulary,
        **_BERT,
    }
    return Case("bert", "BertForMaskedLM", "BertConfig", settings, length)


def _t5(
    hidden: int, head: int, wide: int, layers: int, heads: int, vocabulary: int, length: int
) -> Case:
    settings = {
        "d_model": hidden,
        "d_kv": head,
        "d_ff": wide,
        "num_layers": layers,
        "num_heads": heads,
        "vocab_size": vocabulary,
        "dropout_rate": 0.0,
        "use_cache": False,
        "decoder_start_token_id": 0,
    }
    return Case("t5", "T5ForConditionalGeneration", "T5Config", settings, length)


CASES: dict[str, dict[str, Case]] = {
    "cpu": {
        "gpt2": _gpt2(512, 6, 8, 32000, 512),
        "llama": _llama(512, 1376, 6, 8, 8, 32000, 512),
    },
    "quick": {"gpt2": _gpt2(16, 1, 2, 64, 8), "llama": _llama(16, 32, 1, 2, 2, 64, 8)},
    "small": {
        "bert": _bert(32, 2, 2, 64, 96, 16),
        "gpt2": _gpt2(32, 2, 2, 96, 16),
        "t5": _t5(32, 16, 64, 2, 2, 96, 16),
        "llama": _llama(32, 64, 2, 4, 2, 96, 16),
    },
    "cuda": {
        "bert-large": _bert(1024, 24, 16, 4096, 30522, 512),
        "gpt2-medium": _gpt2(1024, 24, 16, 50257, 1024),
        "t5-base": _t5(768, 64, 3072, 12, 12, 32128, 512),
        "llama-1b": _llama(2048, 8192, 16, 32, 8, 128256, 2048),
    },
}


def check_losses(losses: dict[str, list[float]]) -> None:
    first = losses["hf"]
    for side, found in losses.items():
        if any(abs(a - b) > 2e-2 * abs(b) for a, b in zip(found, first, strict=True)):
            raise RuntimeError(
                f"{side} computes something else: losses {found}, Transformers {first}"
            )
