"""Placement of a tensor over the ranks of one group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction

from torch import Tensor

from slapo.errors import SlapoError
from slapo.sharding.layout import written
from slapo.sharding.slicing import ShardSpec
from slapo.sharding.steps import Step

REPLICATE, PARTIAL, SHARD, MASKED, OWN = "replicate", "partial", "shard", "masked", "own"
_ATTRIBUTE = "_slapo_place"


@dataclass(frozen=True)
class Origin:
    """The origin of a tensor's placement."""

    #: the operation
    operation: str
    #: the module that was running
    path: str
    #: true in the backward pass of that module
    in_backward: bool = False
    #: number of preceding operations
    number: int = 0

    def __str__(self) -> str:
        where = f"{self.path!r}" if self.path else "the model"
        return f"{self.operation} in {'the backward pass of ' if self.in_backward else ''}{where}"


@dataclass(frozen=True)
class Place:
    """Placement of one tensor over the ranks."""

    #: replicated; summands; slices; tokens as rows of this rank's part of a table; or random values
    #: that each rank has drawn by itself, for slices
    kind: str = REPLICATE
    #: the sharded dimension, from the front
    dim: int = -1
    #: sizes of this rank's part of each block, if the sharded dimension has several
    blocks: tuple[int, ...] = ()
    #: this rank's fraction of the full size, if slices (or the tokens' tables) are uneven
    share: Fraction | None = None
    #: first row and number of rows, for masked tokens
    rows: tuple[int, int] = (0, 0)
    #: dimensions along which a replicated tensor is constant, so that all slices are equal
    uniform: frozenset[int] = frozenset()
    #: dimensions along which it is constant within runs, and the run lengths: one head of keys that
    #: was repeated for all query heads, after a view of batch and heads as one dimension
    runs: tuple[tuple[int, int], ...] = ()
    #: true for a replicated tensor of zeros, or an uninitialized one: it may count as a summand too
    is_zero: bool = False
    #: number of ranks that hold each slice
    copies: int = 1
    #: true if those ranks hold summands of it
    is_part: bool = False
    #: else the dimension that those ranks have sharded among them
    within: int = -1
    #: a dimension with rows in rank order, and the block sizes that each rank had; an empty order
    #: means the order of one process
    shuffled: int = -1
    order: tuple[int, ...] = ()
    #: for messages
    origin: Origin | None = None
    #: origin of the partial sum from whose shape a blank tensor was created
    blank_of: Origin | None = None

    @property
    def is_whole(self) -> bool:
        """Return True if every rank holds the full tensor."""
        return self.kind == REPLICATE

    @property
    def is_plain(self) -> bool:
        """Return True if every rank holds the tensor of one process, in the same order."""
        return self.is_whole and not self.order

    @property
    def is_partial(self) -> bool:
        """Return True if ranks hold summands."""
        return self.kind == PARTIAL

    @property
    def is_slice(self) -> bool:
        """Return True if ranks hold slices."""
        return self.kind == SHARD

    def same(self, other: Place) -> bool:
        """Return True if two tensors have the same placement."""
        # Without origins and constancy: these describe one tensor and not its layout.
        if (self.kind, self.order) != (other.kind, other.order) or self.shuffled != other.shuffled:
            return False
        plain = self.kind in (REPLICATE, PARTIAL, OWN)
        alike = (self.dim, self.rows) == (other.dim, other.rows) and self.is_cut_as(other)
        return plain or alike

    def is_uniform(self, tensor: Tensor, dim: int) -> bool:
        """Return True if this tensor is constant or broadcast along a dimension."""
        return dim < 0 or tensor.shape[dim] == 1 or dim in self.uniform

    def is_cut_as(self, other: Place) -> bool:
        """Return True if two slices are cut alike, even along different dimensions."""
        mine = (self.blocks, self.share, self.copies, self.is_part, self.within)
        theirs = (other.blocks, other.share, other.copies, other.is_part, other.within)
        return mine == theirs

    def whole_size(self, size: int, ranks: int) -> int:
        """The full size for a local `size` along the sharded dimension."""
        return size * ranks if self.share is None else int(size / self.share)

    def along(self, dim: int, blocks: Sequence[int] | None = None) -> Place:
        """The same slice along another dimension, with the same blocks unless given."""
        if blocks is None:
            return replace(self, dim=dim)
        return replace(self, dim=dim, blocks=tuple(blocks) if len(blocks) > 1 else ())

    def anew(self, dim: int) -> Place:
        """A slice of another tensor, cut like this one."""
        return Place(SHARD, dim, self.blocks, self.share, copies=self.copies)

    def blocks_in(self, size: int) -> tuple[int, ...]:
        """Block sizes of a slice with local size `size`."""
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
        return text + (f" (since {self.origin})" if self.origin is not None else "")


WHOLE, PARTIAL_SUM = Place(), Place(PARTIAL)
#: Error for masked tokens outside of a lookup.
MASKED_ELSEWHERE = "tokens that are masked for a table can only be looked up there"


class Fault(Enum):
    """Faults with specific advice, beyond the placements."""

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
    """A rank's fraction of an unevenly cut dimension; None if it is cut evenly."""
    return None if total is None or total % ranks == 0 else Fraction(own, total)


def of_spec(spec: ShardSpec) -> Place:
    """The placement of slices."""
    blocks = spec.local_blocks()
    uneven = share_of_whole(blocks[0], spec.blocks[0], spec.parts)
    share = uneven if spec.copies == 1 else Fraction(1, spec.parts)
    return replace(sliced(spec.axis, blocks, share), copies=spec.copies)


class PlacementViolation(Exception):
    """An operation whose result would differ from that of the full model."""

    def __init__(self, why: str, fault: Fault | None = None) -> None:
        super().__init__(why)
        self.fault = fault


def own_draws() -> PlacementViolation:
    """Error for per-rank random values in a replicated tensor."""
    why = "random numbers for a replicated tensor are drawn from this rank's own state"
    return PlacementViolation(why, Fault.OWN_DRAWS)


class NoRule(PlacementViolation):
    """An operation without a rule."""


class Stop(SlapoError):
    """Ends the run at the first invalid operation."""

    #: False for sizes that torch rejects
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
    """Placement of a tensor; replicated if none was set."""
    return getattr(tensor, _ATTRIBUTE, WHOLE)


def put_place(tensor: Tensor, place: Place) -> None:
    """Set the placement of a tensor."""
    setattr(tensor, _ATTRIBUTE, place)
