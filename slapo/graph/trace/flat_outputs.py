"""What a leaf returns as dynamo's graphs can hold it: tensors, and how to put them together."""

from __future__ import annotations

import operator
from typing import Any

import torch

from slapo.graph.trace.trees import SYMBOLIC, Part, parts


def flattened(value: Any, flat: list[Any]) -> Any:
    """The structure of a value as nested tuples; its tensors and sizes are appended to `flat`."""
    if isinstance(value, (torch.Tensor, *SYMBOLIC)):
        flat.append(value)
        return ("tensor", len(flat) - 1)
    if isinstance(value, torch.Size):
        return ("size", torch.Size, tuple(flattened(size, flat) for size in value))
    elements = parts(value)
    if elements is None:
        return ("value", value)
    is_record = bool(elements) and elements[0].access is getattr
    if is_record and isinstance(value, dict):  # outputs of Transformers leave out what is None
        elements = [part for part in elements if part.value is not None]
    items = tuple(flattened(part.value, flat) for part in elements)
    names = tuple(part.key for part in elements)
    kind = type(value)
    if kind in (tuple, list, dict):
        return (kind.__name__, kind, items, names)
    return ("fields" if is_record or isinstance(value, dict) else "other", kind, items, names)


def access_paths(value: Any) -> list[tuple[Any, ...]]:
    """How to reach each tensor and size in a value, in the order of :func:`flattened`."""
    if isinstance(value, (torch.Tensor, *SYMBOLIC)):
        return [()]
    if isinstance(value, torch.Size):
        elements: Any = [Part(operator.getitem, i, size) for i, size in enumerate(value)]
    else:
        elements = parts(value) or ()
    return [
        ((part.access, part.key), *rest) for part in elements for rest in access_paths(part.value)
    ]


def put_together(structure: Any, flat: Any) -> Any:
    """A value of this structure with the tensors of `flat`; dynamo follows this code."""
    tag, content = structure[0], structure[1]
    if tag == "tensor":
        return flat[content]
    if tag == "value":
        return content
    items = [put_together(inner, flat) for inner in structure[2]]
    if tag == "size":
        return torch.Size(items)
    if tag == "tuple":
        return tuple(items)
    if tag == "list":
        return items
    if tag == "dict":
        return dict(zip(structure[3], items))  # noqa: B905  (dynamo knows no strict=)
    if tag == "fields":
        return content(**dict(zip(structure[3], items)))  # noqa: B905
    return content(*items)
