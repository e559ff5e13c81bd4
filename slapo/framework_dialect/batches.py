"""From the batch of a data loader to the micro-batches of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from slapo.errors import SlapoError

_EXPECTED = (
    "(inputs, targets), where inputs is a tensor, a tuple of positional arguments or a dict of "
    "keyword arguments of the model, and targets is what loss_fn takes"
)


@dataclass
class MicroBatch:
    """One call of the model, and what its output is compared with.

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


def split_batch(batch: Any, micro_batches: int) -> list[MicroBatch]:
    """Cut a batch in equal parts along the first dimension of its tensors.

    Parameters
    ----------
    batch
        ``(inputs, targets)``. Inputs: a tensor, a tuple or list of positional arguments, or a
        mapping of keyword arguments. Targets: any nest of tensors, or None.
    micro_batches
        Number of parts.

    Returns
    -------
    list of MicroBatch
        Their tensors are views. Tensors without dimensions and all other values are in every one.

    Raises
    ------
    TypeError
        If the batch is no pair, or a keyword is no string.
    ValueError
        If tensors differ in their first size, or it is not divisible.

    Examples
    --------
    >>> parts = split_batch((torch.arange(6).view(3, 2), torch.arange(3)), 3)
    >>> parts[1].args, parts[1].targets
    ((tensor([[2, 3]]),), tensor([1]))
    """
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches is {micro_batches!r}; pass a whole number from 1 up")
    inputs, targets = _pair(batch)
    args, kwargs = _arguments(inputs)
    whole = {"inputs": kwargs or args, "targets": targets}
    part = _part_size(_sizes(whole), micro_batches) if micro_batches > 1 else None
    if part is None:
        return [MicroBatch(args, kwargs, targets)]
    return [
        MicroBatch(*(_map(_taker(k * part, part), nest) for nest in (args, kwargs, targets)))
        for k in range(micro_batches)
    ]


def move_batch(batch: Any, device: torch.device | str) -> Any:
    """Move the tensors of a batch to a device; without a copy where they are there already.

    Examples
    --------
    >>> move_batch({"x": torch.ones(2), "n": 3}, "cpu")
    {'x': tensor([1., 1.]), 'n': 3}
    """
    return _map(lambda tensor: tensor.to(device, non_blocking=True), batch)


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


def _sizes(whole: dict[str, Any]) -> dict[str, int]:
    """First size of each tensor, by where it lies in the batch."""
    return {
        name + pytree.keystr(path): leaf.shape[0]
        for name, nest in whole.items()
        for path, leaf in pytree.tree_flatten_with_path(_map(lambda tensor: tensor, nest))[0]
        if isinstance(leaf, Tensor) and leaf.dim()
    }


def _part_size(sizes: dict[str, int], micro_batches: int) -> int:
    shown = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    if not sizes:
        raise ValueError(
            f"the batch has no tensor to cut in {micro_batches} micro-batches; pass tensors, or "
            "micro_batches=1"
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the tensors of the batch differ in their first size ({shown}), which is the one that "
            "is cut in micro-batches; expand all of them to the batch size"
        )
    size = next(iter(sizes.values()))
    if size % micro_batches or not size:
        raise ValueError(
            f"a batch of {size} samples is not divisible by micro_batches={micro_batches} "
            f"({shown}); change either, or drop the last batch of the data (drop_last=True)"
        )
    return size // micro_batches


def _taker(start: int, length: int) -> Callable[[Tensor], Tensor]:
    """Return a function that takes these rows of a tensor."""
    return lambda tensor: tensor.narrow(0, start, length) if tensor.dim() else tensor


def _map(fn: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """Apply ``fn`` to the tensors of a nest; mappings that torch does not know become dicts."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf)
        return _map(fn, dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(visit, nest)
