"""Small, randomly initialized models of Transformers: from configs alone, without the hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

VOCAB = 128
WIDTH = 32
MAX_LENGTH = 64
LAYERS = 2


def checkpoint_layers(model: Any) -> None:
    """Have a model of Transformers checkpoint its layers; 5.23 has renamed the method."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()


@dataclass(frozen=True)
class Family:
    """How to build one model, and where its parts are.

    Attributes
    ----------
    cls, config
        Names of the model class and the config class in ``transformers``.
    settings
        Arguments of the config.
    chain
        Paths of the containers from the root down to the layers.
    layers
        Path of the list of layers ("" where layers are no list).
    inputs
        ``inputs(batch, length, labels)`` -> keyword arguments of forward.
    """

    cls: str
    config: str
    settings: dict[str, Any]
    chain: tuple[str, ...]
    layers: str
    inputs: Callable[[int, int, bool], dict[str, Tensor]] = field(repr=False, default=None)  # type: ignore[assignment]

    def build(self, seed: int = 0, **changes: Any) -> nn.Module:
        """The model, in eval mode."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**self.settings, **changes})
        return getattr(transformers, self.cls)(config).eval()  # type: ignore[no-any-return]

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        """The rule that enters the chain of containers only."""
        return path not in self.chain


def text(batch: int, length: int, labels: bool = False) -> dict[str, Tensor]:
    """Tokens, with padding on the right of the second row."""
    ids = torch.randint(3, VOCAB, (batch, length))
    mask = torch.ones(batch, length, dtype=torch.long)
    if batch > 1:
        mask[1, -(length // 3) :] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    return {**found, "labels": ids.clone()} if labels else found


def text_to_text(batch: int, length: int, labels: bool = False) -> dict[str, Tensor]:
    """Tokens for encoder and decoder, of different lengths."""
    other = torch.randint(3, VOCAB, (batch, length + 2))
    name = "labels" if labels else "decoder_input_ids"
    return {**text(batch, length), name: other}


def pictures(batch: int, length: int, labels: bool = False) -> dict[str, Tensor]:
    """Pictures; their size is fixed, `length` has no part in it."""
    found = {"pixel_values": torch.randn(batch, 3, 32, 32)}
    return {**found, "labels": torch.randint(0, 2, (batch,))} if labels else found


def text_classes(batch: int, length: int, labels: bool = False) -> dict[str, Tensor]:
    """Tokens with one class for each row."""
    found = text(batch, length)
    return {**found, "labels": torch.randint(0, 2, (batch,))} if labels else found


_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": MAX_LENGTH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": MAX_LENGTH,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": MAX_LENGTH,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT_NEO = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_layers": LAYERS,
    "num_heads": 4,
    "attention_types": [[["global", "local"], LAYERS // 2]],
    "window_size": 8,
    "max_position_embeddings": MAX_LENGTH,
    "intermediate_size": 2 * WIDTH,
    "resid_dropout": 0.0,
    "embed_dropout": 0.0,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "ffn_dim": 2 * WIDTH,
    "max_position_embeddings": MAX_LENGTH,
    "dropout": 0.0,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": 4,
    "d_kv": 8,
    "d_ff": 2 * WIDTH,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}


def _decoder(name: str, **settings: Any) -> Family:
    return Family(
        f"{name}ForCausalLM",
        f"{name}Config",
        {**_LLAMA, **settings},
        ("model",),
        "model.layers",
        text,
    )


FAMILIES: dict[str, Family] = {
    "bert": Family(
        "BertForMaskedLM", "BertConfig", _BERT, ("bert", "bert.encoder"), "bert.encoder.layer", text
    ),
    "bert_causal": Family(
        "BertLMHeadModel",
        "BertConfig",
        {**_BERT, "is_decoder": True},
        ("bert", "bert.encoder"),
        "bert.encoder.layer",
        text,
    ),
    "bert_classifier": Family(
        "BertForSequenceClassification",
        "BertConfig",
        _BERT,
        ("bert", "bert.encoder"),
        "bert.encoder.layer",
        text_classes,
    ),
    "roberta": Family(
        "RobertaForCausalLM",
        "RobertaConfig",
        {**_BERT, "is_decoder": True},
        ("roberta", "roberta.encoder"),
        "roberta.encoder.layer",
        text,
    ),
    "albert": Family(
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**_BERT, "embedding_size": 16},
        ("albert", "albert.encoder"),
        "albert.encoder.albert_layer_groups",
        text,
    ),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", _GPT2, ("transformer",), "transformer.h", text),
    "gpt2_classifier": Family(
        "GPT2ForSequenceClassification",
        "GPT2Config",
        _GPT2,
        ("transformer",),
        "transformer.h",
        text_classes,
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM", "GPTNeoConfig", _GPT_NEO, ("transformer",), "transformer.h", text
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        _OPT,
        ("model.decoder",),
        "model.decoder.layers",
        text,
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        _T5,
        ("encoder", "decoder"),
        "decoder.block",
        text_to_text,
    ),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=8),
    "mixtral": _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_LLAMA, "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2},
        ("model",),
        "model.layers",
        text,
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        _VIT,
        ("vit",),
        "vit.layers",
        pictures,
    ),
    "resnet": Family(
        "ResNetForImageClassification",
        "ResNetConfig",
        _RESNET,
        ("resnet", "resnet.encoder"),
        "resnet.encoder.stages",
        pictures,
    ),
}


def each_layer(model: nn.Module, family: Family) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each layer of a model."""
    for name, layer in model.get_submodule(family.layers).named_children():
        yield f"{family.layers}.{name}", layer
