"""What is known of how a sharded module's input and output lie across the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Placement:
    """How an activation lies across the ranks.

    Parameters
    ----------
    kind
        ``"replicate"``, ``"shard"`` or ``"partial"`` (ranks hold summands).
    axis
        The sharded axis, counted from the end (-1 is the last).
    blocks
        How many blocks lie along that axis, of which each rank has a part, as in a packed query,
        key and value.
    total
        The whole's size along that axis where the ranks' parts are uneven; else None.
    copies
        How many ranks hold each part.
    """

    kind: str
    axis: int | None = None
    blocks: int = 1
    total: int | None = None
    copies: int = 1

    def __str__(self) -> str:
        packed = f" in {self.blocks} blocks" if self.blocks > 1 else ""
        packed += f" in uneven parts of {self.total}" if self.total is not None else ""
        packed += f", each part on {self.copies} ranks" if self.copies > 1 else ""
        return {
            "replicate": "whole on every rank",
            "partial": "a partial sum",
            "shard": f"sharded along axis {self.axis}{packed}",
        }[self.kind]


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
    """A sync that stands on a module, as far as layouts are concerned.

    Parameters
    ----------
    mode, op, axis
        As in ``Schedule.sync``; `op` is empty for a function of the user's.
    output
        The placement after it (for ``fwd_post``), None when it is not known.
    completes_gradient
        Whether its backward sums the gradient over the ranks.
    argument
        Names of the inputs that it is for; None for those that the mode is about.
    """

    mode: str
    op: str
    axis: int | None = None
    output: Placement | None = None
    completes_gradient: bool = False
    argument: tuple[str, ...] | None = None

    def after(self, layout: Layout) -> Layout:
        """The layout around this sync, given the one within it."""
        if self.mode == "fwd_post":
            return replace(layout, output=self.output)
        if self.mode == "fwd_pre" and self.completes_gradient and layout.input is not None:
            return replace(layout, input=Placement("shard", self.axis))
        return layout


def around(layout: Layout, syncs: Iterable[KnownSync]) -> Layout:
    """The layout of a module together with its syncs, given that of the bare module."""
    for sync in syncs:
        layout = sync.after(layout)
    return layout
