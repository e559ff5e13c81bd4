"""The vocabulary of recipes: regions of a layer that are split, stacks of layers, a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from slapo.schedule import Schedule

#: Where tokens are in activations of ``(batch, tokens, hidden)``.
TOKENS = 1


@dataclass(frozen=True)
class Region:
    """A part of a layer that is between column layers and row layers.

    Names are paths from the layer, several of them separated by blanks.

    Parameters
    ----------
    enter
        Modules whose input is whole: under sequence parallelism it is gathered there, else its
        gradient is summed there. One module around the column layers, unless something else in it
        (a residual) takes that input too.
    columns, rows
        Layers that are split by output features, and those that take the slices and are summed.
    takes
        Names of the inputs of `enter` that are whole, where there are others too.
    reads
        Names of inputs that are another stack's result: whole, and never dealt out by tokens.
    blocks
        Equal parts that are side by side in each column layer's output, as packed query, key and
        value.
    counts
        ``module.attribute``: numbers of heads, divided by the ranks.
    inside
        Whole modules that see a slice, such as norms of heads: their gradients are summed.
    by_head
        Embeddings with a column for each head, and parameters whose last axis is heads.
    forked
        Modules whose dropout acts on a slice, if no kernel has taken their place: each rank draws
        numbers of its own.
    axis
        Along which tokens are there: 0 where the layer has made one dimension of batch and tokens.
    key_values
        Column layers of keys and values, which may have fewer heads than there are ranks.
    groups
        ``module.attribute``: query heads for each head of keys.
    experts
        A module that holds the packed weights of all experts and is called with states, indices
        and routing weights: each rank keeps a slice of every expert.
    whole
        Modules of the region that every rank runs alike: a router.
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
        """Modules whose parameters are the region's own affair."""
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
        Path of the list, from the base model, as those below.
    regions
        Those of each layer.
    last
        What runs after the last layer on the same tokens: a norm.
    reads
        ``module:input``: where the result of another stack comes in, so that the gradient of all
        layers that read it is summed once.
    optional
        Whether some classes of the family lack it, as encoders alone do a decoder.
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
    """How the models of one family run: what differs between families, as data.

    Parameters
    ----------
    stacks
        In the order of execution.
    embeddings
        Tables of the vocabulary, from the base model.
    heads
        Paths from the whole model of which one may be the head that makes logits.
    counts
        Names of the config whose numbers the size of the group must divide.
    key_value_heads
        Name of the config: heads of keys and values, shared by several ranks if there are fewer.
    refuses
        Option -> why models of this family cannot have it.
    bias_gelu
        ``module:linear``: for each layer, a module and its linear layer whose bias goes with GELU.
    attention
        ``attention(sch, backend)``: where models do not ask Transformers' table for it.
    inputs
        ``inputs(config)``: example inputs for traces; token ids by default.
    splits
        In place of regions: path of modules -> what is sharded and summed there, in the words of
        :mod:`slapo.model_schedule.splits`, as :func:`slapo.draft` writes it.
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
    """The fields that say something else than their defaults."""
    said = [
        f"{each.name}={_shown(getattr(entry, each.name))}"
        for each in fields(entry)
        if each.name not in without and getattr(entry, each.name) != each.default
    ]
    return f"{type(entry).__name__}({', '.join(said)})"


def _shown(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)
