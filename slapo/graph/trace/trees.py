"""Nested Python values: what they are made of, and how to make one again from new parts."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

#: Key in ``node.meta`` of what the value of a node is; see :func:`kind_of`.
KIND = "slapo_kind"

#: Symbolic numbers: sizes, and what Python arithmetic makes of them.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Part(NamedTuple):
    """One element of a container, and how to reach it: ``access(container, key)``."""

    access: Callable[..., Any]
    key: Any
    value: Any


def parts(value: Any) -> list[Part] | None:
    """The elements of a tuple, list, mapping or dataclass; None for anything else.

    Examples
    --------
    >>> [part.key for part in parts({"a": 1, "b": 2})]
    ['a', 'b']
    >>> parts(3) is None
    True
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return [Part(getattr, name, getattr(value, name)) for name in names]
    if isinstance(value, Mapping):
        return [Part(operator.getitem, key, item) for key, item in value.items()]
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return [Part(operator.getitem, i, item) for i, item in enumerate(value)]
    return None


def kind_of(value: Any) -> str:
    """What a value is to a graph: ``"tensor"``, ``"container"`` or ``"value"`` (all else).

    Examples
    --------
    >>> kind_of(torch.ones(2)), kind_of((1, 2)), kind_of(torch.Size([2])), kind_of(None)
    ('tensor', 'container', 'value', 'value')
    """
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "value" if parts(value) is None else "container"


def rebuild(value: Any, items: list[Any]) -> Any:
    """A container like `value` that holds `items` (in the order of :func:`parts`)."""
    kind: Any = type(value)
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        return kind(**dict(zip(names, items, strict=True)))
    if isinstance(value, Mapping):
        return kind(zip(value.keys(), items, strict=True))
    return kind(*items) if hasattr(value, "_fields") else kind(items)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` applied to everything in it that is no container."""
    elements = parts(value)
    if elements is None:
        return function(value)
    return rebuild(value, [map_leaves(part.value, function) for part in elements])


def leaves(value: Any) -> Iterator[Any]:
    """Everything in `value` that is no container, in order."""
    elements = parts(value)
    if elements is None:
        yield value
        return
    for part in elements:
        yield from leaves(part.value)


def hint(value: Any) -> Any:
    """For a symbolic size the number that it was in the example; other values as they are."""
    return int(value.node.hint) if isinstance(value, torch.SymInt) else value


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, in order, slices included."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def has_tensor(value: Any) -> bool:
    """True if there is a tensor anywhere in `value`."""
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves(value))
