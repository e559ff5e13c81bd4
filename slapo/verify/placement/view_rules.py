"""Rules of operations that move, cut, join or select along dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

import torch
from torch import Tensor

from slapo.verify.placement.call import Call, OperationCall, rule_for
from slapo.verify.placement.place import OWN, PARTIAL_SUM, Fault, Place

#: Operations whose result may be sharded along one of several dimensions.
VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten")
#: Operations that compute nothing.
COPIES = ("clone", "contiguous", "detach", "alias", "_to_copy", "lift_fresh")


@rule_for(*VIEWS)
def view(call: Call) -> list[Place]:
    """Find the dimension of the result that has the same runs of elements as the slice.

    Several dimensions may fit, for instance if each rank has one head. Then prefer one that is
    longer in one process, or the sharded dimension of the tensor whose gradient this is. If neither
    is known, prefer a dimension that the caller left open by -1, or the outermost.
    """
    place, old, new = call.moved(), call.tensors[0].shape, call.outs[0].shape
    if not place.is_slice:
        return [place]
    before = call.of_gradient_of
    if before is not None and before.is_plain and old[place.dim] == 1:
        # A replicated tensor of size 1 served as each rank's slice: one head of keys.
        return [PARTIAL_SUM]
    asked = call.get("size", call.get("shape", new))
    fits = []
    for dim, blocks in fitting(place, old, new):
        left_open = dim < len(asked) and asked[dim] == -1
        unlikely = not (_is_longer(call, place, dim) or _is_like_forward(call, dim, blocks))
        fits.append((unlikely, len(blocks), not left_open, dim, blocks))
    if not fits:
        raise call.misfit(f"{tuple(old)} -> {tuple(new)} cuts across the ranks' slices")
    *_, dim, found = min(fits)
    return [place.along(dim, found)]


def fitting(
    place: Place, old: Sequence[int], new: Sequence[int]
) -> Iterator[tuple[int, list[int]]]:
    """Dimensions of a view that can be the sharded one, with its blocks there."""
    # A slice is contiguous runs of elements, one for each block and each index of the outer
    # dimensions. A view keeps the elements' order, so a dimension of the result can be the sharded
    # one if the same runs fill it.
    inner = prod(old[place.dim + 1 :])
    runs = [size * inner for size in place.blocks_in(old[place.dim])]
    for dim, size in enumerate(new):
        blocks = _covered(runs, size, prod(new[dim + 1 :]))
        if blocks:
            yield dim, blocks


def _is_longer(call: Call, place: Place, dim: int) -> bool:
    """Return True if only this dimension of the result is longer in one process, by all ranks."""
    shape = list(call.outs[0].shape)
    own = shape[dim]
    # A head shared by ranks may be repeated there, once for each rank.
    sizes = {place.whole_size(own, call.ranks), own * call.ranks if place.copies > 1 else 0}
    wholes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
    return call.shape_in_one_process in wholes


def _is_like_forward(call: Call, dim: int, blocks: list[int]) -> bool:
    """Return True if this fits the placement of the tensor whose gradient it is."""
    before = call.of_gradient_of
    return before is not None and before.same(before.along(dim, blocks)) and before.is_slice


def _covered(runs: list[int], size: int, inner: int) -> list[int]:
    """Blocks of a dimension of `size` that consists of runs; `inner` elements per index."""
    # Empty if the runs do not fill it, or if a boundary between runs splits an index.
    if not inner or any(run % inner for run in runs):
        return []
    blocks = [run // inner for run in runs]
    whole = sum(blocks)
    if size % whole == 0:
        return blocks * (size // whole)
    # The dimension has some of the blocks; the dimensions before it select them.
    ends = list(itertools.accumulate(blocks))
    if whole % size or size not in ends:
        return []
    some = blocks[: ends.index(size) + 1]
    return some if blocks == some * (whole // size) else []


def new_dims(call: OperationCall) -> list[int]:
    """New position of each dimension in a view; -1 for one that is gone or repeated."""
    # Strides tell the dimensions of this view apart, also those of size 1.
    shape = call.tensors[0].shape
    strides = [2**20 + 2 * dim + 1 for dim in range(len(shape))]
    probe = torch.empty_strided(shape, strides, device="meta")
    found = call.func(probe, *call.args[1:], **call.kwargs).stride()
    return [max((d for d, s in enumerate(found) if s == own), default=-1) for own in strides]


#: Operations that permute dimensions.
REORDERS = ("transpose", "t", "swapaxes", "permute")


@rule_for("unsqueeze", "squeeze", *REORDERS)
def reordered(call: Call) -> Place:
    """Slices stay slices, along the dimension where theirs went."""
    place = call.moved()
    if not place.is_slice:
        return place
    dim = new_dims(call)[place.dim]
    if dim < 0:
        raise call.misfit(f"it drops dimension {place.dim}, which is sharded")
    return place.along(dim)


@rule_for("select_backward")
def _select_backward(call: Call) -> Place:
    place, axis = call.moved(), call.get("dim") % call.outs[0].ndim
    return place.along(place.dim + (place.dim >= axis)) if place.is_slice else place


@rule_for("expand", "expand_as")
def expand(call: Call) -> list[Place]:
    """Slices stay slices; their own dimension may not be repeated, as ranks differ in it."""
    if call.places[0].kind == OWN:
        return [_repeated_own(call)]
    place = call.moved()
    if not place.is_slice:
        return [place]
    dim = new_dims(call)[place.dim]
    if dim < 0:
        raise call.misfit(f"it repeats dimension {place.dim}, which is sharded")
    return [place.along(dim)]


def _repeated_own(call: Call) -> Place:
    """Per-rank random values are constant along the dimensions of their repetition."""
    place, old, new = call.places[0], call.tensors[0].shape, call.outs[0].shape
    behind = len(new) - len(old)
    grown = {d for d, size in enumerate(new) if d < behind or old[d - behind] != size}
    return replace(place, uniform=frozenset(grown | {d + behind for d in place.uniform}))


@rule_for("repeat", "tile")
def repeat(call: Call) -> list[Place]:
    """Slice by slice along other dimensions; along the sharded one, blocks are repeated."""
    if call.places[0].kind == OWN:
        return [_repeated_own(call)]
    place, repeats = call.moved(), call.get("repeats", call.get("dims"))
    if not place.is_slice:
        return [place]
    dim = place.dim + len(repeats) - call.tensors[0].ndim
    size = call.tensors[0].shape[place.dim]
    return [place.along(dim, place.blocks_in(size) * repeats[dim])]


@rule_for(
    "split", "split_with_sizes", "slice", "select", "narrow", "chunk", "unbind", "unsafe_split"
)
def cut(call: Call) -> list[Place]:
    """Any cut along other dimensions; only complete blocks along the sharded one."""
    place, tensor = call.moved(), call.tensors[0]
    axis = (call.get("dim") or 0) % tensor.ndim
    drops = call.name in ("select", "unbind")
    if not place.is_slice or axis != place.dim:
        moved = drops and place.is_slice and axis < place.dim
        return [place.along(place.dim - moved)] * len(call.outs)
    if drops:
        raise call.misfit(f"it takes one of dimension {axis}, which is sharded")
    size = tensor.shape[axis]
    if all(out.shape[axis] == size for out in call.outs):
        return [place] * len(call.outs)
    start = call.get("start") or 0 if call.name in ("slice", "narrow") else 0
    if call.name != "slice" or call.get("step", 1) == 1:
        found = _whole_blocks(
            place.blocks_in(size), start % size, [o.shape[axis] for o in call.outs]
        )
        if found:
            return [place.along(axis, blocks) for blocks in found]
    raise call.misfit(
        f"it takes dimension {axis} apart, which is sharded"
        + (f" in {len(place.blocks)} blocks" if place.blocks else "")
        + "; pack parts in one weight by shard(..., blocks=...), and divide the sizes by which "
        "the module splits",
        Fault.PACKED,
    )


def _whole_blocks(
    blocks: tuple[int, ...], start: int, sizes: list[int]
) -> list[tuple[int, ...]] | None:
    """Blocks of consecutive parts from `start`; None if a part splits a block."""
    ends = [0, *itertools.accumulate(blocks)]
    found = []
    for size in sizes:
        if start not in ends or start + size not in ends or not size:
            return None
        found.append(blocks[ends.index(start) : ends.index(start + size)])
        start += size
    return found


@rule_for("slice_backward")
def slice_backward(call: Call) -> list[Place]:
    """Pad with zeros; along the sharded dimension, the slice gets other blocks beside it."""
    place, axis = call.places[0], call.get("dim") % call.tensors[0].ndim
    if not place.is_slice or axis != place.dim:
        return [place]
    after, before = call.outs[0].shape[axis], call.of_gradient_of
    if before is not None and before.is_slice and before.dim == axis:
        return [place.along(axis, before.blocks_in(after))]
    own = place.blocks_in(call.tensors[0].shape[axis])
    if len(set(own)) > 1 or after % own[0]:
        raise call.misfit(f"it puts blocks of {own} among blocks of unknown sizes")
    return [place.along(axis, own[:1] * (after // own[0]))]


@rule_for("cat", "concat")
def cat(call: Call) -> list[Place]:
    """Parts of equal placement; along the sharded dimension they become blocks."""
    ndim = call.outs[0].ndim
    axis = (call.get("dim") or 0) % ndim
    # Caches of keys begin as empty tensors, which have any placement.
    parts = [(t, p) for t, p in zip(call.tensors, call.places, strict=True) if t.numel()]
    first = next(place for _, place in parts if not place.is_whole)
    if first.is_partial:
        if all(place.is_partial or place.is_zero for _, place in parts):
            return [first]
        raise call.misfit("it joins partial sums with tensors that are not partial")
    joins_slices = first.dim == axis
    for _, place in parts:
        constant = place.is_whole and first.dim in place.uniform and not joins_slices
        alike = place.is_slice and place.dim == first.dim and place.share == first.share
        if not (constant or (alike and (joins_slices or place.is_cut_as(first)))):
            raise call.misfit("it joins tensors that have different placements")
    if not joins_slices:
        return [first]
    blocks = [size for t, p in parts for size in p.blocks_in(t.shape[axis])]
    return [first.along(axis, blocks)]


@rule_for("stack")
def _stack(call: Call) -> list[Place]:
    axis = (call.get("dim") or 0) % call.outs[0].ndim
    first = call.places[0]
    if not all(place.same(first) for place in call.places):
        raise call.misfit("it joins tensors that have different placements")
    return [first.along(first.dim + (first.dim >= axis)) if first.is_slice else first]


@rule_for("constant_pad_nd")
def pad(call: Call) -> list[Place]:
    """Any padding along other dimensions than the sharded one; zeros for a partial sum."""
    place = call.moved()
    if place.is_slice and place.dim in call.dims():
        raise call.misfit(f"it pads dimension {place.dim}, which is sharded")
    if place.is_partial and call.get("value"):
        raise call.misfit("it pads a partial sum with a value other than zero")
    return [place]


# --- choice by index -----------------------------------------------------------------------------
@rule_for("index", "_unsafe_index", "index_select")
def index(call: Call) -> list[Place]:
    """Replicated indices into any dimension but the sharded one."""
    place, chosen = call.places[0], _chosen(call)
    if not all(other.is_whole for other in call.places[1:]):
        # A replicated table with sharded indices: the result is sharded like the indices.
        if place.is_whole and len(call.places) == 2 and chosen[0] is not None:
            return [call.places[1]]
        raise call.misfit("indices that differ between ranks choose from a table that is not whole")
    if not place.is_slice:
        return [place]
    dims = dims_behind(call)
    if place.dim not in dims:
        raise call.misfit(f"it chooses along dimension {place.dim}, which is sharded")
    return [place.along(dims.index(place.dim))]


def _chosen(call: OperationCall) -> Sequence[Tensor | None]:
    """Indices by dimension."""
    if call.get("indices") is not None:
        return list(call.get("indices"))
    return [None] * (call.get("dim") % call.tensors[0].ndim) + [call.tensors[1]]


def indexed(call: OperationCall) -> tuple[list[int], int]:
    """Indexed dimensions, and the number of dimensions that replace them."""
    at: list[int] = []
    dim = wide = 0
    for index in _chosen(call):
        is_mask = index is not None and index.dtype is torch.bool
        several = index.ndim if index is not None and is_mask else 1
        if index is not None:
            at += range(dim, dim + several)
            wide = max(wide, 1 if is_mask else index.ndim)
        dim += several
    return at, wide


def dims_behind(call: OperationCall) -> list[int]:
    """Original dimension of each result dimension; -1 for those of the indices."""
    at, wide = indexed(call)
    kept = [dim for dim in range(call.tensors[0].ndim) if dim not in at]
    # As in NumPy: dimensions of indices that are not adjacent come first in the result.
    together = at == [*range(at[0], at[-1] + 1)]
    start = at[0] if together else 0
    return [*kept[:start], *[-1] * wide, *kept[start:]]


@rule_for("gather")
def gather(call: Call) -> list[Place]:
    """Indices sharded like the tensor, or replicated ones for a replicated tensor."""
    (tensor, index), (place, indices) = call.tensors, call.places
    axis = call.get("dim") % tensor.ndim
    if place.is_slice and place.dim != axis:
        alike = place.same(indices) or (indices.is_whole and place.dim in indices.uniform)
        if not alike or index.shape[place.dim] != tensor.shape[place.dim]:
            raise call.misfit("whole indices choose from slices")
    elif place.is_slice or not indices.is_whole:
        raise call.misfit(f"it chooses along dimension {axis}, which is sharded")
    return [place]


def _put_in(call: Call) -> list[Place]:
    """Insert or add rows at replicated indices; rows must have the destination's placement."""
    target, source = call.places[0], call.places[-1]
    # The gradient of a table that is indexed by sharded tokens: each rank adds the rows of its
    # tokens.
    if target.is_zero and source.is_slice and _rows_of_slices(call):
        return [PARTIAL_SUM]
    if not all(place.is_whole for place in call.places[1:-1]):
        raise call.misfit("the indices differ between ranks")
    if source.is_partial and (target.is_partial or target.is_zero):
        return [PARTIAL_SUM if not source.origin else source]
    if target.is_partial and source.is_zero:
        return [target]
    if source.is_slice and call.name in ("index_put", "_index_put_impl", "index_add"):
        return [_put_slices(call, target, source)]
    if target.is_slice and source.is_whole and target.dim in source.uniform:
        if target.dim in indexed(call)[0]:
            raise call.misfit(f"it writes along dimension {target.dim}, which is sharded")
        return [target]
    raise call.misfit("the inserted tensor and the destination have different placements")


@rule_for("scatter", "scatter_add")
def scatter(call: Call) -> list[Place]:
    """Slice by slice along other dimensions than the sharded one."""
    first = next(place for place in call.places if not place.is_whole)
    axis = call.get("dim") % call.tensors[0].ndim
    if not first.is_slice:
        return _put_in(call)
    if first.dim == axis:
        raise call.misfit(f"it writes along dimension {axis}, which is sharded")
    size = call.tensors[0].shape[first.dim]
    for tensor, place in zip(call.tensors, call.places, strict=True):
        constant = place.is_zero or first.dim in place.uniform
        if not (place.same(first) or constant) or tensor.shape[first.dim] != size:
            raise call.misfit("values, indices and destination have different placements")
    return [first]


rule_for("index_put", "_index_put_impl", "index_add", "index_copy")(_put_in)


def _rows_of_slices(call: Call) -> bool:
    """Return True if each rank adds its rows to zeros, by indices sharded like the rows."""
    (*between, source), chosen = call.places[1:], call.get("indices") or []
    first = bool(chosen) and chosen[0] is not None and all(i is None for i in chosen[1:])
    return first and bool(call.get("accumulate")) and all(p.same(source) for p in between)


def _put_slices(call: Call, target: Place, source: Place) -> Place:
    """Insert rows sharded along a dimension that is not indexed, like the destination."""
    dim = dims_behind(call)[source.dim - call.tensors[-1].ndim]
    if dim < 0:
        raise call.misfit("it inserts slices of rows where each rank has different ones")
    if target.same(source.along(dim)) or target.is_zero or dim in target.uniform:
        return source.along(dim)
    raise call.misfit("the inserted tensor and the destination have different placements")


@rule_for("index_fill")
def _fill(call: Call) -> Place:
    if not all(place.is_whole for place in call.places[1:]):
        raise call.misfit("the indices or the value differ between ranks")
    filled = replace(call, tensors=call.tensors[:1], places=call.places[:1])
    return filled.slicewise(call.dims())


@rule_for("glu", "glu_backward")
def halves(call: Call) -> list[Place]:
    """Halves of a dimension: slices have both halves as blocks."""
    place, tensor = call.places[-1], call.tensors[-1]
    axis = call.get("dim") % tensor.ndim
    if not place.is_slice:
        raise call.misfit("it is not linear, and its input is a partial sum")
    half = place
    if place.dim == axis:
        blocks = place.blocks_in(tensor.shape[axis])
        middle = len(blocks) // 2
        if blocks[:middle] * 2 != blocks:
            raise call.misfit(f"it halves dimension {axis}, which is sharded")
        half = place.along(axis, blocks[:middle])
    if call.name == "glu":
        return [half]
    if not call.places[0].same(half):
        raise call.misfit("its inputs have different placements")
    return [place]


@rule_for("masked_scatter", "masked_select", "nonzero", "argwhere")
def _refuse_data(call: Call) -> list[Place]:
    raise call.misfit("its choice depends on values that differ between ranks")


@rule_for("pixel_shuffle", "pixel_unshuffle")
def shuffle(call: Call) -> list[Place]:
    """Channels become pixels, in consecutive groups."""
    own, after = call.tensors[0].shape[-3], call.outs[0].shape[-3]
    place = call.slicewise((-2, -1), is_linear=True)
    if not place.is_slice or place.dim < call.tensors[0].ndim - 3:
        return [place]
    blocks = [Fraction(size * after, own) for size in place.blocks_in(own)]
    if any(block.denominator > 1 for block in blocks):
        raise call.misfit("it cuts across the ranks' slices")
    return [place.along(place.dim, [int(block) for block in blocks])]


# --- shared memory -------------------------------------------------------------------------------
# Autograd turns the gradient of a write through a view into `as_strided` and such writes.
@rule_for("as_strided")
def as_strided(call: Call) -> list[Place]:
    """Keep a shard along a dimension of the same stride, or of the same memory in another shape."""
    place = through_memory(call.places[0], call.tensors[0], call.outs[0])
    if place is None:
        raise call.misfit("no rule follows a slice through these strides")
    return [place]


def through_memory(place: Place, known: Tensor, other: Tensor) -> Place | None:
    """Placement of a tensor, from another tensor of the same memory; None if unclear."""
    if place.order:
        return None
    if not place.is_slice:
        return place
    size, stride = known.shape[place.dim], known.stride(place.dim)
    for dim in range(other.ndim):
        alike = (other.shape[dim], other.stride(dim)) == (size, stride)
        others = (d for d in range(other.ndim) if d != dim)
        if alike and all(_keeps_to(other, d, size, stride) for d in others):
            return place.along(dim)
    same = (known.numel(), known.storage_offset()) == (other.numel(), other.storage_offset())
    if same and known.is_contiguous() and other.is_contiguous():
        fits = (place.along(*fit) for fit in fitting(place, known.shape, other.shape))
        # A leading dimension of size 1 is a batch of one sample more often than one head per rank.
        return min(
            fits, key=lambda p: (len(p.blocks), p.dim == 0 and other.shape[0] == 1), default=None
        )
    return None


def _keeps_to(tensor: Tensor, dim: int, size: int, stride: int) -> bool:
    """Return True if steps along a dimension stay within one index of the sliced dimension."""
    step, count = tensor.stride(dim), tensor.shape[dim]
    return count == 1 or step % (size * stride) == 0 or step * (count - 1) < stride
