"""Data types of recipes: stacks of layers, and a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from slapo.schedule import Schedule

#: Axis of the tokens in activations of shape ``(batch, tokens, hidden)``.
TOKENS = 1


@dataclass(frozen=True)
class Stack:
    """A list of layers of one kind.

    Parameters
    ----------
    layers
        Path of the list, relative to the base model like the paths below.
    splits
        Entries of :attr:`Recipe.splits`, with paths relative to each layer.
    last
        Module that runs after the last layer on the same tokens, such as a norm.
    reads
        ``module:input``: the input that takes another stack's output. The gradient of all layers
        that read it is summed once there.
    optional
        True if some classes of the family lack this stack, as encoder-only models lack a decoder.
    """

    layers: str
    splits: Mapping[str, str] = field(default_factory=dict)
    last: str = ""
    reads: str = ""
    optional: bool = False

    def __str__(self) -> str:
        return "\n".join([_text(self, without=("splits",)), *_entries(self.splits)])


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
        Path of modules -> words that shard and sum there, defined in
        :mod:`slapo.model_schedule.splits`. Blanks separate several paths, and ``*`` stands for any
        one part of a path. Without words a module stays replicated.
    proven
        True for a table that is known to be right, as those of the families. Others are proved
        before each use, which needs example inputs; with sharded tokens, their blocks without a
        single entry gather all tokens.
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
    proven: bool = False

    @property
    def table(self) -> list[tuple[str, str]]:
        """All entries of the recipe and its stacks, with paths relative to the base model."""
        found = list(self.splits.items())
        for stack in self.stacks:
            for names, words in stack.splits.items():
                paths = " ".join(f"{stack.layers}.*.{name}" for name in names.split())
                found.append((paths, words))
        return found

    def __str__(self) -> str:
        head = _text(self, without=("stacks", "refuses", "splits", "proven"))
        refused = [f"refuses {name}: {why}" for name, why in self.refuses.items()]
        return "\n".join([head, *map(str, self.stacks), *_entries(self.splits), *refused])


def _entries(splits: Mapping[str, str]) -> list[str]:
    return [f"  {paths}: {words or 'replicated'}" for paths, words in splits.items()]


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
