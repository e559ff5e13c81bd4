"""A small model of every key, with its inputs: odd sizes, padding, uneven vocabularies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.images import WideResNet
from tests.graph import zoo  # skips without transformers, and stays offline

transformers = zoo.transformers

VOCABULARY = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
DECODER: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Model:
    """How to make a small model of a key, and what to give it."""

    build: Callable[..., nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]


def _spread(model: nn.Module) -> nn.Module:
    """No parameter is all zeros or ones: one that is left out must show."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(batch: int, length: int, seed: int = 1) -> dict[str, Tensor]:
    """Padded on the right, but for the first sample."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, length - row % length :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def two_texts(batch: int, length: int) -> dict[str, Tensor]:
    """For an encoder, and a shorter one for the decoder."""
    given = tokens(batch, length)
    return {**given, "labels": tokens(batch, length - 4, seed=2)["labels"]}


def images(batch: int, length: int) -> dict[str, Tensor]:
    """With classes; the length is the image's."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch, 3, 12, 20, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(batch) % 2}


def plain_images(batch: int, length: int) -> dict[str, Tensor]:
    return {"x": images(batch, length)["pixel_values"]}


def wide_resnet(blocks: int = 2, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return WideResNet(channels=64, blocks=blocks).train()


def of(name: str, inputs: Callable[[int, int], Any] = tokens, **settings: Any) -> Model:
    """A class of Transformers with `SIZES`, whose names it knows, and without dropout."""

    def build(**changes: Any) -> nn.Module:
        torch.manual_seed(0)
        cls = getattr(transformers, name)
        config = cls.config_class(**{**SIZES, **settings, **changes})
        for each, value in config.to_dict().items():
            if "drop" in each and isinstance(value, float):
                setattr(config, each, changes.get(each, 0.0))
        return _spread(cls(config)).train()

    return Model(build, inputs)


def decoder(name: str, **settings: Any) -> Model:
    """A causal language model of Transformers with the settings of `DECODER`."""
    return of(f"{name}ForCausalLM", **{**DECODER, **settings})


_GPT = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "intermediate_size": None}
MODELS = {
    "bert": of("BertForMaskedLM"),
    "roberta": of("RobertaForMaskedLM", max_position_embeddings=64),
    "albert": of("AlbertForMaskedLM", embedding_size=16),
    "gpt2": of("GPT2LMHeadModel", **_GPT),
    "gpt_neo": of(
        "GPTNeoForCausalLM",
        **{**_GPT, "intermediate_size": 80},
        attention_types=[[["global", "local"], 2]],
        window_size=4,
    ),
    "opt": of(
        "OPTForCausalLM",
        ffn_dim=72,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
        use_cache=False,
    ),
    "t5": of(
        "T5ForConditionalGeneration",
        two_texts,
        d_kv=8,
        d_ff=72,
        num_hidden_layers=2,
        num_decoder_layers=2,
        decoder_start_token_id=0,
        use_cache=False,
    ),
    "llama": decoder("Llama"),
    "mistral": decoder("Mistral", sliding_window=5),
    "qwen2": decoder("Qwen2"),
    "qwen3": decoder("Qwen3"),
    "gemma": decoder("Gemma"),
    "gemma3": decoder("Gemma3", sliding_window=5),
    "gemma3_text": decoder("Gemma3", sliding_window=5),
    "mixtral": decoder("Mixtral", intermediate_size=64, num_local_experts=4, num_experts_per_tok=2),
    "vit": of("ViTForImageClassification", images, image_size=(12, 20), patch_size=4),
    "wideresnet": Model(wide_resnet, plain_images),
}
#: Key -> changes by which its model has a first and a last layer only; others go by the default.
_SHALLOW: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "t5": {},
    "wideresnet": {"blocks": 1},
}


def shallow(key: str) -> dict[str, Any]:
    """Changes for tests of many modes, in which more layers are more of the same."""
    return _SHALLOW.get(key, {"num_hidden_layers": 2})
