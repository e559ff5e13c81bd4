"""Four model families for 3-D parallel training: small configurations, and their recipes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import slapo
from examples.text import VOCABULARY
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
    """

    key: str
    build: Callable[[Sizes], nn.Module]
    masked: bool = False
    encodes: bool = False

    def batch(self, tokens: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """``(inputs, targets)`` of an engine, from what ``examples.text.Batches`` yields."""
        inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        if self.encodes:
            # The decoder reads the text one token late: it says the encoder's input again.
            inputs["decoder_input_ids"] = F.pad(tokens["labels"].clamp(min=0), (1, -1))
        return inputs, tokens["labels"]

    def loss(self, output: Any, labels: Tensor) -> Tensor:
        """Mean cross entropy; of the next token for models that predict it."""
        total, count = self.token_loss(output, labels)
        return total / count

    def token_loss(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What an engine takes: the sum over tokens, and how many have a label.

        Micro-batches and replicas hold other numbers of them, so that the mean of means is not
        the mean.
        """
        logits = output.logits
        if not (self.masked or self.encodes):
            logits, labels = logits[:, :-1], labels[:, 1:]
        flat = logits.flatten(0, 1).float()
        total = F.cross_entropy(flat, labels.flatten(), reduction="sum")
        return total, (labels != -100).sum()


# --- models --------------------------------------------------------------------------------------
def _gpt2(sizes: Sizes) -> nn.Module:
    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_embd=sizes.hidden,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        n_positions=sizes.length,
        resid_pdrop=sizes.dropout,
        embd_pdrop=sizes.dropout,
        attn_pdrop=sizes.dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def _bert(sizes: Sizes) -> nn.Module:
    config = BertConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.hidden,
        max_position_embeddings=sizes.length,
        hidden_dropout_prob=sizes.dropout,
        attention_probs_dropout_prob=sizes.dropout,
    )
    return BertForMaskedLM(config)


def _t5(sizes: Sizes) -> nn.Module:
    config = T5Config(
        vocab_size=sizes.vocabulary,
        d_model=sizes.hidden,
        d_kv=sizes.hidden // sizes.heads,
        d_ff=4 * sizes.hidden,
        num_layers=sizes.layers // 2,
        num_decoder_layers=sizes.layers - sizes.layers // 2,
        num_heads=sizes.heads,
        dropout_rate=sizes.dropout,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def _llama(sizes: Sizes) -> nn.Module:
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads // 2,
        max_position_embeddings=sizes.length,
        attention_dropout=sizes.dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


FAMILIES = {
    "gpt2": Family("gpt2", _gpt2),
    "bert": Family("bert", _bert, masked=True),
    "t5": Family("t5", _t5, encodes=True),
    "llama": Family("llama", _llama),
}


# --- schedule ------------------------------------------------------------------------------------
def schedule(
    sch: slapo.Schedule,
    family: Family,
    stages: int = 1,
    checkpoint_ratio: float = 0.0,
    sequence_parallel: bool = False,
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
    sequence_parallel
        Whether tokens are dealt out between the split regions.
    """
    apply_schedule(
        sch,
        family.key,
        pipeline_cuts=stages if stages > 1 else None,
        ckpt_ratio=checkpoint_ratio,
        checkpoint_method="head",
        sequence_parallel=sequence_parallel,
        # The loss of the engines is that of whole logits, for all families and layouts.
        parallel_vocabulary=False,
    )
