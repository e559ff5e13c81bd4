"""A small GPT-2 and a small BERT from their configurations, and a schedule for each.

GPT-2's is the ready one of its family; BERT's is written out, with a kernel of its own.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import slapo
from examples.text import VOCABULARY
from slapo.model_schedule import apply_schedule
from slapo.op import FusedQKV

HIDDEN, LAYERS, HEADS, LENGTH = 128, 4, 4, 128


def gpt2() -> nn.Module:
    """GPT-2, without dropout so that losses can be compared step by step."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """BERT for masked language modeling, without dropout."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


# --- schedules: kernels, then tensor parallelism, then checkpoints --------------------------------
# In this order because a fusion looks for operations that sharded modules hide, and a checkpoint
# wraps whatever stands there in the end.
def schedule_gpt2(sch: slapo.Schedule) -> None:
    """All of it by the family's recipe."""
    apply_schedule(sch, "gpt2", ckpt_ratio=0.5, checkpoint_method="head")


def schedule_bert(sch: slapo.Schedule) -> None:
    """One product for query, key and value; bias and GELU fused; shards; checkpoints."""
    for layer in sch.select("bert.encoder.layer.*"):
        _fuse_qkv(layer["attention.self"])
        _fuse_bias_gelu(layer["intermediate"])

    for layer in sch.select("bert.encoder.layer.*"):
        attention, qkv = layer["attention"], layer["attention.self.FusedQKV_0.fused_linear"]
        qkv.shard("weight", axis=0, blocks=3).shard("bias", axis=0, blocks=3)
        attention["self"].sync("bwd_post", "all_reduce")
        attention["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        layer["intermediate.dense"].shard("weight", axis=0).shard("bias", axis=0)
        layer["intermediate"].sync("bwd_post", "all_reduce")
        layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["bert.embeddings.word_embeddings"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    head = sch["cls.predictions.decoder"].shard("weight", axis=0).shard("bias", axis=0)
    _gather_logits(head)

    for layer in range(LAYERS // 2):
        sch[f"bert.encoder.layer.{layer}"].checkpoint()


def _gather_logits(head: slapo.Schedule) -> None:
    """Every rank computes the same loss from whole logits, so their gradient is only split."""
    head.sync("bwd_post", "all_reduce")
    head.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


def _fuse_qkv(attention: slapo.Schedule) -> None:
    """Three products and their split into heads --> one."""

    def projection(x: Tensor, *shape: Any) -> Tensor:
        projected: Tensor = slapo.call_module("query|key|value", x)
        return projected.view(shape).transpose(1, 2)

    attention.trace(recursive=False, tracer="huggingface")
    attention.replace(FusedQKV(HIDDEN, HEADS), attention.find(projection))


def _fuse_bias_gelu(intermediate: slapo.Schedule) -> None:
    """linear, add, gelu --> linear and one compiled kernel."""
    intermediate["dense"].decompose()
    intermediate.trace(flatten=True)
    match = intermediate.find(lambda x, bias: F.gelu(bias + x))
    intermediate.fuse(match, compiler="TorchScript", name="BiasGeLU")


MODELS = {"gpt2": (gpt2, schedule_gpt2), "bert": (bert, schedule_bert)}
