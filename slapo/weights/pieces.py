"""Symbolic tensors that record which boxes of named tensors they consist of.

Run code that moves weights on them, and read the layout off the result. Operations that cannot be
followed (an interleaving reshape, arithmetic) are computed from full tensors when values are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

#: Start and stop along each axis.
Box = tuple[tuple[int, int], ...]

#: Returns the values in a box of a named tensor.
Reader = Callable[[str, Box], Tensor]


def box_of(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor."""
    return tuple((0, size) for size in shape)


def lengths(box: Box) -> list[int]:
    """Return the shape of a box."""
    return [stop - start for start, stop in box]


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    shared = tuple((max(a1, b1), min(a2, b2)) for (a1, a2), (b1, b2) in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def index_of(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    """Return the indices of a box in a full tensor, or in a tensor that holds the box `within`."""
    starts = [start for start, _ in within] if within is not None else [0] * len(box)
    return tuple(slice(a - at, b - at) for (a, b), at in zip(box, starts, strict=True))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Split a range of a flattened tensor into boxes; yield (start in the flat tensor, box)."""
    if start >= stop:
        return
    if not shape or (start == 0 and stop == torch.Size(shape).numel()):
        yield start, box_of(shape)
        return
    row = torch.Size(shape[1:]).numel()
    # The full rows first..last form one box. The incomplete rows at both ends recurse.
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        for at, box in boxes_of_range(shape[1:], start - last * row, stop - last * row):
            yield last * row + at, ((last, last + 1), *box)
        return
    for at, box in boxes_of_range(shape[1:], start - (first - 1) * row, row):
        if start < first * row:
            yield (first - 1) * row + at, ((first - 1, first), *box)
    if first < last:
        yield first * row, ((first, last), *box_of(shape[1:]))
    for at, box in boxes_of_range(shape[1:], 0, stop - last * row):
        yield last * row + at, ((last, last + 1), *box)


@dataclass(frozen=True)
class Computed:
    """Output number `output` of a call that was not followed."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int

    def read(self, get: Reader) -> Tensor:
        """Run the call and return the output."""
        args, kwargs = pytree.tree_map_only(Pieced, lambda t: t.read(get), (self.args, self.kwargs))
        value: Tensor = pytree.tree_leaves(self.function(*args, **kwargs))[self.output]
        return value

    def inputs(self) -> Iterator[Pieced]:
        """Yield the symbolic tensors that it is computed from."""
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Pieced):
                yield leaf


@dataclass(frozen=True)
class Piece:
    """The box `place` of a tensor, equal to the box `source` of `leaf`.

    Axis i follows the leaf's axis ``axes[i]``. None is an axis of size 1 that the leaf lacks, as of
    an expert in a stack. Axes of the leaf that are not listed have size 1.
    """

    leaf: str | Computed
    source: Box
    place: Box
    axes: tuple[int | None, ...]

    def within(self, box: Box) -> Piece | None:
        """Return the part inside a box, or None."""
        place = overlap(self.place, box)
        if place is None:
            return None
        source = list(self.source)
        for here, there in enumerate(self.axes):
            if there is not None:
                # Both boxes have equal lengths along followed axes, so a shift maps one to the
                # other.
                by = self.source[there][0] - self.place[here][0]
                source[there] = (place[here][0] + by, place[here][1] + by)
        return replace(self, source=tuple(source), place=place)

    def moved(self, starts: Sequence[int]) -> Piece:
        """Return the piece, shifted along each axis."""
        place = tuple((a + by, b + by) for (a, b), by in zip(self.place, starts, strict=True))
        return replace(self, place=place)

    def to_place(self, value: Tensor) -> Tensor:
        """Return values of the leaf's box in the layout of the place."""
        order = [axis for axis in self.axes if axis is not None]
        gone = [axis for axis in range(value.dim()) if axis not in order]
        return value.permute(order + gone).reshape(lengths(self.place))

    def to_source(self, value: Tensor) -> Tensor:
        """Return a view of the place's values in the layout of the leaf."""
        order = [axis for axis in self.axes if axis is not None]
        gone = [axis for axis in range(len(self.source)) if axis not in order]
        kept = value[tuple(0 if axis is None else slice(None) for axis in self.axes)]
        kept = kept[(..., *(None for _ in gone))]
        at = {axis: here for here, axis in enumerate(order + gone)}
        return kept.permute([at[axis] for axis in range(len(self.source))])

    def read(self, get: Reader) -> Tensor:
        """Read the values, in the layout of the place."""
        if isinstance(self.leaf, Computed):
            return self.to_place(self.leaf.read(get)[index_of(self.source)])
        return self.to_place(get(self.leaf, self.source))


class Pieced(torch.Tensor):
    """Tensor that consists of pieces; elements outside all pieces are zero."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def made(pieces: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype) -> Pieced:
        """Make a tensor of pieces."""
        new: Pieced = torch.Tensor._make_wrapper_subclass(
            Pieced, torch.Size(shape), dtype=dtype, device=torch.device("meta")
        )
        new.pieces = tuple(pieces)
        return new

    @staticmethod
    def leaf(name: str | Computed, shape: Sequence[int], dtype: torch.dtype) -> Pieced:
        """Make a named tensor that consists of itself."""
        box = box_of(shape)
        return Pieced.made([Piece(name, box, box, tuple(range(len(box))))], shape, dtype)

    def part(self, box: Box) -> Pieced:
        """Return the part in a box."""
        inside = [piece.within(box) for piece in self.pieces]
        back = [-start for start, _ in box]
        return Pieced.made([p.moved(back) for p in inside if p], lengths(box), self.dtype)

    def read(self, get: Reader) -> Tensor:
        """Read the values, with the dtype that `get` returns for named tensors."""
        values = None
        for piece in self.pieces:
            found = piece.read(get)
            if piece.place == box_of(self.shape):
                return found
            if values is None:
                values = torch.zeros(self.shape, dtype=found.dtype)
            # Parts may be stored in different dtypes; no part may be rounded to another's.
            values = values.to(torch.promote_types(values.dtype, found.dtype))
            values[index_of(piece.place)] = found
        return torch.zeros(self.shape, dtype=self.dtype) if values is None else values

    def needs(self) -> Iterator[tuple[str, Box]]:
        """Yield the boxes of named tensors that the values come from."""
        for piece in self.pieces:
            if isinstance(piece.leaf, str):
                yield piece.leaf, piece.source
            else:
                for value in piece.leaf.inputs():
                    yield from value.needs()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pieced:
        return self  # immutable

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Pieced.made, (self.pieces, tuple(self.shape), self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Loaders write ``parameter.data = value``, which moves the record instead of values.
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0]
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0].pieces = args[1].pieces
            return None
        name = getattr(func, "__name__", "")
        made = _RULES[name](*args, **kwargs) if name in _RULES else NotImplemented
        if made is not NotImplemented:
            return made
        # Shape, dtype and flags belong to the wrapper itself, on meta.
        if name == "__get__" or func in _ABOUT_SHAPES:
            return super().__torch_function__(func, (Pieced,), args, kwargs)
        return _computed(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Operations are intercepted above dispatch; what arrives here came around
        # __torch_function__.
        raise TypeError(f"{func} needs values, but only the origin of this tensor is known")


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Infer shapes on meta; the values are computed when they are read."""
    blanks = pytree.tree_map_only(
        Pieced, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
    )
    leaves, tree = pytree.tree_flatten(func(*blanks[0], **blanks[1]))
    made = [
        Pieced.leaf(Computed(func, args, kwargs, k), leaf.shape, leaf.dtype)
        if isinstance(leaf, Tensor)
        else leaf
        for k, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(made, tree)


# --- followed operations; NotImplemented for unsupported forms ----------------------------------
def _narrow(t: Pieced, dim: int, start: int, length: int) -> Pieced:
    box = list(box_of(t.shape))
    start += t.shape[dim] if start < 0 else 0
    box[dim] = (start, start + length)
    return t.part(tuple(box))


def _split(t: Pieced, split_size: int | Sequence[int], dim: int = 0) -> tuple[Pieced, ...]:
    size = t.shape[dim]
    if isinstance(split_size, int):
        step = split_size
        split_size = [min(step, size - at) for at in range(0, size, step)]
    starts = accumulate(split_size, initial=0)
    return tuple(_narrow(t, dim, at, n) for at, n in zip(starts, split_size, strict=False))


def _chunk(t: Pieced, chunks: int, dim: int = 0) -> tuple[Pieced, ...]:
    return _split(t, -(-t.shape[dim] // chunks), dim)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not all(isinstance(t, Pieced) for t in tensors):
        return NotImplemented
    first, pieces, at = tensors[0], [], 0
    dim %= first.dim()
    for t in tensors:
        by = [at if axis == dim else 0 for axis in range(first.dim())]
        pieces += [piece.moved(by) for piece in t.pieces]  # type: ignore[attr-defined]
        at += t.shape[dim]
    shape = [at if axis == dim else size for axis, size in enumerate(first.shape)]
    return Pieced.made(pieces, shape, reduce(torch.promote_types, (t.dtype for t in tensors)))


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    return _cat([t.unsqueeze(dim) for t in tensors], dim)


def _rearranged(t: Pieced, order: Sequence[int | None]) -> Pieced:
    """Reorder the axes; None is a new axis of size 1."""

    def taken(values: Sequence[Any], new: Any) -> tuple[Any, ...]:
        return tuple(new if axis is None else values[axis] for axis in order)

    pieces = [
        replace(piece, place=taken(piece.place, (0, 1)), axes=taken(piece.axes, None))
        for piece in t.pieces
    ]
    return Pieced.made(pieces, taken(t.shape, 1), t.dtype)


def _permute(t: Pieced, *dims: Any) -> Pieced:
    dims = dims if isinstance(dims[0], int) else tuple(dims[0])
    return _rearranged(t, [axis % t.dim() for axis in dims])


def _transpose(t: Pieced, dim0: int, dim1: int) -> Pieced:
    order = list(range(t.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _rearranged(t, order)


def _t(t: Pieced) -> Pieced:
    return _rearranged(t, list(range(t.dim()))[::-1])


def _unsqueeze(t: Pieced, dim: int) -> Pieced:
    order: list[int | None] = [*range(t.dim())]
    order.insert(dim % (t.dim() + 1), None)
    return _rearranged(t, order)


def _squeeze(t: Pieced, dim: int | None = None) -> Pieced:
    gone = range(t.dim()) if dim is None else [dim % t.dim()]
    kept = [axis for axis in range(t.dim()) if axis not in gone or t.shape[axis] != 1]
    return _rearranged(t, kept)


def _getitem(t: Pieced, index: Any) -> Any:
    index = index if isinstance(index, tuple) else (index,)
    if index == (Ellipsis,):
        return t
    # Indices by numbers, masks or steps give no box per piece and are computed instead.
    if not all(isinstance(at, slice) and at.step in (None, 1) for at in index):
        return NotImplemented
    ranges = [at.indices(size)[:2] for at, size in zip(index, t.shape, strict=False)]
    if any(start > stop for start, stop in ranges):
        return NotImplemented
    return t.part((*ranges, *box_of(t.shape)[len(ranges) :]))


def _pad(t: Pieced, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Append zeros."""
    if mode != "constant" or value or any(pad[::2]) or min(pad) < 0:
        return NotImplemented
    shape = list(t.shape)
    for back, more in enumerate(pad[1::2], 1):
        shape[-back] += more
    return Pieced.made(t.pieces, shape, t.dtype)


def _to(t: Pieced, *args: Any, **kwargs: Any) -> Pieced:
    dtypes = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)]
    return Pieced.made(t.pieces, t.shape, dtypes[0]) if dtypes else t


def _same(t: Pieced, *args: Any, **kwargs: Any) -> Pieced:
    return t


_RULES: dict[str, Callable[..., Any]] = {
    "narrow": _narrow,
    "split": _split,
    "chunk": _chunk,
    "cat": _cat,
    "stack": _stack,
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "__getitem__": _getitem,
    "pad": _pad,
    "to": _to,
    **dict.fromkeys(("contiguous", "clone", "detach", "cpu"), _same),
}

#: Functions that need no values.
_ABOUT_SHAPES = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.stride,
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.is_complex,
    Tensor.requires_grad_,
    Tensor.__hash__,
    Tensor.__repr__,
}
