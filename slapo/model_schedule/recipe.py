"""Data types of recipes: sharded regions of a layer, stacks of layers, a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from slapo.schedule import Schedule

#: Axis of the tokens in activations of shape ``(batch, tokens, hidden)``.
TOKENS = 1


@dataclass(frozen=True)
class Region:
    """A part of a layer between column layers and row layers.

    Names are paths relative to the layer; blanks separate several of them.

    Parameters
    ----------
    enter
        Modules whose input is replicated. With sequence parallelism it is gathered there, else its
        gradient is summed there. Usually one module around the column layers, unless a residual in
        it takes that input too.
    columns, rows
        Layers sharded by output features, and layers sharded by input features, whose outputs are
        summed.
    takes
        Names of the replicated inputs of `enter`, if it has others too.
    reads
        Names of inputs that are another stack's output: replicated, and never sharded by tokens.
    blocks
        Number of equal blocks side by side in each column layer's output, as packed query, key and
        value.
    counts
        ``module.attribute``: head counts, which are divided by the number of ranks.
    inside
        Replicated modules that take a slice, such as per-head norms; their gradients are summed.
    by_head
        Embeddings with one column per head, and parameters whose last axis is heads.
    forked
        Modules whose dropout acts on a slice, unless a kernel has replaced them. Each rank draws
        different random values.
    axis
        Axis of the tokens there: 0 if the layer has merged the batch and token dimensions.
    key_values
        Column layers of keys and values, which may have fewer heads than ranks.
    groups
        ``module.attribute``: number of query heads per key head.
    experts
        Module with the packed weights of all experts, called with states, indices and routing
        weights. Every expert is sharded.
    whole
        Replicated modules of the region, such as a router.
    """

    enter: str
    columns: str = ""
    rows: str = ""
    takes: str = ""
    reads: str = ""
    blocks: int = 1
    counts: str = ""
    inside: str = ""
    by_head: str = ""
    forked: str = ""
    axis: int = TOKENS
    key_values: str = ""
    groups: str = ""
    experts: str = ""
    whole: str = ""

    @property
    def paths(self) -> frozenset[str]:
        """Modules whose parameters the region handles."""
        lists = (self.columns, self.rows, self.inside, self.by_head, self.experts, self.whole)
        return frozenset(" ".join(lists).split())

    def __str__(self) -> str:
        return _text(self)


@dataclass(frozen=True)
class Stack:
    """A list of layers of one kind.

    Parameters
    ----------
    layers
        Path of the list, relative to the base model like the paths below.
    regions
        Regions of each layer.
    last
        Module that runs after the last layer on the same tokens, such as a norm.
    reads
        ``module:input``: the input that takes another stack's output. The gradient of all layers
        that read it is summed once there.
    optional
        True if some classes of the family lack this stack, as encoder-only models lack a decoder.
    """

    layers: str
    regions: tuple[Region, ...]
    last: str = ""
    reads: str = ""
    optional: bool = False

    def __str__(self) -> str:
        head = _text(self, without=("regions",))
        return "\n".join([head, *(f"  {region}" for region in self.regions)])


@dataclass(frozen=True)
class Recipe:
    """Everything that is specific to one model family, as data.

    Parameters
    ----------
    stacks
        Stacks of layers, in order of execution.
    embeddings
        Paths of the vocabulary tables, relative to the base model.
    heads
        Candidate paths of the head that makes logits, relative to the root model.
    counts
        Config entries whose values the group size must divide.
    key_value_heads
        Config entry for the number of key/value heads; several ranks share one if there are too
        few.
    refuses
        Option -> why this family does not support it.
    bias_gelu
        ``module:linear``: in each layer, the module and its linear layer whose bias is fused with
        GELU.
    attention
        ``attention(sch, backend)``: replaces attention that ignores Transformers' attention table.
    inputs
        ``inputs(config)``: returns example inputs for traces; token ids by default.
    splits
        Instead of regions: path of modules -> words that shard and sum there, defined in
        :mod:`slapo.model_schedule.splits`. :func:`slapo.draft` writes them.
    """

    stacks: tuple[Stack, ...]
    embeddings: str = ""
    heads: str = "lm_head"
    counts: str = "num_attention_heads"
    key_value_heads: str = ""
    refuses: Mapping[str, str] = field(default_factory=dict)
    bias_gelu: str = ""
    attention: Callable[[Schedule, str], None] | None = None
    inputs: Callable[[Any], dict[str, Any]] | None = None
    splits: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        head = _text(self, without=("stacks", "refuses", "splits"))
        refused = [f"refuses {name}: {why}" for name, why in self.refuses.items()]
        splits = [f"  {path}: {said}" for path, said in self.splits.items()]
        return "\n".join([head, *map(str, self.stacks), *splits, *refused])


def _text(entry: Any, without: tuple[str, ...] = ()) -> str:
    """Return the fields that differ from their defaults, as text."""
    said = [
        f"{each.name}={_shown(getattr(entry, each.name))}"
        for each in fields(entry)
        if each.name not in without and getattr(entry, each.name) != each.default
    ]
    return f"{type(entry).__name__}({', '.join(said)})"


def _shown(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)
