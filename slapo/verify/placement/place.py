"""How a tensor lies across the ranks of one group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction

from torch import Tensor

from slapo.errors import SlapoError
from slapo.sharding.layout import written
from slapo.sharding.steps import Step

REPLICATE, PARTIAL, SHARD, MASKED, OWN = "replicate", "partial", "shard", "masked", "own"
_ATTRIBUTE = "_slapo_place"


@dataclass(frozen=True)
class Origin:
    """Where a tensor came to be laid out as it is."""

    #: the operation
    operation: str
    #: the module that was running
    path: str
    #: in the backward pass of that module
    in_backward: bool = False
    #: number of operations before it
    number: int = 0

    def __str__(self) -> str:
        where = f"{self.path!r}" if self.path else "the model"
        return f"{self.operation} in {'the backward pass of ' if self.in_backward else ''}{where}"


@dataclass(frozen=True)
class Place:
    """How one tensor is laid out over the ranks."""

    #: whole on every rank; summands; slices; tokens as rows of this rank's part of a table; random
    #: numbers that each rank has drawn by itself, for slices
    kind: str = REPLICATE
    #: the dimension of a slice, from the front
    dim: int = -1
    #: sizes of what this rank has of each block, where several are along the dimension of a slice
    blocks: tuple[int, ...] = ()
    #: this rank's fraction of the whole, where slices are uneven (or tokens of such a table)
    share: Fraction | None = None
    #: the first row and the number of rows, of masked tokens
    rows: tuple[int, int] = (0, 0)
    #: dimensions along which a whole tensor is constant, so that all slices are alike
    uniform: frozenset[int] = frozenset()
    #: dimensions along which it is constant within runs, and the lengths of these: one head of keys
    #: that was repeated for all heads of queries, after a view of batch and heads as one dimension
    runs: tuple[tuple[int, int], ...] = ()
    #: all of a whole tensor is zero, or not written yet: it may count as a summand too
    is_zero: bool = False
    #: the number of ranks that hold a slice
    copies: int = 1
    #: those hold summands of it
    is_part: bool = False
    #: or else the dimension of which each of them has a part
    within: int = -1
    #: a dimension of which rows are in the order of the ranks, each of which has had blocks of
    #: these sizes; no order means that of one process
    shuffled: int = -1
    order: tuple[int, ...] = ()
    #: for messages
    birth: Origin | None = None
    #: birth of the partial sum in whose shape a blank tensor was made
    blank_of: Origin | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether every rank has all of it."""
        return self.kind == REPLICATE

    @property
    def is_plain(self) -> bool:
        """Return whether every rank has what one process has."""
        return self.is_whole and not self.order

    @property
    def is_partial(self) -> bool:
        """Return whether ranks hold summands."""
        return self.kind == PARTIAL

    @property
    def is_slice(self) -> bool:
        """Return whether ranks hold slices."""
        return self.kind == SHARD

    def same(self, other: Place) -> bool:
        """Return whether two tensors have the same placement."""
        if (self.kind, self.order) != (other.kind, other.order) or self.shuffled != other.shuffled:
            return False
        plain = self.kind in (REPLICATE, PARTIAL, OWN)
        alike = (self.dim, self.rows) == (other.dim, other.rows) and self.is_cut_as(other)
        return plain or alike

    def is_cut_as(self, other: Place) -> bool:
        """Return whether two slices, perhaps along other dimensions, are cut alike."""
        mine = (self.blocks, self.share, self.copies, self.is_part, self.within)
        theirs = (other.blocks, other.share, other.copies, other.is_part, other.within)
        return mine == theirs

    def whole_size(self, size: int, ranks: int) -> int:
        """The size over all ranks, where this one has `size` along the dimension of the slice."""
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
        if self.kind == OWN:
            text = "per-rank random numbers"
        elif self.kind == MASKED:
            text = f"tokens masked for rows {self.rows[0]} to {sum(self.rows) - 1}"
        else:
            share, copies = (self.share, 0) if self.copies == 1 else (None, self.copies)
            blocks = len(self.blocks)
            text = written(self.kind, self.dim, blocks=blocks, share=share, copies=copies)
            text += ", summands of it" if self.is_part else ""
        text += f", rows along {self.shuffled} in the ranks' order" if self.order else ""
        return text + (f" (since {self.birth})" if self.birth is not None else "")


WHOLE, PARTIAL_SUM = Place(), Place(PARTIAL)
#: What is wrong with masked tokens everywhere but in a lookup.
MASKED_ELSEWHERE = "tokens that are masked for a table are looked up there, and nowhere else"


class Fault(Enum):
    """Kinds of faults for which there is advice, beyond what the placements say."""

    GROUP = "another group than the schedule's"
    SAME_DRAWS = "shards with the random numbers that all ranks share"
    OWN_DRAWS = "whole tensors with per-rank random numbers"
    DRAWS_FOR_PARTIAL = "a random mask on a partial sum"
    BLOCKS = "shards in other blocks than those they meet"
    PACKED = "packed parts that are sharded as one block"


def sliced(dim: int, blocks: Sequence[int] = (), share: Fraction | None = None) -> Place:
    """Slices along a dimension, counted from the front."""
    return Place(SHARD, dim, tuple(blocks) if len(blocks) > 1 else (), share)


def share_of_whole(own: int, total: int | None, ranks: int) -> Fraction | None:
    """A rank's fraction of a whole that is cut unevenly; None if it is cut evenly."""
    return None if total is None or total % ranks == 0 else Fraction(own, total)


class PlacementViolation(Exception):
    """An operation whose result would not be that of the whole model."""

    def __init__(self, why: str, fault: Fault | None = None) -> None:
        super().__init__(why)
        self.fault = fault


def own_draws() -> PlacementViolation:
    """Random numbers of a rank's own in what is whole."""
    why = "random numbers for what is whole are drawn from a state of this rank's own"
    return PlacementViolation(why, Fault.OWN_DRAWS)


class NoRule(PlacementViolation):
    """An operation of which nothing is known."""


class Stop(SlapoError):
    """Ends the run at the first operation that is wrong."""

    #: False for sizes that torch refuses
    fits = True

    def __init__(
        self,
        wrong: PlacementViolation,
        operation: str,
        at: tuple[str, bool],
        given: Iterable[tuple[Tensor, Place]],
        step: Step | None = None,
    ) -> None:
        super().__init__(str(wrong))
        self.fault, self.is_certain = wrong.fault, not isinstance(wrong, NoRule)
        self.operation, self.step = operation, step
        self.path, self.in_backward = at
        self.given = [(tuple(tensor.shape), place) for tensor, place in given]


def place_of(tensor: Tensor) -> Place:
    """How it lies; what nothing was noted of is whole."""
    return getattr(tensor, _ATTRIBUTE, WHOLE)


def put_place(tensor: Tensor, place: Place) -> None:
    """Note how it is laid out."""
    setattr(tensor, _ATTRIBUTE, place)
