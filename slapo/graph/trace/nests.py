"""Nested Python values: their elements, and how to rebuild them from new ones."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

#: Key in ``node.meta`` for the kind of a node's value; see :func:`kind_of`.
KIND = "slapo_kind"

#: Key in ``node.meta`` for which dimensions of a tensor have one element, whatever is passed in.
ONES = "slapo_ones"

#: Key in ``node.meta`` for the path of the module whose forward makes the call.
OWNER = "slapo_owner"

#: Symbolic numbers: sizes, and what Python arithmetic makes of them.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Part(NamedTuple):
    """One element of a container, reached by ``access(container, key)``."""

    access: Callable[..., Any]
    key: Any
    value: Any


def parts(value: Any) -> list[Part] | None:
    """The elements of a tuple, list, mapping or dataclass; None for anything else.

    Model outputs of Transformers are dataclasses that leave out the fields that are None.

    Examples
    --------
    >>> [part.key for part in parts({"a": 1, "b": 2})]
    ['a', 'b']
    >>> parts(3) is None
    True
    """
    if isinstance(value, (tuple, list)):
        if isinstance(value, torch.Size):
            return None
        return [Part(operator.getitem, i, item) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        skip_none = isinstance(value, dict)
        return [Part(getattr, k, v) for k, v in fields if not (skip_none and v is None)]
    if isinstance(value, Mapping):
        return [Part(operator.getitem, key, item) for key, item in value.items()]
    return None


def kind_of(value: Any) -> str:
    """``"tensor"``, ``"container"``, or ``"value"`` for everything else."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "value" if parts(value) is None else "container"


def ones_of(value: Any) -> tuple[bool, ...]:
    """For each dimension of a tensor whether it has one element, and not a symbol's number."""
    return tuple([type(size) is int and size == 1 for size in getattr(value, "shape", ())])


def rebuild(value: Any, items: list[Any]) -> Any:
    """A container like `value` that holds `items`, in the order of :func:`parts`."""
    kind: Any = type(value)
    if dataclasses.is_dataclass(value):
        return kind(
            **{part.key: item for part, item in zip(parts(value) or (), items, strict=True)}
        )
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
    for part in elements or ():
        yield from leaves(part.value)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


# --- as dynamo's graphs can hold them ------------------------------------------------------------
def flatten(value: Any, flat: list[Any]) -> tuple[Any, ...]:
    """The structure of a value as nested tuples; its tensors and sizes are appended to `flat`."""
    if isinstance(value, (torch.Tensor, *SYMBOLIC)):
        flat.append(value)
        return ("leaf", len(flat) - 1)
    kind: Any = type(value)
    if isinstance(value, torch.Size):
        return ("size", kind, tuple(flatten(size, flat) for size in value))
    elements = parts(value)
    if elements is None:
        return ("value", value)
    items = tuple(flatten(part.value, flat) for part in elements)
    keys = tuple(part.key for part in elements)
    if kind in (tuple, list, dict):
        return (kind.__name__, kind, items, keys)
    by_name = dataclasses.is_dataclass(value) or isinstance(value, dict)
    by_position = hasattr(value, "_fields")
    return ("fields" if by_name else "record" if by_position else "other", kind, items, keys)


def accesses(value: Any) -> list[tuple[Any, ...]]:
    """The steps to each tensor and size in a value, in the order of :func:`flatten`."""
    if isinstance(value, (torch.Tensor, *SYMBOLIC)):
        return [()]
    elements = parts(value) or ()
    if isinstance(value, torch.Size):
        elements = [Part(operator.getitem, i, size) for i, size in enumerate(value)]
    return [((p.access, p.key), *rest) for p in elements for rest in accesses(p.value)]


def assemble(structure: Any, flat: Any) -> Any:
    """A value of this structure with the tensors of `flat`; dynamo interprets this function."""
    tag, content = structure[0], structure[1]
    if tag == "leaf":
        return flat[content]
    if tag == "value":
        return content
    items = [assemble(inner, flat) for inner in structure[2]]
    # Dynamo cannot guard a type that comes out of a constant: these four are spelled out.
    if tag == "tuple":
        return tuple(items)
    if tag == "list":
        return items
    if tag == "size":
        return torch.Size(items)
    if tag == "dict":
        return dict(zip(structure[3], items))  # noqa: B905  (dynamo knows no strict=)
    if tag == "fields":
        return content(**dict(zip(structure[3], items)))  # noqa: B905
    return content(*items) if tag == "record" else content(items)
