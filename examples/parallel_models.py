"""Four model families for 3-D parallel training: small configurations, and a schedule for each.

What differs between families is a table of paths; the verbs are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
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
class Split:
    """A linear layer that tensor parallelism splits.

    Parameters
    ----------
    path
        From the transformer layer.
    axis
        Of the weight.
    blocks
        Equal parts that lie side by side along `axis`: query, key and value in one weight.
    """

    path: str
    axis: int
    blocks: int = 1


@dataclass(frozen=True)
class Layer:
    """How one kind of transformer layer is split over the tensor-parallel ranks.

    Parameters
    ----------
    columns
        Layers whose output is split; their input is whole.
    rows
        Layers whose input is split; their outputs are summed.
    inputs
        Modules that take whole inputs into the split region, whose gradients are summed; with the
        names of these inputs where there are others too.
    shared_out
        ``(module, attribute)``: numbers of heads, divided by the ranks.
    forked
        Modules with dropout between `columns` and `rows` and nowhere else: each rank has other
        heads or neurons there, and draws other numbers for them.
    """

    columns: tuple[Split, ...]
    rows: tuple[Split, ...]
    inputs: tuple[str | tuple[str, ...], ...]
    shared_out: tuple[tuple[str, str], ...] = ()
    forked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One family of models.

    Parameters
    ----------
    build
        Makes the model.
    layers
        Path of a list of layers -> how one of them is split. In the order of execution.
    containers
        Paths down to which the model is traced, so that stages can end within.
    ends
        Path of the last layer of a list -> the module after which a stage ends instead.
    masked
        Whether it predicts hidden tokens rather than the next one.
    """

    build: Callable[[Sizes], nn.Module]
    layers: dict[str, Layer]
    containers: tuple[str, ...]
    ends: dict[str, str] = field(default_factory=dict)
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
        # Heads would draw one mask: this dropout lies in one module with that of the sum of all.
        attn_pdrop=0.0,
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


# --- tables --------------------------------------------------------------------------------------
def _t5_attention(path: str) -> tuple[tuple[Split, ...], Split, tuple[str, str]]:
    columns = tuple(Split(f"{path}.{name}", 0) for name in "qkv")
    return columns, Split(f"{path}.o", 1), (path, "n_heads")


_T5_SELF = _t5_attention("layer.0.SelfAttention")
_T5_CROSS = _t5_attention("layer.1.EncDecAttention")


def _t5_mlp(number: int) -> tuple[Split, Split, str]:
    path = f"layer.{number}.DenseReluDense"
    return Split(f"{path}.wi", 0), Split(f"{path}.wo", 1), path


_T5_ENCODER_MLP, _T5_DECODER_MLP = _t5_mlp(1), _t5_mlp(2)

FAMILIES = {
    "gpt2": Family(
        _gpt2,
        {
            "transformer.h": Layer(
                columns=(Split("attn.c_attn", 1, blocks=3), Split("mlp.c_fc", 1)),
                rows=(Split("attn.c_proj", 0), Split("mlp.c_proj", 0)),
                inputs=("attn", "mlp"),
                shared_out=(("attn", "num_heads"), ("attn", "split_size")),
            )
        },
        containers=("transformer",),
    ),
    "bert": Family(
        _bert,
        {
            "bert.encoder.layer": Layer(
                columns=(
                    *(Split(f"attention.self.{name}", 0) for name in ("query", "key", "value")),
                    Split("intermediate.dense", 0),
                ),
                rows=(Split("attention.output.dense", 1), Split("output.dense", 1)),
                inputs=("attention.self", "intermediate"),
                forked=("attention.self",),
            )
        },
        containers=("bert.encoder",),
        masked=True,
    ),
    "t5": Family(
        _t5,
        {
            "encoder.block": Layer(
                columns=(*_T5_SELF[0], _T5_ENCODER_MLP[0]),
                rows=(_T5_SELF[1], _T5_ENCODER_MLP[1]),
                # Attention takes a position bias as well, of which each rank has its heads'.
                inputs=((_T5_SELF[2][0], "hidden_states"), _T5_ENCODER_MLP[2]),
                shared_out=(_T5_SELF[2],),
                forked=(_T5_SELF[2][0], _T5_ENCODER_MLP[2]),
            ),
            "decoder.block": Layer(
                columns=(*_T5_SELF[0], *_T5_CROSS[0], _T5_DECODER_MLP[0]),
                rows=(_T5_SELF[1], _T5_CROSS[1], _T5_DECODER_MLP[1]),
                # Cross attention has two whole inputs: the decoder's, and the encoder's states.
                inputs=(
                    (_T5_SELF[2][0], "hidden_states"),
                    (_T5_CROSS[2][0], "hidden_states", "key_value_states"),
                    _T5_DECODER_MLP[2],
                ),
                shared_out=(_T5_SELF[2], _T5_CROSS[2]),
                forked=(_T5_SELF[2][0], _T5_CROSS[2][0], _T5_DECODER_MLP[2]),
            ),
        },
        containers=("encoder", "decoder"),
        ends={"encoder.block": "encoder"},
        encodes=True,
    ),
    "llama": Family(
        _llama,
        {
            "model.layers": Layer(
                columns=(
                    *(Split(f"self_attn.{name}_proj", 0) for name in "qkv"),
                    *(Split(f"mlp.{name}_proj", 0) for name in ("gate", "up")),
                ),
                rows=(Split("self_attn.o_proj", 1), Split("mlp.down_proj", 1)),
                inputs=("self_attn", "mlp"),
                forked=("self_attn",),
            )
        },
        containers=("model",),
    ),
}


# --- schedule ------------------------------------------------------------------------------------
def schedule(
    sch: slapo.Schedule, family: Family, stages: int = 1, checkpoint_ratio: float = 0.0
) -> None:
    """Tensor parallelism, then checkpoints, then pipeline cuts.

    In this order because a checkpoint wraps what stands there in the end, and a trace for cuts
    takes each layer as it is. Split dropout needs :func:`slapo.set_random_seed` before the first
    step.

    Parameters
    ----------
    sch
        The root schedule; tensor parallelism runs over its group.
    family
        The model's.
    stages
        Pipeline stages to cut.
    checkpoint_ratio
        Share of the layers whose activations are computed again in the backward pass.
    """
    if sch.world_size > 1:
        for path, table in family.layers.items():
            for layer in sch.select(f"{path}.*"):
                _split_layer(layer, table)
    layers = _layer_paths(sch, family)
    for path in layers[: round(checkpoint_ratio * len(layers))]:
        sch[path].checkpoint()
    if stages > 1:
        cut(sch, family, stages)


def _split_layer(layer: slapo.Schedule, table: Layer) -> None:
    for entry in table.inputs:
        path, *names = (entry,) if isinstance(entry, str) else entry
        layer[path].sync("bwd_post", "all_reduce", argument=names or None)
    for split in table.columns:
        node = layer[split.path].shard("weight", axis=split.axis, blocks=split.blocks)
        if getattr(node.mod, "bias", None) is not None:
            node.shard("bias", axis=0, blocks=split.blocks)
    for split in table.rows:
        layer[split.path].shard("weight", axis=split.axis).sync("fwd_post", "all_reduce")
    for path, attribute in table.shared_out:
        layer[path].set(attribute, whole=getattr(layer[path].mod, attribute))
    bias = "layer.0.SelfAttention.relative_attention_bias"  # T5's first layer: one row a head
    if bias in layer:
        layer[bias].shard("weight", axis=1)
    for path in table.forked:
        layer[path].fork_rng()


def _layer_paths(sch: slapo.Schedule, family: Family) -> list[str]:
    return [
        f"{path}.{number}"
        for path in family.layers
        for number in range(len(sch.mod.get_submodule(path)))  # type: ignore[arg-type]
    ]


def cut(sch: slapo.Schedule, family: Family, stages: int) -> None:
    """End stages after every n-th layer, as evenly as the number of layers allows."""
    layers = _layer_paths(sch, family)
    if stages > len(layers):
        raise ValueError(f"{len(layers)} layers make no {stages} stages; use fewer, or more layers")
    last_of = {path: [p for p in layers if p.startswith(f"{path}.")][-1] for path in family.ends}
    instead = {last_of[path]: end for path, end in family.ends.items()}
    traced = sch.trace_until(
        family.containers,
        tracer="huggingface",
        concrete_args={} if family.masked else {"use_cache": False},
        example_inputs=family.batch(_example())[0],
    )
    if not traced:
        raise RuntimeError("the model could not be traced; the warning above says why")
    for stage in range(1, stages):
        end = layers[stage * len(layers) // stages - 1]
        sch[instead.get(end, end)].cut_pipeline_stage()


def _example() -> dict[str, Tensor]:
    """Any text: sizes stay free."""
    tokens = torch.ones(2, 6, dtype=torch.long)
    return {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
