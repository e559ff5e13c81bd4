"""Known placements of a sharded module's input and output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


def written(kind: str, dim: int | None, **details: object) -> str:
    """A placement as PyTorch writes it, with what is particular about a shard."""
    given = [str(dim), *(f"{name}={value}" for name, value in details.items() if value)]
    return {
        "replicate": "Replicate()",
        "partial": "Partial()",
        "shard": f"Shard({', '.join(given)})",
    }[kind]


@dataclass(frozen=True)
class Placement:
    """How an activation is laid out over the ranks, as far as a schedule tells."""

    #: ``"replicate"``, ``"shard"`` or ``"partial"`` (ranks hold summands)
    kind: str
    #: the sharded axis, counted from the end (-1 is the last)
    axis: int | None = None
    #: the number of blocks along that axis that are sharded one by one, as in a packed QKV
    blocks: int = 1
    #: the whole's size along that axis where shards are uneven
    total: int | None = None
    #: the number of ranks that hold each shard
    copies: int = 1

    def __str__(self) -> str:
        blocks, copies = (n if n > 1 else 0 for n in (self.blocks, self.copies))
        return written(self.kind, self.axis, blocks=blocks, total=self.total, copies=copies)


REPLICATE = Placement("replicate")
PARTIAL = Placement("partial")


def shard(axis: int) -> Placement:
    """Sharded along `axis`, counted from the end."""
    return Placement("shard", axis)


@dataclass(frozen=True)
class Layout:
    """Placements of a module's first input and first output; None where nothing is known.

    `vocabulary` marks a table of which each rank holds some rows: indices must be masked.
    """

    input: Placement | None = None
    output: Placement | None = None
    vocabulary: bool = False


@dataclass(frozen=True)
class KnownSync:
    """A sync that stands on a module, as far as layouts are concerned."""

    #: as in ``Schedule.sync``; `op` is empty for a function of the user's
    mode: str
    op: str
    axis: int | None = None
    #: the placement after it (for ``fwd_post``), None when it is not known
    output: Placement | None = None
    #: true if its backward sums the gradient over the ranks
    completes_gradient: bool = False
    #: names of the inputs that it is for; None for those that the mode is about
    argument: tuple[str, ...] | None = None

    def after(self, layout: Layout) -> Layout:
        """The layout around this sync, given the one within it."""
        if self.mode == "fwd_post":
            return replace(layout, output=self.output)
        if self.mode == "fwd_pre" and not self.op:  # it may change what the module sees
            return replace(layout, input=None)
        if self.mode == "fwd_pre" and self.completes_gradient and layout.input is not None:
            return replace(layout, input=Placement("shard", self.axis))
        return layout


def around(layout: Layout, syncs: Iterable[KnownSync]) -> Layout:
    """The layout of a module together with its syncs, given that of the bare module."""
    for sync in syncs:
        layout = sync.after(layout)
    return layout
