"""The models of ``python -m benchmark train``: published sizes, and small ones for a CPU.

Weights are random, and so is the one batch that all steps train on: neither a download nor the
loading of data is in a figure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import with_nearest

#: Of the small form of every model.
SMALL_LENGTH, SMALL_VOCABULARY = 32, 512
#: Width and height of images, and of those for small models.
PIXELS, SMALL_PIXELS = 224, 16


@dataclass(frozen=True)
class Model:
    """A model to train.

    Parameters
    ----------
    key
        Of its recipe.
    cls
        A class of Transformers; "" for the Wide ResNet of the examples.
    settings, small
        Of its config; those that its small form changes.
    length
        Largest number of tokens of a sequence.
    masked
        Each token is predicted where it stands, and not the next one.
    encodes
        It has an encoder beside the decoder.
    stacks
        Paths of its lists of layers, for PyTorch's own checkpoints: where the model has none.
    """

    key: str
    cls: str
    settings: dict[str, Any]
    small: dict[str, Any] = field(default_factory=dict)
    length: int = 512
    masked: bool = False
    encodes: bool = False
    stacks: str = ""

    def sizes(self, small: bool) -> dict[str, Any]:
        """The settings of one of the two forms."""
        return {**self.settings, **self.small} if small else self.settings

    def build(self, small: bool, length: int) -> nn.Module:
        """Random weights, the same at each call, in train mode."""
        torch.manual_seed(0)
        if not self.cls:
            from examples.images import WideResNet

            return WideResNet(**self.sizes(small)).train()
        import transformers  # optional package

        model: nn.Module = getattr(transformers, self.cls)(self.config(small, length))
        return model.train()

    def config(self, small: bool, length: int) -> Any:
        """Of Transformers."""
        import transformers  # optional package

        settings = self.sizes(small)
        if "max_position_embeddings" in settings:  # sequences may be longer than published ones
            offset = 2 if self.key == "roberta" else 0
            least = max(settings["max_position_embeddings"], length + offset)
            settings = {**settings, "max_position_embeddings": least}
        return getattr(transformers, self.cls).config_class(**settings)

    def batch(self, samples: int, length: int, small: bool, seed: int) -> dict[str, Tensor]:
        """Random tokens without padding, or images; with labels."""
        generator = torch.Generator().manual_seed(seed)
        if not self.cls:
            from examples.images import CHANNELS, CLASSES

            side = SMALL_PIXELS if small else PIXELS
            pixels = torch.rand(samples, CHANNELS, side, side, generator=generator)
            return {"x": pixels, "labels": torch.randint(CLASSES, (samples,), generator=generator)}
        vocabulary = self.sizes(small)["vocab_size"]
        ids = torch.randint(3, vocabulary, (samples, length), generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        if self.encodes:
            # the decoder says again what the encoder reads, one token late
            batch["decoder_input_ids"] = nn.functional.pad(ids, (1, -1))
        return batch

    def loss(self, output: Any, labels: Tensor) -> Tensor:
        """Mean cross entropy, of what the model returns when it gets no labels."""
        logits = output if isinstance(output, Tensor) else output.logits
        if not (self.masked or self.encodes or not self.cls):
            logits, labels = logits[:, :-1], labels[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def model_named(name: str) -> Model:
    """The model of a name.

    Raises
    ------
    ValueError
        For an unknown one, naming the nearest.
    """
    if name not in MODELS:
        known = f"there are {', '.join(MODELS)}"
        raise ValueError(with_nearest(name, list(MODELS), f"no model {name!r}; {known}"))
    return MODELS[name]


# --- tables --------------------------------------------------------------------------------------
_OFF = {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_TINY = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
_TINY |= {"vocab_size": SMALL_VOCABULARY, "max_position_embeddings": 64}


def _encoder(key: str, cls: str, vocabulary: int, **settings: Any) -> Model:
    sizes = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **settings,
    }
    return Model(key, cls, sizes, {**_TINY, "intermediate_size": 256}, masked=True)


def _gpt2(hidden: int, layers: int, heads: int) -> Model:
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50257,
        "max_position_embeddings": 1024,
    }
    return Model("gpt2", "GPT2LMHeadModel", {**sizes, **_OFF, **dropouts}, _TINY, 1024)


def _gpt_neo(hidden: int, layers: int, heads: int) -> Model:
    dropouts = dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0)
    sizes = {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "attention_types": [[["global", "local"], layers // 2]],
        "window_size": 256,
        "vocab_size": 50257,
        "max_position_embeddings": 2048,
    }
    small = {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 8,
        "vocab_size": SMALL_VOCABULARY,
        "max_position_embeddings": 64,
    }
    return Model("gpt_neo", "GPTNeoForCausalLM", {**sizes, **_OFF, **dropouts}, small, 2048)


def _opt(hidden: int, layers: int, heads: int) -> Model:
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "word_embed_proj_dim": hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "dropout": 0.0,
    }
    small = {**_TINY, "ffn_dim": 256, "word_embed_proj_dim": 64}
    return Model("opt", "OPTForCausalLM", {**sizes, **_OFF}, small, 2048)


def _t5(hidden: int, layers: int, heads: int) -> Model:
    sizes = {
        "d_model": hidden,
        "d_kv": hidden // heads,
        "d_ff": 4 * hidden,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
        "vocab_size": 32128,
        "dropout_rate": 0.0,
        "use_cache": False,
        "decoder_start_token_id": 0,
    }
    small = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 2}
    small |= {"num_heads": 4, "vocab_size": SMALL_VOCABULARY}
    return Model("t5", "T5ForConditionalGeneration", sizes, small, encodes=True)


def _llama(key: str, cls: str, hidden: int, wide: int, layers: int, heads: int, kv: int) -> Model:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    small = {**_TINY, "intermediate_size": 172, "num_key_value_heads": 2}
    return Model(key, cls, {**sizes, **_OFF}, small, 4096)


MODELS: dict[str, Model] = {
    "bert": _encoder("bert", "BertForMaskedLM", 30522),
    "roberta": _encoder("roberta", "RobertaForMaskedLM", 50265, max_position_embeddings=514),
    "albert": replace(
        _encoder("albert", "AlbertForMaskedLM", 30000, embedding_size=128),
        stacks="albert.encoder.albert_layer_groups.0.albert_layers",
    ),
    "gpt2": _gpt2(1024, 24, 16),
    "gpt2-1.4b": _gpt2(1536, 48, 16),
    "gpt2-10b": _gpt2(4096, 48, 32),
    "gpt_neo": _gpt_neo(2048, 24, 16),
    "gpt_neo-2.7b": _gpt_neo(2560, 32, 20),
    "opt": _opt(1024, 24, 16),
    "opt-2.7b": _opt(2560, 32, 32),
    "t5": _t5(1024, 24, 16),
    "wideresnet": Model(
        "wideresnet",
        "",
        {"channels": 1024, "blocks": 4},
        {"channels": 64, "blocks": 1},
        stacks="layer1 layer2 layer3 layer4",
    ),
    "llama": _llama("llama", "LlamaForCausalLM", 4096, 11008, 32, 32, 32),
    "llama-1b": _llama("llama", "LlamaForCausalLM", 2048, 5632, 22, 32, 4),
    "mistral": _llama("mistral", "MistralForCausalLM", 4096, 14336, 32, 32, 8),
    "qwen2": _llama("qwen2", "Qwen2ForCausalLM", 3584, 18944, 28, 28, 4),
}
