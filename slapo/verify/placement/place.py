"""How a tensor lies across the ranks of one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import Tensor

REPLICATE, PARTIAL, SHARD, MASKED, OWN = "replicate", "partial", "shard", "masked", "own"
_ATTRIBUTE = "_slapo_place"


@dataclass(frozen=True)
class Origin:
    """Where a tensor came to lie as it does.

    Parameters
    ----------
    operation
        Its name.
    path
        The module that was running.
    in_backward
        Whether in the backward pass of that module.
    number
        Of operations before it.
    """

    operation: str
    path: str
    in_backward: bool = False
    number: int = 0

    def __str__(self) -> str:
        where = f"{self.path!r}" if self.path else "the model"
        return f"{self.operation} in {'the backward pass of ' if self.in_backward else ''}{where}"


@dataclass(frozen=True)
class Place:
    """How one tensor lies across the ranks.

    Parameters
    ----------
    kind
        ``"replicate"``: whole on every rank; ``"partial"``: ranks hold summands; ``"shard"``:
        slices; ``"masked"``: tokens as rows of this rank's part of a table; ``"own"``: random
        numbers that each rank has drawn by itself, for slices.
    dim
        Of a slice: the dimension, from the front.
    blocks
        Of a slice: the sizes of what this rank has of each block, where several lie along the
        dimension and each is split by itself; else empty.
    share
        Of an uneven slice, and of masked tokens of such a table: how much of the whole this rank
        has; None where ranks have equal slices.
    rows
        Of masked tokens: the first row, and how many.
    uniform
        Of a whole tensor: the dimensions along which it is constant, so that any slice is alike.
    is_zero
        Whether all of a whole tensor is zero, or nothing yet: then it may count as a summand too.
    copies
        Of a slice: how many ranks hold it.
    is_part
        Whether those have summands of it.
    within
        Or else the dimension of which each of them has a part, or that is alike along it.
    shuffled, order
        A dimension of which rows lie in the order of the ranks, each of which has had blocks of
        these sizes; an empty order for that of one process.
    birth
        For messages.
    blank_of
        Of a blank tensor made in the shape of a partial sum: the birth of that.
    """

    kind: str = REPLICATE
    dim: int = -1
    blocks: tuple[int, ...] = ()
    share: Fraction | None = None
    rows: tuple[int, int] = (0, 0)
    uniform: frozenset[int] = frozenset()
    is_zero: bool = False
    copies: int = 1
    is_part: bool = False
    within: int = -1
    shuffled: int = -1
    order: tuple[int, ...] = ()
    birth: Origin | None = None
    blank_of: Origin | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of it."""
        return self.kind == REPLICATE

    @property
    def is_plain(self) -> bool:
        """Whether every rank has what one process has."""
        return self.is_whole and not self.order

    @property
    def is_partial(self) -> bool:
        """Whether ranks hold summands."""
        return self.kind == PARTIAL

    @property
    def is_slice(self) -> bool:
        """Whether ranks hold slices."""
        return self.kind == SHARD

    def same(self, other: Place) -> bool:
        """Whether two tensors lie alike."""
        if (self.kind, self.order) != (other.kind, other.order) or self.shuffled != other.shuffled:
            return False
        plain = self.kind in (REPLICATE, PARTIAL, OWN)
        alike = (self.dim, self.rows) == (other.dim, other.rows) and self.is_cut_as(other)
        return plain or alike

    def is_cut_as(self, other: Place) -> bool:
        """Whether two slices, perhaps along other dimensions, are cut alike."""
        mine = (self.blocks, self.share, self.copies, self.is_part, self.within)
        theirs = (other.blocks, other.share, other.copies, other.is_part, other.within)
        return mine == theirs

    def whole_size(self, size: int, ranks: int) -> int:
        """Of all ranks together, of which this one has `size` along the dimension of the slice."""
        return size * ranks if self.share is None else int(size / self.share)

    def along(self, dim: int, blocks: Sequence[int] | None = None) -> Place:
        """The same slice along another dimension, in the same blocks unless others are given."""
        if blocks is None:
            return replace(self, dim=dim)
        return replace(self, dim=dim, blocks=tuple(blocks) if len(blocks) > 1 else ())

    def anew(self, dim: int) -> Place:
        """A slice of something else, cut as this one."""
        return Place(SHARD, dim, self.blocks, self.share, copies=self.copies)

    def blocks_in(self, size: int) -> tuple[int, ...]:
        """Sizes of the blocks of a slice, of which this rank has `size` in all."""
        return self.blocks or (size,)

    def __str__(self) -> str:
        if self.kind == MASKED:
            text = f"tokens masked for rows {self.rows[0]} to {sum(self.rows) - 1}"
        else:
            text = {
                REPLICATE: "whole",
                PARTIAL: "a partial sum",
                OWN: "random numbers of this rank's own",
                SHARD: f"sliced along dimension {self.dim}",
            }[self.kind]
            text += f" in {len(self.blocks)} blocks" if self.blocks else ""
            if self.copies > 1:
                text += f", held by {self.copies} ranks" + (", in parts" if self.is_part else "")
            elif self.share is not None:
                text += f" in uneven parts, here {self.share}"
            text += f", rows along {self.shuffled} in the ranks' order" if self.order else ""
        return text + (f" (since {self.birth})" if self.birth is not None else "")


WHOLE, PARTIAL_SUM = Place(), Place(PARTIAL)
#: What is wrong with random numbers of a rank's own in what is whole.
OWN_FOR_WHOLE = "random numbers for what is whole are drawn from a state of this rank's own"
#: What is wrong with masked tokens everywhere but in a lookup.
MASKED_ELSEWHERE = "tokens that are masked for a table are looked up there, and nowhere else"


def sliced(dim: int, blocks: Sequence[int] = (), share: Fraction | None = None) -> Place:
    """Slices along a dimension, counted from the front."""
    return Place(SHARD, dim, tuple(blocks) if len(blocks) > 1 else (), share)


def share_of_whole(own: int, total: int | None, ranks: int) -> Fraction | None:
    """What a rank has of a whole, where it is cut unevenly."""
    return None if total is None or total % ranks == 0 else Fraction(own, total)


class PlacementViolation(Exception):
    """An operation whose result would not be that of the whole model."""


class NoRule(PlacementViolation):
    """An operation of which nothing is known."""


def place_of(tensor: Tensor) -> Place:
    """How it lies; what nothing was noted of is whole."""
    return getattr(tensor, _ATTRIBUTE, WHOLE)


def put_place(tensor: Tensor, place: Place) -> None:
    """Note how it lies."""
    setattr(tensor, _ATTRIBUTE, place)
