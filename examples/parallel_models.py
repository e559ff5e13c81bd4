"""Small models of every family that has a recipe, for 3-D parallel training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import slapo
from examples.images import CHANNELS, CLASSES, SIDE, Digits, WideResNet
from examples.text import VOCABULARY, Batches, standard_library
from slapo.model_schedule import apply_schedule


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, and its dropout."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    length: int = 128
    vocabulary: int = VOCABULARY
    dropout: float = 0.0


@dataclass(frozen=True)
class Family:
    """One family of models.

    Parameters
    ----------
    key
        Of its recipe.
    build
        Makes the model.
    masked
        Whether it predicts hidden tokens rather than the next one.
    encodes
        Whether it has an encoder that reads the whole text.
    pixels
        How it calls the images that it reads; "" for one that reads text.
    """

    key: str
    build: Callable[[Sizes], nn.Module]
    masked: bool = False
    encodes: bool = False
    pixels: str = ""

    def data(self, batch: int, length: int, seed: int) -> Callable[[], dict[str, Tensor]]:
        """What gives the next batch of text or images at each call."""
        if self.pixels:
            return Digits(batch, seed)
        return Batches(standard_library(), batch, length, self.masked, seed)

    def batch(
        self, found: dict[str, Tensor], labeled: bool = False
    ) -> tuple[dict[str, Tensor], Tensor]:
        """``(inputs, targets)`` of an engine, from what :meth:`data` gives.

        `labeled`: the inputs have labels too, as a model needs that computes its loss itself.
        """
        labels = found["labels"]
        if self.pixels:
            return {self.pixels: found["pixel_values"]}, labels
        inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
        if self.encodes:
            # The decoder reads the text one token late: it says the encoder's input again.
            inputs["decoder_input_ids"] = F.pad(labels.clamp(min=0), (1, -1))
        return {**inputs, "labels": labels} if labeled else inputs, labels

    def loss(self, output: Any, labels: Tensor) -> Tensor:
        """Mean cross entropy; of the next token for models that predict it."""
        total, count = self.token_loss(output, labels)
        return total / count

    def token_loss(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What an engine takes: the sum over tokens (or images), and how many have a label.

        Micro-batches and replicas hold other numbers of them, so that the mean of means is not
        the mean.
        """
        logits = output if isinstance(output, Tensor) else output.logits
        shifts = not (self.masked or self.encodes or self.pixels)
        labels = labels[:, 1:] if shifts else labels
        count = (labels != -100).sum()
        if logits is None:  # with fused_loss there are none
            return output.loss * count, count
        flat = (logits[:, :-1] if shifts else logits).flatten(0, -2).float()
        return F.cross_entropy(flat, labels.flatten(), reduction="sum"), count


# --- models --------------------------------------------------------------------------------------
def _of(name: str, settings: Callable[[Sizes], dict[str, Any]], **fixed: Any) -> Any:
    """What builds a model of Transformers: settings that follow from sizes, and fixed ones."""

    def build(sizes: Sizes) -> nn.Module:
        model = getattr(transformers, name)
        return model(model.config_class(**{**settings(sizes), **fixed}))

    return build


def _plain(sizes: Sizes) -> dict[str, Any]:
    """What configs of encoders and decoders agree on."""
    return {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "max_position_embeddings": sizes.length,
        # Transformers' own defaults lie beyond this vocabulary.
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _encoder(sizes: Sizes) -> dict[str, Any]:
    return {
        **_plain(sizes),
        "intermediate_size": 4 * sizes.hidden,
        "hidden_dropout_prob": sizes.dropout,
        "attention_probs_dropout_prob": sizes.dropout,
    }


def _decoder(sizes: Sizes) -> dict[str, Any]:
    """Llama, and those after it."""
    return {
        **_plain(sizes),
        "intermediate_size": 3 * sizes.hidden,
        "num_key_value_heads": sizes.heads // 2,
        "head_dim": sizes.hidden // sizes.heads,
        "attention_dropout": sizes.dropout,
        "use_cache": False,
    }


def _gpt2(sizes: Sizes) -> dict[str, Any]:
    dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    return {**_plain(sizes), **dict.fromkeys(dropouts, sizes.dropout), "use_cache": False}


def _gpt_neo(sizes: Sizes) -> dict[str, Any]:
    dropouts = ("resid_dropout", "embed_dropout", "attention_dropout")
    windows = [[["global", "local"], (sizes.layers + 1) // 2]]
    return {
        **{k: v for k, v in _plain(sizes).items() if not k.startswith("num_")},
        **dict.fromkeys(dropouts, sizes.dropout),
        "num_layers": 2 * windows[0][1],
        "num_heads": sizes.heads,
        "attention_types": windows,
        "window_size": max(1, sizes.length // 4),
        "use_cache": False,
    }


def _opt(sizes: Sizes) -> dict[str, Any]:
    return {
        **_plain(sizes),
        "ffn_dim": 4 * sizes.hidden,
        "word_embed_proj_dim": sizes.hidden,
        "dropout": sizes.dropout,
        "use_cache": False,
    }


def _t5(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocabulary,
        "d_model": sizes.hidden,
        "d_kv": sizes.hidden // sizes.heads,
        "d_ff": 4 * sizes.hidden,
        "num_layers": sizes.layers // 2,
        "num_decoder_layers": sizes.layers - sizes.layers // 2,
        "num_heads": sizes.heads,
        "dropout_rate": sizes.dropout,
        "use_cache": False,
    }


def _roberta(sizes: Sizes) -> dict[str, Any]:
    """Its positions count from 2."""
    return {**_encoder(sizes), "max_position_embeddings": sizes.length + 2}


def _vit(sizes: Sizes) -> dict[str, Any]:
    found = _encoder(sizes)
    sized = {"image_size": SIDE, "patch_size": SIDE // 4, "num_channels": CHANNELS}
    texts = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")
    return {**{k: v for k, v in found.items() if k not in texts}, **sized, "num_labels": CLASSES}


def _wideresnet(sizes: Sizes) -> nn.Module:
    return WideResNet(sizes.hidden, max(1, sizes.layers // 4), sizes.dropout)


def _of_all(*families: Family) -> dict[str, Family]:
    return {family.key: family for family in families}


MODELS = _of_all(
    Family("albert", _of("AlbertForMaskedLM", _encoder, embedding_size=64), masked=True),
    Family("bert", _of("BertForMaskedLM", _encoder), masked=True),
    Family("gemma", _of("GemmaForCausalLM", _decoder)),
    Family("gemma3_text", _of("Gemma3ForCausalLM", _decoder, sliding_window=32)),
    Family("gpt2", _of("GPT2LMHeadModel", _gpt2)),
    Family("gpt_neo", _of("GPTNeoForCausalLM", _gpt_neo)),
    Family("llama", _of("LlamaForCausalLM", _decoder)),
    Family("mistral", _of("MistralForCausalLM", _decoder, sliding_window=32)),
    Family("mixtral", _of("MixtralForCausalLM", _decoder, num_local_experts=4)),
    Family("opt", _of("OPTForCausalLM", _opt)),
    Family("qwen2", _of("Qwen2ForCausalLM", _decoder)),
    Family("qwen3", _of("Qwen3ForCausalLM", _decoder)),
    Family("roberta", _of("RobertaForMaskedLM", _roberta), masked=True),
    Family("t5", _of("T5ForConditionalGeneration", _t5), encodes=True),
    Family("vit", _of("ViTForImageClassification", _vit), pixels="pixel_values"),
    Family("wideresnet", _wideresnet, pixels="x"),
)
#: One of each kind: what tests train on every engine, in every layout.
FAMILIES = {key: MODELS[key] for key in ("gpt2", "bert", "t5", "llama")}


# --- schedule ------------------------------------------------------------------------------------
def schedule(
    sch: slapo.Schedule,
    family: Family,
    stages: int = 1,
    checkpoint_ratio: float = 0.0,
    **options: Any,
) -> None:
    """Tensor parallelism, then checkpoints, then pipeline cuts, by the family's recipe.

    Split dropout needs :func:`slapo.set_random_seed` before the first step.

    Parameters
    ----------
    sch
        The root schedule; tensor parallelism runs over its group.
    family
        The model's.
    stages
        Pipeline stages to cut, of about the same work.
    checkpoint_ratio
        Share of the layers whose activations are computed again in the backward pass.
    **options
        More of :func:`slapo.model_schedule.apply_schedule`.
    """
    apply_schedule(
        sch,
        family.key,
        pipeline_cuts=stages if stages > 1 else None,
        ckpt_ratio=checkpoint_ratio,
        checkpoint_method="head",
        # The loss of the engines is that of whole logits, for all families and layouts.
        **{"parallel_vocabulary": False, **options},
    )
