"""Small, randomly initialized models of Transformers: from configs alone, without the hub."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


#: Of every config; Transformers knows these names for those of all families.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": MAX_LENGTH,
}


@dataclass(frozen=True)
class Family:
    """How to build one model, and where its parts are."""

    cls: str  # name of the class in ``transformers``
    layers: str  # path of the list of layers
    settings: dict[str, Any]  # arguments of the config besides `SIZES`
    inputs: Callable[[int, int, bool], dict[str, Tensor]] = text  # batch, length, labels
    #: paths of the containers from the root down to the layers, if these are not all around them
    containers: tuple[str, ...] = ()

    def build(self, seed: int = 0, **changes: Any) -> nn.Module:
        """The model, in eval mode and without dropout."""
        torch.manual_seed(seed)
        cls = getattr(transformers, self.cls)
        config = cls.config_class(**{**SIZES, **self.settings, **changes})
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, changes.get(name, 0.0))
        return cls(config).eval()  # type: ignore[no-any-return]

    @property
    def chain(self) -> tuple[str, ...]:
        names = self.layers.split(".")
        return self.containers or tuple(".".join(names[:k]) for k in range(1, len(names)))

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        """The rule that enters the chain of containers only."""
        return path not in self.chain


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {**_TOKENS, "pad_token_id": 0}
_GPT_NEO = {**_TOKENS, "attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 8}
_T5 = {
    "num_decoder_layers": LAYERS,
    "d_kv": 8,
    "d_ff": 2 * WIDTH,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
_LLAMA = {"num_key_value_heads": 2, "pad_token_id": 0}
_GEMMA3 = {**_LLAMA, "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2}


def _bert(name: str, path: str = "bert", inputs: Any = text, **settings: Any) -> Family:
    return Family(name, f"{path}.encoder.layer", settings, inputs)


def _gpt(name: str, settings: dict[str, Any], inputs: Any = text) -> Family:
    return Family(name, "transformer.h", settings, inputs)


def _decoder(name: str, **settings: Any) -> Family:
    return Family(f"{name}ForCausalLM", "model.layers", {**_LLAMA, **settings})


FAMILIES: dict[str, Family] = {
    "bert": _bert("BertForMaskedLM"),
    "bert_causal": _bert("BertLMHeadModel", is_decoder=True),
    "bert_classifier": _bert("BertForSequenceClassification", inputs=text_classes),
    "roberta": _bert("RobertaForCausalLM", "roberta", is_decoder=True),
    "albert": Family(
        "AlbertForMaskedLM", "albert.encoder.albert_layer_groups", {"embedding_size": 16}
    ),
    "gpt2": _gpt("GPT2LMHeadModel", _GPT2),
    "gpt2_classifier": _gpt("GPT2ForSequenceClassification", _GPT2, text_classes),
    "gpt_neo": _gpt("GPTNeoForCausalLM", _GPT_NEO),
    "opt": Family(
        "OPTForCausalLM",
        "model.decoder.layers",
        {"word_embed_proj_dim": WIDTH, "ffn_dim": 2 * WIDTH},
        containers=("model.decoder",),
    ),
    "t5": Family(
        "T5ForConditionalGeneration", "decoder.block", _T5, text_to_text, ("encoder", "decoder")
    ),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=8),
    "mixtral": _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma3": Family("Gemma3ForCausalLM", "model.layers", _GEMMA3),
    "vit": Family(
        "ViTForImageClassification", "vit.layers", {"image_size": 32, "patch_size": 8}, pictures
    ),
    "resnet": Family("ResNetForImageClassification", "resnet.encoder.stages", _RESNET, pictures),
}


def each_layer(model: nn.Module, family: Family) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each layer of a model."""
    for name, layer in model.get_submodule(family.layers).named_children():
        yield f"{family.layers}.{name}", layer
