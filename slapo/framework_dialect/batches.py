"""Conversion of a data loader's batches to the micro-batches of an engine."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slapo.agreement import all_ranks_or_none, checksum, extremes, same_on_all_ranks
from slapo.errors import SlapoError
from slapo.mesh import group_among
from slapo.op.cross_entropy import IGNORED

_EXPECTED = (
    "(inputs, targets), where inputs is a tensor, a tuple of positional arguments or a dict of "
    "keyword arguments of the model, and targets is passed to loss_fn"
)


_LABELS = (torch.int64, torch.int32)

#: Name or position of an argument -> axis of its samples; None: every micro-batch gets all of it.
BatchDims = Mapping[str | int, int | None]


def target_counts(batch: Batch, shifts: bool) -> Tensor | None:
    """Number of targets per sample that a mean is over; None if it cannot be determined.

    Counts the model's own ``labels``, without the first token if it `shifts` them, or else the
    targets of the loss function, if they are integers.
    """
    own = batch.kwargs.get("labels")
    labels = batch.targets if own is None else own
    if isinstance(labels, Mapping):
        labels = labels.get("labels")
    if not isinstance(labels, Tensor) or not labels.dim() or labels.dtype not in _LABELS:
        return None
    if own is not None and not _is_first_axis(batch, "labels"):
        return None
    if shifts and own is not None and labels.dim() > 1:
        labels = labels[..., 1:]
    return (labels != IGNORED).reshape(labels.shape[0], -1).sum(1)


def _is_first_axis(batch: Batch, argument: str) -> bool:
    try:
        return batch.axis_of(argument) == 0
    except ValueError:  # the batch cannot be split, and is not
        return True


@dataclass(frozen=True)
class Batch:
    """One or more samples: arguments of the model's forward, and targets of the loss function."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any
    #: number of targets of each sample; None if they are not counted
    counts: Tensor | None = None
    #: weight of a counted target, or without counts that of all samples; None: equal to other parts
    each: Tensor | float | None = None
    #: number of samples before padding with a copy of the last one; None without padding
    unpadded: int | None = None
    dims: BatchDims = field(default_factory=dict)
    #: sample axes, known from the batch that this is a part of
    known_axes: tuple[int | None, ...] | None = None

    @classmethod
    def of(cls, batch: Any, device: torch.device | str, dims: BatchDims | None = None) -> Batch:
        """Unpack a batch of a data loader, and move it to a device."""
        inputs, targets = _pair(batch)
        args, kwargs = _arguments(inputs)
        given = (args, kwargs, targets)
        args, kwargs, targets = _map(lambda t: t.to(device, non_blocking=True), given)
        return cls(args, kwargs, targets, dims=dims or {})

    def cast(self, dtype: torch.dtype | None) -> Batch:
        """Cast floating-point arguments to a dtype; None leaves them."""
        if dtype is None:
            return self

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return replace(self, args=_map(cast, self.args), kwargs=_map(cast, self.kwargs))

    @property
    def weight(self) -> Tensor | float | None:
        """Weight of the loss of these samples; None if it is equal for all parts of a batch."""
        if self.counts is None or self.each is None:
            return self.each
        return self.counts.sum() * self.each

    def without_padding(self, output: Any) -> Any:
        """Remove the outputs of padding from a model's output."""
        size = self.unpadded
        if size is None:
            return output

        def cut(tensor: Tensor) -> Tensor:
            # Outputs whose first axis is not that of samples, such as auxiliary losses, are left as
            # they are.
            is_padded = tensor.dim() > 0 and tensor.shape[0] == size + 1
            return tensor.narrow(0, 0, size) if is_padded else tensor

        return _map(cut, output)

    def size(self) -> int:
        """Number of samples for an evaluation; if inputs differ in length, that of the targets."""
        lengths = _lengths(self.targets) or _lengths((self.args, self.kwargs))
        return lengths.pop() if len(lengths) == 1 else 1

    def samples(self) -> int:
        """Number of samples along the axes that are split."""
        leaves = zip(_leaves((self.args, self.kwargs)), self.axes, strict=True)
        sizes = (leaf.shape[axis] for leaf, axis in leaves if axis is not None)
        return next(sizes, None) or max(_lengths(self.targets), default=0)

    def part(self, start: int, length: int) -> Batch:
        """Return a range of samples as views; tensors without a sample axis are kept."""
        cut = self._along(lambda leaf, axis: leaf.narrow(axis, start, length))
        targets = _map(lambda t: t.narrow(0, start, length) if t.dim() else t, self.targets)
        if self.counts is not None:
            return replace(cut, targets=targets, counts=self.counts.narrow(0, start, length))
        each = None if self.each is None else self.each * length / max(1, self.samples())
        return replace(cut, targets=targets, each=each)

    def _along(self, change: Callable[[Tensor, int], Tensor]) -> Batch:
        """Return the batch with `change` applied to each input and its sample axis."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        changed = [
            leaf if axis is None else change(leaf, axis)
            for leaf, axis in zip(leaves, self.axes, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(changed, spec)
        return replace(self, args=args, kwargs=kwargs, known_axes=self.axes)

    def cut(self, micro_batches: int, pads: bool = False) -> list[Batch]:
        """Split into equal parts; if that is impossible, the last parts have one sample less.

        With `pads`, these get a copy of their last sample, whose outputs are not passed to the
        loss.
        """
        if micro_batches == 1:
            return [self]
        length, longer = self._part_size(micro_batches)
        sizes = [length + (k < longer) for k in range(micro_batches)]
        starts = itertools.accumulate(sizes, initial=0)
        parts = [self.part(start, size) for start, size in zip(starts, sizes, strict=False)]
        if pads and longer:
            parts = [part if k < longer else part._padded(length) for k, part in enumerate(parts)]
        return parts

    def first(self, micro_batches: int) -> Batch:
        """Return the first of so many parts; no other part is larger."""
        if micro_batches == 1:
            return self
        length, longer = self._part_size(micro_batches)
        return self.part(0, length + bool(longer))

    def _padded(self, samples: int) -> Batch:
        def longer(leaf: Tensor, axis: int) -> Tensor:
            return torch.cat([leaf, leaf.narrow(axis, samples - 1, 1)], axis)

        padded = self._along(longer)
        labels, axis = padded.kwargs.get("labels"), self.axis_of("labels")
        # Labels of the model's own loss. torch.cat has copied them, if they have samples.
        if isinstance(labels, Tensor) and labels.dtype in _LABELS and axis is not None:
            labels.narrow(axis, samples, 1).fill_(IGNORED)
        return replace(padded, unpadded=samples)

    def most_parts(self, micro_batches: int) -> int:
        """Number of parts up to `micro_batches` that have a sample each; at least one."""
        return 1 if micro_batches == 1 else min(micro_batches, max(1, self.samples()))

    def _part_size(self, micro_batches: int) -> tuple[int, int]:
        """Size of the parts, and number of parts that are larger by one."""
        size = self.samples()
        if size < micro_batches:
            raise ValueError(
                f"a batch of {size} samples cannot be split into micro_batches={micro_batches} "
                f"({self._sizes()}); change either, or drop the last batch (drop_last=True)"
            )
        return divmod(size, micro_batches)

    @functools.cached_property
    def axes(self) -> tuple[int | None, ...]:
        """Sample axis of each leaf of the arguments; None for leaves that are not split."""
        if self.known_axes is not None:
            return self.known_axes
        named = list(self._named_leaves())
        declared = {
            leaf.shape[axis]
            for _, argument, leaf in named
            if (axis := self.dims.get(argument)) is not None and isinstance(leaf, Tensor)
        }
        # The first axis of targets is that of samples; without targets, so is that of inputs.
        sizes = _lengths(self.targets) | declared or {
            t.shape[0] for _, name, t in named if _is_cut(t) and name not in self.dims
        }
        if len(sizes) != 1:
            raise ValueError(
                f"the tensors of the batch differ in their first dimension ({self._sizes()}), "
                "which is split into micro-batches; expand all of them to the batch size, or "
                f"{_DECLARE}"
                if sizes
                else "the batch has no tensor to split; pass tensors, or micro_batches=1"
            )
        (size,) = sizes
        axes = tuple(
            self.dims[argument] if argument in self.dims else _axis_of(path, leaf, size)
            for path, argument, leaf in named
        )
        if any(axes) and 0 not in axes and not declared:
            raise ValueError(
                f"no input has the targets' first dimension ({self._sizes()}); pass as many of "
                f"both, or {_DECLARE}"
            )
        return axes

    def axis_of(self, argument: str | int) -> int | None:
        """Sample axis of an argument that is a tensor; None if it is not split."""
        leaves = zip(self._named_leaves(), self.axes, strict=True)
        return next((axis for (_, name, _), axis in leaves if name == argument), None)

    def check_totals(self) -> None:
        """Refuse to split cumulative lengths of packed documents, which refer to the full batch.

        They look like one integer per sample. The check reads their values, so it runs for new
        forms only.
        """
        leaves = list(self._named_leaves())
        tokens = {t.shape[0] * t.shape[1] for _, _, t in leaves if _is_cut(t) and t.dim() > 1}
        for (path, argument, leaf), axis in zip(leaves, self.axes, strict=True):
            rises = (
                axis == 0
                and argument not in self.dims
                and leaf.dim() == 1
                and leaf.dtype in _LABELS
                and len(leaf) > 1
                and bool((leaf.diff() >= 0).all())
            )
            if rises and int(leaf[-1]) in tokens:
                raise ValueError(
                    f"{path} rises to {int(leaf[-1])}, the number of tokens in the batch, so it "
                    "holds document ends, which are invalid in a micro-batch; pass "
                    f"micro_batches=1, or {_DECLARE}"
                )

    def _named_leaves(self) -> Iterator[tuple[str, str | int, Any]]:
        """Yield the path of each leaf of the arguments, its argument, and the leaf."""
        paths = pytree.tree_flatten_with_path((self.args, self.kwargs))[0]
        for (_, first, *rest), leaf in paths:
            key: Any = first
            argument = key.idx if isinstance(key, pytree.SequenceKey) else key.key
            yield f"inputs{pytree.keystr((first, *rest))}", argument, leaf

    def _sizes(self) -> str:
        """First size of each tensor, by its path in the batch."""
        targets = pytree.tree_flatten_with_path(self.targets)[0]
        named = [(path, leaf) for path, _, leaf in self._named_leaves()]
        named += [(f"targets{pytree.keystr(path)}", leaf) for path, leaf in targets]
        return ", ".join(f"{path}: {leaf.shape[0]}" for path, leaf in named if _is_cut(leaf))


_DECLARE = (
    "pass batch_dims={name: axis} to build if samples are along another axis, or {name: None} "
    "to give each micro-batch the full tensor"
)


def _is_cut(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _axis_of(path: str, leaf: Any, size: int) -> int | None:
    """Axis of a tensor that has `size` samples; None if there is no axis."""
    if not _is_cut(leaf):
        return None
    shape = tuple(leaf.shape)
    axes = [axis for axis, length in enumerate(shape) if length == size]
    # Samples come first, except in integer tensors of three or more dimensions, such as the
    # positions along three axes of an image: these must be unambiguous.
    if len(axes) == 1 or (axes[:1] == [0] and (len(shape) < 3 or leaf.is_floating_point())):
        return axes[0]
    which = f"{len(axes)} of its axes have" if axes else "none of its axes has"
    remedy = _DECLARE if axes else f"expand it to the batch size, or {_DECLARE}"
    raise ValueError(
        f"{path} has shape {shape}, and {which} the batch size, {size}, which is split into "
        f"micro-batches; {remedy}"
    )


def next_batch(data_iter: Iterator[Any]) -> Any:
    """Return the next batch unchanged."""
    if not isinstance(data_iter, Iterator):
        raise TypeError(
            f"data_iter is a {type(data_iter).__name__}, not an iterator over batches; pass "
            "iter(data_loader), made once, not for every step, or iter([batch]) for one batch"
        )
    try:
        return next(data_iter)
    except StopIteration:
        raise SlapoError(
            "data_iter has no more batches; pass a fresh iter(data_loader) for the next epoch"
        ) from None


class BatchCheck:
    """Refuses batches that differ among ranks that must have the same one.

    The pipeline and tensor-parallel ranks of one data-parallel coordinate each load their batch. If
    their loaders drift apart, training continues with wrong gradients. The ranks compare shapes,
    dtypes and a checksum of the bytes, in small collectives.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._dp = mesh.get_local_rank("dp")
        pp, dp, tp = mesh.shape
        #: the ranks of this data-parallel coordinate; None if there is only one
        self.group: dist.ProcessGroup | None = None
        if pp > 1 and tp > 1:
            self.group = group_among([mesh.mesh[:, d].flatten().tolist() for d in range(dp)])
        elif pp > 1 or tp > 1:
            self.group = mesh.get_group("pp" if tp == 1 else "tp")

    def load(self, what: str, read: Callable[[], Batch]) -> Batch:
        """Return what `read` does; raise on all of these ranks if it fails, or differs, on one."""
        if self.group is None:
            return read()
        batch = all_ranks_or_none(what, read, self.group)
        digest = batch_digest(batch)
        largest, smallest = extremes(torch.tensor(digest, dtype=torch.int64), self.group)
        if torch.equal(largest, smallest):
            return batch
        # Texts are exchanged for the message only; a step compares two integers.
        same_on_all_ranks(
            f"{what}: the batch of data-parallel coordinate {self._dp}",
            f"{_describe(batch)} with checksum {digest[1]:x}",
            self.group,
            "seed and shard the data by mesh.get_local_rank('dp'), so that pp and tp ranks of "
            "one coordinate read the same data",
        )
        return batch


def batch_digest(batch: Any) -> tuple[int, int]:
    """Two integers that identify a batch: a hash of its form, and one of its tensors' bytes."""
    sums = [checksum(leaf) for leaf in _leaves(batch) if isinstance(leaf, Tensor)]
    contents = torch.stack([s.cpu() for s in sums]).tolist() if sums else []
    return zlib.crc32(_describe(batch).encode()), zlib.crc32(str(contents).encode())


def _describe(batch: Any) -> str:
    """Shapes and dtypes of a batch."""
    shown = []
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            shown.append(f"{str(leaf.dtype).removeprefix('torch.')}{tuple(leaf.shape)}")
        elif leaf is None or isinstance(leaf, (bool, int, str)):
            shown.append(repr(leaf))
        else:
            shown.append(type(leaf).__name__)
    return ", ".join(shown)


def _lengths(nest: Any) -> set[int]:
    return {leaf.shape[0] for leaf in _leaves(nest) if isinstance(leaf, Tensor) and leaf.dim()}


def _leaves(batch: Any) -> list[Any]:
    nest = (batch.args, batch.kwargs, batch.targets) if isinstance(batch, Batch) else batch
    return pytree.tree_leaves(nest)


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        labels = "labels" if "labels" in batch else "its targets"
        raise TypeError(
            f"the batch is a {type(batch).__name__} with {sorted(map(str, batch))}; pass the "
            f"pair (inputs, targets): take {labels} out of the mapping and pass them second"
        )
    size = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise TypeError(f"the batch is a {type(batch).__name__}{size}; it must be {_EXPECTED}")


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if not isinstance(inputs, Mapping):
        raise TypeError(f"inputs is a {type(inputs).__name__}; a batch must be {_EXPECTED}")
    return (), dict(inputs)


def _map(fn: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """Apply `fn` to the tensors of a nest; mappings unknown to torch's pytree become dicts."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return _map(fn, dict(leaf))
        return fn(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(convert, nest)
