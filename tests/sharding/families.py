"""Six tiny models of Transformers and their right tensor-parallel schedules, as tables.

With and without sequence parallelism. Tests take the right schedule from here, or plant a mistake:
:class:`Steps` has one method a decision, and a planted mistake overrides one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import slapo
from slapo.sharding.state import shards_of
from slapo.wrapper import innermost

VOCABULARY, HIDDEN, HEADS, LAYERS = 48, 32, 4, 2


@dataclass(frozen=True)
class Region:
    """A block that whole activations enter and leave, with slices in between."""

    enter: str  # the module whose input is whole
    columns: tuple[tuple[str, int, int], ...]  # path, axis, blocks of a weight whose output is cut
    rows: tuple[tuple[str, int], ...]  # path and axis of a weight whose input is cut
    arguments: tuple[str, ...] = ()  # inputs whose gradients are summed; empty for all
    counts: tuple[tuple[str, str], ...] = ()  # path, attribute: what each rank has its share of
    inner: tuple[str, ...] = ()  # norms in between, whole, of which each rank sees some heads
    forked: tuple[str, ...] = ()  # modules that draw random numbers for slices and nothing else
    #: path, attribute: how many query heads read a key head, where these may be fewer than ranks
    shared: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Experts:
    """Packed experts ``(expert, out, in)`` behind a router that every rank computes."""

    block: str = "mlp"
    path: str = "mlp.experts"


@dataclass(frozen=True)
class Stack:
    """A list of layers."""

    layers: str  # glob of their paths
    regions: tuple[Region, ...]
    norms: tuple[str, ...]  # see whole activations; under sequence parallelism, some tokens
    last: str  # the module whose output has all tokens again
    dropouts: tuple[str, ...] = ()  # as norms
    reads_parts: bool = True  # whether what reads that sends back parts of its gradient
    norms_last: bool = True  # whether the module `last` has weights that see some tokens only
    experts: Experts | None = None


@dataclass(frozen=True)
class Family:
    """A model, and how it is split."""

    #: by its dropout, and how much larger the vocabulary and the blocks' insides are than what two
    #: and four ranks shard evenly
    make: Callable[[float, int], nn.Module]
    stacks: tuple[Stack, ...]
    embeddings: tuple[str, ...]
    head: str
    inputs: Callable[[int, int], dict[str, Tensor]]

    def build(self, dropout: float, extra: int = 0) -> nn.Module:
        """The model."""
        return self.make(dropout, extra)


def tokens(batch: int, length: int, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def causal_inputs(batch: int, length: int) -> dict[str, Tensor]:
    ids = tokens(batch, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def encoder_decoder_inputs(batch: int, length: int) -> dict[str, Tensor]:
    labels = tokens(batch, length, seed=6)
    return {"input_ids": tokens(batch, length), "labels": labels}


def _of(name: str, settings: Callable[[float, int], dict[str, Any]], **fixed: Any) -> Any:
    """What builds a model of Transformers: settings of its dropout and extra width, and others."""

    def make(dropout: float, extra: int, **more: Any) -> nn.Module:
        import transformers

        cls = getattr(transformers, name)
        given = {**settings(dropout, extra), **fixed, **more}
        return cls(cls.config_class(vocab_size=VOCABULARY + extra, **given))

    return make


#: What all configurations but T5's call alike; Transformers' own tokens lie beyond the vocabulary.
_PLAIN: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _gpt2_sizes(dropout: float, extra: int) -> dict[str, Any]:
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout}
    drops["attn_pdrop"] = 0.0  # heads' dropout and that of their sum are in one module
    return {**_PLAIN, **drops, "n_inner": 4 * HIDDEN + extra, "use_cache": False}


def _decoder_sizes(dropout: float, extra: int) -> dict[str, Any]:
    return {
        **_PLAIN,
        "intermediate_size": 3 * HIDDEN + extra,
        "num_key_value_heads": HEADS // 2,
        "attention_dropout": dropout,
        "use_cache": False,
    }


def _bert_sizes(dropout: float, extra: int) -> dict[str, Any]:
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return {**_PLAIN, **drops, "intermediate_size": 3 * HIDDEN + extra}


def _t5_sizes(dropout: float, extra: int) -> dict[str, Any]:
    return {
        "d_model": HIDDEN,
        "d_kv": HIDDEN // HEADS,
        "d_ff": 3 * HIDDEN + extra,
        "num_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "num_heads": HEADS,
        "dropout_rate": dropout,
        "use_cache": False,
        "decoder_start_token_id": 0,
    }


def _decoder(layers: str, last: str, inner: tuple[str, ...] = (), moe: bool = False) -> Stack:
    attention = Region(
        "self_attn",
        tuple((f"self_attn.{n}_proj", 0, 1) for n in "qkv"),
        (("self_attn.o_proj", 1),),
        inner=inner,
        forked=("self_attn",),
        shared=("self_attn", "num_key_value_groups"),
    )
    mlp = Region(
        "mlp", tuple((f"mlp.{n}_proj", 0, 1) for n in ("gate", "up")), (("mlp.down_proj", 1),)
    )
    norms = ("input_layernorm", "post_attention_layernorm")
    regions = (attention,) if moe else (attention, mlp)
    return Stack(layers, regions, norms, last, experts=Experts() if moe else None)


def _t5_attention(path: str, arguments: tuple[str, ...]) -> Region:
    columns = tuple((f"{path}.{n}", 0, 1) for n in "qkv")
    counts = ((path, "n_heads"), (path, "inner_dim"))
    return Region(path, columns, ((f"{path}.o", 1),), arguments, counts, forked=(path,))


def _t5_mlp(number: int) -> Region:
    path = f"layer.{number}.DenseReluDense"
    return Region(path, ((f"{path}.wi", 0, 1),), ((f"{path}.wo", 1),), forked=(path,))


_T5_SELF = _t5_attention("layer.0.SelfAttention", ("hidden_states",))
_T5_CROSS = _t5_attention("layer.1.EncDecAttention", ("hidden_states", "key_value_states"))

FAMILIES = {
    "gpt2": Family(
        _of("GPT2LMHeadModel", _gpt2_sizes),
        (
            Stack(
                "transformer.h.*",
                (
                    Region(
                        "attn",
                        (("attn.c_attn", 1, 3),),
                        (("attn.c_proj", 0),),
                        counts=(("attn", "num_heads"), ("attn", "split_size")),
                    ),
                    Region("mlp", (("mlp.c_fc", 1, 1),), (("mlp.c_proj", 0),)),
                ),
                ("ln_1", "ln_2"),
                "transformer.ln_f",
                dropouts=("attn.resid_dropout", "mlp.dropout"),
            ),
        ),
        ("transformer.wte",),
        "lm_head",
        causal_inputs,
    ),
    "llama": Family(
        _of("LlamaForCausalLM", _decoder_sizes, mlp_bias=True, attention_bias=True),
        (_decoder("model.layers.*", "model.norm"),),
        ("model.embed_tokens",),
        "lm_head",
        causal_inputs,
    ),
    "qwen3": Family(
        _of("Qwen3ForCausalLM", _decoder_sizes, head_dim=HIDDEN // HEADS),
        (_decoder("model.layers.*", "model.norm", ("self_attn.q_norm", "self_attn.k_norm")),),
        ("model.embed_tokens",),
        "lm_head",
        causal_inputs,
    ),
    "mixtral": Family(
        # Rows of packed experts have to be multiples of 16 bytes long: their widths stay even.
        _of(
            "MixtralForCausalLM",
            _decoder_sizes,
            intermediate_size=3 * HIDDEN,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        (_decoder("model.layers.*", "model.norm", moe=True),),
        ("model.embed_tokens",),
        "lm_head",
        causal_inputs,
    ),
    "bert": Family(
        _of("BertForMaskedLM", _bert_sizes),
        (
            Stack(
                "bert.encoder.layer.*",
                (
                    Region(
                        "attention.self",
                        tuple((f"attention.self.{n}", 0, 1) for n in ("query", "key", "value")),
                        (("attention.output.dense", 1),),
                        counts=(
                            ("attention.self", "num_attention_heads"),
                            ("attention.self", "all_head_size"),
                        ),
                        forked=("attention.self",),
                    ),
                    Region("intermediate", (("intermediate.dense", 0, 1),), (("output.dense", 1),)),
                ),
                ("attention.output.LayerNorm", "output.LayerNorm"),
                f"bert.encoder.layer.{LAYERS - 1}",
                dropouts=("attention.output.dropout", "output.dropout"),
                reads_parts=False,
                norms_last=False,
            ),
        ),
        ("bert.embeddings.word_embeddings",),
        "cls.predictions.decoder",
        causal_inputs,
    ),
    "t5": Family(
        _of("T5ForConditionalGeneration", _t5_sizes),
        (
            Stack(
                "encoder.block.*",
                (_T5_SELF, _t5_mlp(1)),
                ("layer.0.layer_norm", "layer.1.layer_norm"),
                "encoder.final_layer_norm",
                dropouts=("layer.0.dropout", "layer.1.dropout"),
                reads_parts=False,
            ),
            Stack(
                "decoder.block.*",
                (_T5_SELF, _T5_CROSS, _t5_mlp(2)),
                ("layer.0.layer_norm", "layer.1.layer_norm", "layer.2.layer_norm"),
                "decoder.final_layer_norm",
                dropouts=("layer.0.dropout", "layer.1.dropout", "layer.2.dropout"),
            ),
        ),
        ("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
        "lm_head",
        encoder_decoder_inputs,
    ),
}

#: Those with two heads of keys and values, for four ranks; with one query head a rank, or two.
SHARED = {name: FAMILIES[name] for name in ("llama", "qwen3", "mixtral")}
for _name, _more in (("llama", {}), ("qwen3", {"head_dim": HIDDEN // 8})):
    _make = partial(FAMILIES[_name].make, num_attention_heads=8, **_more)
    SHARED[f"{_name}, 8 heads"] = replace(FAMILIES[_name], make=_make)


def is_whole(node: slapo.Schedule) -> bool:
    """Whether a layer's weight is not sharded: it may have followed one that it is tied to."""
    return "weight" not in shards_of(innermost(node.mod))


def shared_heads(layer: slapo.Schedule, path: str) -> int | None:
    """Of a column layer for keys and values, their heads where these are fewer than ranks."""
    if not path.endswith(("k_proj", "v_proj")):
        return None
    heads = layer[path.rpartition(".")[0]].mod.config.num_key_value_heads
    return heads if heads < layer.world_size else None


class Steps:
    """The right schedule of a family, one decision a method.

    Between the regions each rank may hold a part of the tokens, and shares may be of several sizes.
    """

    def __init__(
        self, family: Family, sequence_parallel: bool = False, uneven: bool = False
    ) -> None:
        self.family, self.spreads, self.uneven = family, sequence_parallel, uneven

    def apply(self, sch: slapo.Schedule) -> None:
        for stack in self.family.stacks:
            for number, layer in enumerate(sch.select(stack.layers)):
                for region in stack.regions:
                    self.region(layer, region, number)
                if stack.experts is not None:
                    self.experts(layer, stack.experts, number)
                if self.spreads:
                    self.tokens(layer, stack, number)
            if self.spreads:
                self.together(sch, stack)
        self.vocabulary(sch)
        self.head(sch)

    def region(self, layer: slapo.Schedule, region: Region, number: int) -> None:
        self.enter(layer, region, number)
        for column in region.columns:
            self.column(layer, column, number)
        if any(shared_heads(layer, path) for path, *_ in region.columns):
            self.groups(layer, *region.shared, number)
        for row in region.rows:
            self.row(layer, row, number)
        for path, attribute in region.counts:
            self.count(layer, path, attribute, number)
        for path in region.inner:
            self.whole_inside(layer, path, number)
        for path in region.forked:
            self.fork(layer, path, number)
        bias = f"{region.enter}.relative_attention_bias"  # of T5's first layer: a column a head
        if bias in layer:
            layer[bias].shard("weight", axis=1)

    def enter(self, layer: slapo.Schedule, region: Region, number: int) -> None:
        if self.spreads:
            tokens, *whole = region.arguments or (None,)
            layer[region.enter].sync("fwd_pre", "all_gather", axis=1, argument=tokens)
            if whole:
                layer[region.enter].sync("bwd_post", "all_reduce", argument=whole)
        else:
            layer[region.enter].sync("bwd_post", "all_reduce", argument=region.arguments or None)

    def column(self, layer: slapo.Schedule, column: tuple[str, int, int], number: int) -> None:
        path, axis, blocks = column
        cut = {"blocks": blocks, "uneven": self.uneven, "parts": self.parts(layer, path)}
        node = layer[path].shard("weight", axis=axis, **cut)
        if getattr(node.mod, "bias", None) is not None:
            node.shard("bias", axis=0, **cut)

    def parts(self, layer: slapo.Schedule, path: str) -> int | None:
        """The most parts that a column layer may be cut in."""
        return shared_heads(layer, path)

    def groups(self, layer: slapo.Schedule, path: str, attribute: str, number: int) -> None:
        heads = layer[path].mod.config.num_attention_heads
        layer[path].set(attribute, heads // layer.world_size)

    def row(self, layer: slapo.Schedule, row: tuple[str, int], number: int) -> None:
        path, axis = row
        self.reduce(layer[path].shard("weight", axis=axis, uneven=self.uneven), number)

    def reduce(self, node: slapo.Schedule, number: int) -> None:
        if self.spreads:
            node.sync("fwd_post", "reduce_scatter", axis=1)
        else:
            node.sync("fwd_post", "all_reduce")

    def count(self, layer: slapo.Schedule, path: str, attribute: str, number: int) -> None:
        whole = getattr(layer[path].mod, attribute)
        layer[path].set(attribute, whole // layer.world_size)

    def whole_inside(self, layer: slapo.Schedule, path: str, number: int) -> None:
        for name, _ in layer[path].mod.named_parameters():
            layer[path].annotate(name, "partial_grad", True)

    def fork(self, layer: slapo.Schedule, path: str, number: int) -> None:
        layer[path].fork_rng()

    def experts(self, layer: slapo.Schedule, experts: Experts, number: int) -> None:
        node = layer[experts.path].shard("gate_up_proj", axis=1, blocks=2, uneven=self.uneven)
        node.shard("down_proj", axis=2, uneven=self.uneven)
        node.sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")
        if self.spreads:  # the router computes whole gradients, so nothing is left to be summed
            block = layer[experts.block]
            block.sync("fwd_pre", "all_gather", axis=1, tensor_parallel_output_grad=False)
            block.sync("fwd_post", "scatter", axis=1)

    def tokens(self, layer: slapo.Schedule, stack: Stack, number: int) -> None:
        for path in stack.norms:
            self.sees_tokens(layer, path, number)
        for path in stack.dropouts:
            self.fork(layer, path, number)
        if number == 0:  # behind positions and masks, which are made from the whole length
            layer.sync("fwd_pre", "RR->SR")

    def sees_tokens(self, layer: slapo.Schedule, path: str, number: int) -> None:
        for name, _ in layer[path].mod.named_parameters():
            layer[path].annotate(name, "partial_grad", True)

    def together(self, sch: slapo.Schedule, stack: Stack) -> None:
        last = sch[stack.last]
        last.sync("fwd_post", "all_gather", axis=1, tensor_parallel_output_grad=stack.reads_parts)
        if stack.norms_last:
            for name, _ in last.mod.named_parameters():
                last.annotate(name, "partial_grad", True)

    def vocabulary(self, sch: slapo.Schedule) -> None:
        for number, path in enumerate(self.family.embeddings):
            table = sch[path]
            if number == 0:  # those that are tied to it follow
                table.shard("weight", axis=0, uneven=self.uneven)
            table.sync("fwd_post", "all_reduce")

    def head(self, sch: slapo.Schedule) -> None:
        head = sch[self.family.head]
        if is_whole(head):  # else it has followed the table it is tied to
            head.shard("weight", axis=0, uneven=self.uneven)
        if getattr(head.mod, "bias", None) is not None:
            head.shard("bias", axis=0, uneven=self.uneven)
        if not (self.spreads and self.family.stacks[-1].reads_parts):
            head.sync("bwd_post", "all_reduce")
        head.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


def schedule(sch: slapo.Schedule, family: str, sequence_parallel: bool = False) -> slapo.Schedule:
    """The right schedule."""
    Steps(FAMILIES[family], sequence_parallel).apply(sch)
    return sch
