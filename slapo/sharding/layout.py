"""Known placements of a sharded module's input and output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


def written(kind: str, dim: int | None, **details: object) -> str:
    """A placement in PyTorch's notation, with the details of a shard."""
    given = [str(dim), *(f"{name}={value}" for name, value in details.items() if value)]
    return {
        "replicate": "Replicate()",
        "partial": "Partial()",
        "shard": f"Shard({', '.join(given)})",
    }[kind]


@dataclass(frozen=True)
class Placement:
    """Layout of an activation over the ranks, as far as the schedule determines it."""

    #: ``"replicate"``, ``"shard"`` or ``"partial"`` (ranks hold summands)
    kind: str
    #: the sharded axis, counted from the end (-1 is the last)
    axis: int | None = None
    #: number of blocks along that axis that are sharded separately, as in a packed QKV
    blocks: int = 1
    #: full size along that axis if shards are uneven
    total: int | None = None
    #: number of ranks that hold each shard
    copies: int = 1

    def __str__(self) -> str:
        blocks, copies = (n if n > 1 else 0 for n in (self.blocks, self.copies))
        return written(self.kind, self.axis, blocks=blocks, total=self.total, copies=copies)


REPLICATE = Placement("replicate")
PARTIAL = Placement("partial")


def shard(axis: int) -> Placement:
    """Placement sharded along `axis`, counted from the end."""
    return Placement("shard", axis)


@dataclass(frozen=True)
class Layout:
    """Placements of a module's first input and first output; None if unknown.

    `vocabulary` marks an embedding sharded by rows, whose indices must be masked.
    """

    input: Placement | None = None
    output: Placement | None = None
    vocabulary: bool = False


@dataclass(frozen=True)
class KnownSync:
    """The effect of a module's sync on layouts."""

    #: as in ``Schedule.sync``; `op` is empty for a user's function
    mode: str
    op: str
    axis: int | None = None
    #: the placement after it (for ``fwd_post``), None if unknown
    output: Placement | None = None
    #: true if its backward sums the gradient over the ranks
    completes_gradient: bool = False
    #: names of its inputs; None for the mode's default
    argument: tuple[str, ...] | None = None

    def after(self, layout: Layout) -> Layout:
        """Return the layout outside this sync, given the layout inside."""
        if self.mode == "fwd_post":
            return replace(layout, output=self.output)
        if self.mode == "fwd_pre" and not self.op:  # it may change the module's input
            return replace(layout, input=None)
        if self.mode == "fwd_pre" and self.completes_gradient and layout.input is not None:
            return replace(layout, input=Placement("shard", self.axis))
        return layout


def around(layout: Layout, syncs: Iterable[KnownSync]) -> Layout:
    """Return the layout of a module with its syncs, given that of the bare module."""
    for sync in syncs:
        layout = sync.after(layout)
    return layout
