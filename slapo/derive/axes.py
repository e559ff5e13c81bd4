"""Tensor dimensions as products of axes.

Every dimension of a parameter starts as one axis. Operations then identify dimensions: a view
splits an axis into a product of two, a matrix product unifies the contracted axes, and a split cuts
an axis into blocks. In the end the heads of an attention block are one axis of all its weights, and
the features of a head another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod


class Axis:
    """One axis of tensors; several become one as operations unify them.

    `whole` is the reason why it cannot be sharded, or ``""``.
    """

    __slots__ = ("_same_as", "blocks", "name", "product", "size", "whole")

    def __init__(self, size: int, whole: str = "") -> None:
        self.size, self.whole = size, whole
        #: where it was first seen in a parameter: the same in every run and on every rank
        self.name = ""
        #: axes that it is the product of, outermost first
        self.product: Term | None = None
        #: terms that it is the concatenation of
        self.blocks: list[Term] | None = None
        self._same_as: Axis | None = None

    def merge_into(self, other: Axis) -> None:
        """Unify with another axis, which replaces this one."""
        self._same_as = other

    @property
    def final(self) -> Axis:
        """The axis that this one was merged into, or itself."""
        axis = self
        while axis._same_as is not None:
            axis = axis._same_as
        if axis is not self:
            self._same_as = axis  # chains get long in models with many layers
        return axis


#: A dimension: its axes, outermost first.
Term = tuple[Axis, ...]


def fresh(size: int, whole: str = "") -> Term:
    """Return a dimension of one new axis."""
    return (Axis(size, whole),)


def factors(term: Iterable[Axis]) -> list[Axis]:
    """Return the current axes of a dimension, without those of size 1."""
    found: list[Axis] = []
    for axis in term:
        if axis._same_as is not None:
            axis = axis.final
        if axis.product is not None:
            found += factors(axis.product)
        elif axis.size != 1:
            found.append(axis)
    return found


def size_of(term: Iterable[Axis]) -> int:
    """Return the size of a dimension."""
    size = 1
    for axis in term:
        size *= axis.size
    return size


def keep_whole(term: Iterable[Axis], why: str) -> None:
    """Mark all axes of a dimension as not shardable."""
    for axis in factors(term):
        if not axis.whole:  # else its blocks are marked already
            axis.whole = why
            for block in axis.blocks or ():
                keep_whole(block, why)


def _split(axis: Axis, outer: int) -> Term:
    """Make an axis the product of one of size `outer` and the rest."""
    axis.product = (Axis(outer, axis.whole), Axis(axis.size // outer, axis.whole))
    return axis.product


def _stack(axis: Axis, count: int) -> bool:
    """Make a concatenation of `count` equal parts the product of `count` and one of them."""
    parts = axis.blocks or []
    if len(parts) != count or len({size_of(part) for part in parts}) > 1:
        return False
    for other in parts[1:]:
        unify(parts[0], other, "a view")
    axis.product = (Axis(count, "parts of a concatenation"), *parts[0])
    axis.blocks = None
    return True


# --- unification --------------------------------------------------------------------------------
def unify(first: Iterable[Axis], second: Iterable[Axis], why: str) -> None:
    """Unify two dimensions, or keep both replicated if their axes do not fit."""
    # Both are products, outermost first. Peel off equal sizes; of unequal ones, split the larger
    # axis by the smaller. Merging and splitting change other axes too, so the rests are resolved
    # anew each time.
    left, right = factors(first), factors(second)
    while left and right:
        a, b = left[0], right[0]
        if a is b or a.size == b.size:
            _merge(a, b, why)
            left, right = factors(left[1:]), factors(right[1:])
            continue
        large, small = (a, b) if a.size > b.size else (b, a)
        if large.size % small.size or large.blocks is not None:
            break
        _split(large, small.size)
        left, right = factors(left), factors(right)
    if left or right:
        keep_whole([*left, *right], why)


def _merge(a: Axis, b: Axis, why: str) -> None:
    """Unify two axes of one size, block by block."""
    if a is b:
        return
    whole = a.whole or b.whole
    # The axis with blocks stays, since cuts of its blocks are known to other tensors.
    if a.blocks is None:
        a.merge_into(b)
        kept = b
    else:
        b_blocks = b.blocks
        b.merge_into(a)
        kept = a
        if b_blocks is not None:
            # The coarsest blocks that both can be cut into.
            ends = sorted({*_ends(a.blocks), *_ends(b_blocks)})
            sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            mine, theirs = _cut_row(a.blocks, sizes), _cut_row(b_blocks, sizes)
            if mine is None or theirs is None:
                whole = whole or f"{why} of different blocks"
            else:
                a.blocks = mine
                for one, other in zip(mine, theirs, strict=True):
                    unify(one, other, why)
    if whole:
        keep_whole((kept,), whole)


def _ends(blocks: Sequence[Term]) -> list[int]:
    return list(accumulate(map(size_of, blocks)))


# --- blocks -------------------------------------------------------------------------------------
def concatenated(blocks: Sequence[Term]) -> Term:
    """Return the dimension of a concatenation."""
    blocks = [block for block in blocks if size_of(block)]
    if len(blocks) == 1:
        return blocks[0]
    axis = Axis(sum(map(size_of, blocks)))
    axis.blocks = list(blocks)
    if all(own and all(each.whole for each in own) for own in map(factors, blocks)):
        axis.whole = "a concatenation of dimensions that stay whole"
    return (axis,)


def cut(term: Term, sizes: Sequence[int]) -> list[Term] | None:
    """Cut a dimension into blocks; return None if that would cut an inner axis."""
    if len(sizes) == 1:
        return [term]
    if not all(sizes):
        found = cut(term, [size for size in sizes if size])
        rest = iter(found or ())
        return None if found is None else [next(rest) if size else fresh(0) for size in sizes]
    own = factors(term)
    # Elements behind one index of the outermost axis: only that one can be cut into contiguous
    # blocks.
    inner = prod(axis.size for axis in own[1:])
    if not own or any(size % inner for size in sizes):
        return None
    outer, counts = own[0], [size // inner for size in sizes]
    # No rank count divides one element, and blocks of one axis are sharded all or none.
    if 1 in counts:
        keep_whole((outer,), "cut into single elements")
    if outer.whole:  # its blocks are whole too, so it does not matter which they are
        return [(*fresh(count, outer.whole), *own[1:]) for count in counts]
    if outer.blocks is None:
        outer.blocks = [fresh(count, outer.whole) for count in counts]
    blocks = _cut_row(outer.blocks, counts)
    if blocks is None:
        return None
    if len(blocks) > len(outer.blocks):
        outer.blocks = blocks
    return [(*block, *own[1:]) for block in blocks]


def _cut_row(blocks: Sequence[Term], sizes: Sequence[int]) -> list[Term] | None:
    """Cut or join adjacent blocks to the given sizes; None if impossible."""
    found: list[Term] = []
    left = list(blocks)
    for size in sizes:
        mine: list[Term] = []
        while size:
            if not left:
                return None
            block = left.pop(0)
            own = size_of(block)
            if own > size:
                pieces = cut(block, [size, own - size])
                if pieces is None:
                    return None
                block, own = pieces[0], size
                left.insert(0, pieces[1])
            mine.append(block)
            size -= own
        found.append(mine[0] if len(mine) == 1 else concatenated(mine))
    return found


def carve(term: Iterable[Axis], sizes: Sequence[int]) -> list[Term] | None:
    """Return the dimensions of a view with these sizes; None if they do not follow the axes."""
    found: list[Term] = []
    left = factors(term)
    for size in sizes:
        mine: list[Axis] = []
        while size > 1:
            left = factors(left)
            if not left:
                return None
            axis = left[0]
            if size % axis.size == 0:
                mine.append(left.pop(0))
                size //= axis.size
            elif axis.size % size:
                return None
            elif axis.blocks is None:
                _split(axis, size)
            elif not _stack(axis, size):
                return None
        found.append(tuple(mine))
    return None if left else found


# --- effects of a choice of axes ----------------------------------------------------------------
def axes_in(term: Iterable[Axis]) -> Iterator[Axis]:
    """Yield all axes of a dimension; blocks replace their concatenation."""
    for axis in factors(term):
        if axis.blocks is None:
            yield axis
        else:
            for block in axis.blocks:
                yield from axes_in(block)


def concatenations_in(term: Iterable[Axis]) -> Iterator[Axis]:
    """Yield all axes of a dimension that are concatenations, including nested ones."""
    for axis in factors(term):
        if axis.blocks is not None:
            yield axis
            for block in axis.blocks:
                yield from concatenations_in(block)


#: The axes to shard, as an ordered set: the order is the same on every rank.
Chosen = dict[Axis, None]


def is_sharded(term: Iterable[Axis], chosen: Chosen) -> bool:
    """Return whether a dimension is sharded, at least in part."""
    return any(axis in chosen for axis in axes_in(term))


def local_size(term: Iterable[Axis], chosen: Chosen, ranks: int) -> int:
    """Return the size of a dimension on one rank."""
    total = 1
    for axis in factors(term):
        if axis.blocks is not None:
            total *= sum(local_size(block, chosen, ranks) for block in axis.blocks)
        else:
            total *= axis.size // ranks if axis in chosen else axis.size
    return total


def blocks_of(term: Iterable[Axis], chosen: Chosen) -> list[Term] | None:
    """Return the separately sharded parts of a dimension; None if a part is not sharded."""
    own = factors(term)
    for number, axis in enumerate(own):
        inner, outer = tuple(own[number + 1 :]), size_of(own[:number])
        if axis in chosen:
            # A sharded factor inside an unsharded one has a slice in each of the outer one's
            # indices.
            return [(axis, *inner)] * outer
        if axis.blocks is not None and is_sharded((axis,), chosen):
            found: list[Term] = []
            for block in axis.blocks:
                parts = blocks_of(block, chosen)
                if parts is None:
                    return None
                found += [(*part, *inner) for part in parts]
            return found * outer
    return None
