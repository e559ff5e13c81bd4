"""From the batch of a data loader to the micro-batches of an engine."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slapo.agreement import (
    all_ranks_or_none,
    checksum,
    communication_device,
    same_on_all_ranks,
)
from slapo.errors import SlapoError
from slapo.mesh import group_among

_EXPECTED = (
    "(inputs, targets), where inputs is a tensor, a tuple of positional arguments or a dict of "
    "keyword arguments of the model, and targets is what loss_fn takes"
)


@dataclass(frozen=True)
class Batch:
    """One or more samples: arguments of the model, and what its output is compared with.

    Attributes
    ----------
    args, kwargs
        Arguments of the model's forward.
    targets
        Second argument of the loss function.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any

    @classmethod
    def of(cls, batch: Any, device: torch.device | str) -> Batch:
        """Take apart what a data loader yields, on a device.

        Parameters
        ----------
        batch
            ``(inputs, targets)``. Inputs: a tensor, a tuple or list of positional arguments, or a
            mapping of keyword arguments. Targets: any nest of tensors, or None.
        device
            Where its tensors go; without a copy where they are there already.

        Raises
        ------
        TypeError
            If the batch is no pair, or a keyword is no string.

        Examples
        --------
        >>> Batch.of(({"x": torch.ones(2), "n": 3}, None), "cpu").kwargs
        {'x': tensor([1., 1.]), 'n': 3}
        """
        inputs, targets = _pair(batch)
        args, kwargs = _arguments(inputs)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return cls(_map(move, args), _map(move, kwargs), _map(move, targets))

    def cast(self, dtype: torch.dtype | None) -> Batch:
        """Arguments of floating point in another dtype; None leaves them.

        Examples
        --------
        >>> Batch((torch.ones(1),), {}, None).cast(torch.bfloat16).args
        (tensor([1.], dtype=torch.bfloat16),)
        """
        if dtype is None:
            return self

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return Batch(_map(cast, self.args), _map(cast, self.kwargs), self.targets)

    def lengths(self) -> set[int]:
        """First sizes of its tensors.

        Examples
        --------
        >>> Batch((torch.ones(6, 2), torch.tensor(1.0)), {}, None).lengths()
        {6}
        """
        leaves = _leaves(self)
        return {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}

    def sizes(self) -> dict[str, int]:
        """First size of each tensor, by where it lies in the batch."""
        whole = {"inputs": self.kwargs or self.args, "targets": self.targets}
        return {
            name + pytree.keystr(path): leaf.shape[0]
            for name, nest in whole.items()
            for path, leaf in pytree.tree_flatten_with_path(nest)[0]
            if isinstance(leaf, Tensor) and leaf.dim()
        }

    def size(self, needed: int) -> int:
        """Number of samples.

        Parameters
        ----------
        needed
            Number of micro-batches that the batch is cut in, for messages.

        Raises
        ------
        ValueError
            If there is no tensor to count, or tensors differ in their first size.

        Examples
        --------
        >>> Batch((torch.ones(6, 2),), {}, None).size(3)
        6
        """
        found = self.lengths()
        if len(found) == 1:
            return found.pop()
        if not found:
            raise ValueError(
                f"the batch has no tensor to cut in {needed} micro-batches; pass tensors, or "
                "micro_batches=1"
            )
        raise ValueError(
            f"the tensors of the batch differ in their first size ({_listed(self.sizes())}), which "
            "is the one that is cut in micro-batches; expand all of them to the batch size"
        )

    def part(self, start: int, length: int) -> Batch:
        """Some of the samples, as views; tensors without dimensions and other values stay.

        Examples
        --------
        >>> Batch((torch.arange(6),), {"n": 1}, None).part(2, 2)
        Batch(args=(tensor([2, 3]),), kwargs={'n': 1}, targets=None)
        """

        def take(tensor: Tensor) -> Tensor:
            return tensor.narrow(0, start, length) if tensor.dim() else tensor

        return Batch(_map(take, self.args), _map(take, self.kwargs), _map(take, self.targets))

    def cut(self, micro_batches: int) -> list[Batch]:
        """Equal parts.

        Raises
        ------
        ValueError
            If the samples cannot be cut in so many.

        Examples
        --------
        >>> [part.args for part in Batch((torch.arange(4),), {}, None).cut(2)]
        [(tensor([0, 1]),), (tensor([2, 3]),)]
        """
        if micro_batches == 1:
            return [self]
        length = self.part_size(micro_batches)
        return [self.part(k * length, length) for k in range(micro_batches)]

    def part_size(self, micro_batches: int) -> int:
        """Samples of each of equal parts. See `cut`."""
        size = self.size(micro_batches)
        if size % micro_batches or not size:
            raise ValueError(
                f"a batch of {size} samples is not divisible by micro_batches={micro_batches} "
                f"({_listed(self.sizes())}); change either, or drop the last batch of the data "
                "(drop_last=True)"
            )
        return size // micro_batches

    def cut_unevenly(self, micro_batches: int) -> list[tuple[Batch, int]]:
        """Batches that are cut in equal parts one after the other, and in how many.

        Any number of samples can be cut so: a last part may be smaller than the others.

        Examples
        --------
        >>> batch = Batch((torch.arange(7),), {}, None)
        >>> [(part.args, count) for part, count in batch.cut_unevenly(3)]
        [((tensor([0, 1, 2, 3, 4, 5]),), 2), ((tensor([6]),), 1)]
        """
        if micro_batches == 1:
            return [(self, 1)]
        size = self.size(micro_batches)
        if size % micro_batches == 0 and size:
            return [(self, micro_batches)]
        length = max(1, -(-size // micro_batches))
        full, rest = divmod(size, length)
        parts = [(self.part(0, full * length), full)] if full else []
        return parts + ([(self.part(full * length, rest), 1)] if rest or not full else [])


def next_batch(data_iter: Iterator[Any]) -> Any:
    """Take one batch.

    Parameters
    ----------
    data_iter
        An iterator over batches.

    Returns
    -------
    Any
        The batch, not looked at.

    Raises
    ------
    TypeError
        If it is no iterator.
    SlapoError
        If it has no further batch.

    Examples
    --------
    >>> next_batch(iter([3]))
    3
    """
    if not isinstance(data_iter, Iterator):
        remedy = (
            "pass iter() of it, made once, not for every step"
            if isinstance(data_iter, Iterable) and not isinstance(data_iter, Tensor)
            else "pass an iterator over batches, such as iter(data_loader)"
        )
        raise TypeError(f"data_iter is a {type(data_iter).__name__} and no iterator; {remedy}")
    try:
        return next(data_iter)
    except StopIteration:
        raise SlapoError(
            "data_iter has no further batch; pass a fresh iter(data_loader) for the next epoch"
        ) from None


class BatchCheck:
    """Refuses batches that differ among the ranks that must have the same one.

    The pipeline and tensor-parallel ranks of one data-parallel coordinate work on one batch, and
    get it by loading it each. Where their loaders have drifted apart, training goes on with a model
    that nobody meant. The ranks compare shapes, types and a checksum of the bytes, in one small
    collective of theirs.

    Parameters
    ----------
    mesh
        Of the dimensions pp, dp and tp. Making one is a collective of the world.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._dp = mesh.get_local_rank("dp")
        self.group = _group_of_columns(mesh)

    def check(self, what: str, batch: Batch | None, error: Exception | None) -> None:
        """Compare; a collective of the ranks that share a batch.

        Parameters
        ----------
        what
            What is being done, for messages.
        batch, error
            This rank's batch, or why it has none.

        Raises
        ------
        Exception
            The error.
        SlapoError
            On all of these ranks, if one has no batch, or another one than the first.
        """
        if self.group is None:
            if error is not None:
                raise error
            return
        digest = (0, 0, 0) if batch is None else (1, *batch_digest(batch))
        if not self._is_alike(digest):
            all_ranks_or_none(what, lambda: _raise(error), self.group)
            told = f"{describe_batch(batch)} of checksum {digest[2]:x}"
            where = f"{what}: the batch of data-parallel coordinate {self._dp}"
            same_on_all_ranks(where, told, self.group, _HOW_TO_SHARE)

    def _is_alike(self, digest: tuple[int, int, int]) -> bool:
        # The largest and, by its negative, the smallest: in one collective.
        both = torch.tensor([digest, [-number for number in digest]], dtype=torch.int64)
        both = both.to(communication_device(self.group))
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group)
        largest, smallest = both.tolist()
        return largest[0] == 1 and largest == [-number for number in smallest]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


_HOW_TO_SHARE = (
    "seed and shard the data by mesh.get_local_rank('dp'), so that the pp and tp ranks of one "
    "coordinate read the same"
)


def _group_of_columns(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks of this data-parallel coordinate; None where there is but one."""
    pp, dp, tp = mesh.shape
    if pp == 1 or tp == 1:
        return None if pp == tp == 1 else mesh.get_group("pp" if tp == 1 else "tp")
    return group_among([mesh.mesh[:, d].flatten().tolist() for d in range(dp)])


def batch_digest(batch: Any) -> tuple[int, int]:
    """Two numbers that tell batches apart: one of their form, one of their tensors' bytes.

    Examples
    --------
    >>> batch_digest(torch.tensor([1, 2])) == batch_digest(torch.tensor([2, 1]))
    False
    """
    sums = [checksum(leaf) for leaf in _leaves(batch) if isinstance(leaf, Tensor)]
    contents = torch.stack([s.cpu() for s in sums]).tolist() if sums else []
    return zlib.crc32(describe_batch(batch).encode()), zlib.crc32(str(contents).encode())


def describe_batch(batch: Any) -> str:
    """Shapes and types of a batch, for people.

    Examples
    --------
    >>> describe_batch((torch.zeros(2, 3), None))
    'float32(2, 3), None'
    """
    return ", ".join(_describe_leaf(leaf) for leaf in _leaves(batch))


def _leaves(batch: Any) -> list[Any]:
    nest = (batch.args, batch.kwargs, batch.targets) if isinstance(batch, Batch) else batch
    return pytree.tree_leaves(nest)


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{tuple(leaf.shape)}"
    return repr(leaf) if leaf is None or isinstance(leaf, (bool, int, str)) else type(leaf).__name__


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        labels = "labels" if "labels" in batch else "its targets"
        raise TypeError(
            f"the batch is a {type(batch).__name__} with {sorted(map(str, batch))}; make it the "
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
    odd = [key for key in inputs if not isinstance(key, str)]
    if odd:
        raise TypeError(f"inputs has the keys {odd}, which are no names of arguments; pass strings")
    return (), dict(inputs)


def _map(fn: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """Apply ``fn`` to the tensors of a nest; mappings that torch does not know become dicts.

    By hand for what nearly all batches are made of: this is done several times in a step.
    """
    if isinstance(nest, Tensor):
        return fn(nest)
    kind = type(nest)
    if kind is tuple or kind is list:
        return kind([_map(fn, item) for item in nest])
    if kind is dict or (isinstance(nest, Mapping) and kind not in pytree.SUPPORTED_NODES):
        return {key: _map(fn, item) for key, item in nest.items()}
    if kind in pytree.SUPPORTED_NODES:
        leaves, spec = pytree.tree_flatten(nest)
        return pytree.tree_unflatten([_map(fn, leaf) for leaf in leaves], spec)
    return nest


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}: {size}" for name, size in sizes.items())
