"""Leaves of nested model outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def constants_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the Python scalars and strings in an output, each with a readable path."""
    leaves = _leaves(value, "output")
    return ((path, leaf) for path, leaf in leaves if isinstance(leaf, (bool, int, float, str)))


def tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an output with a readable path; skip opaque objects such as caches."""
    return ((path, leaf) for path, leaf in _leaves(value, "output") if isinstance(leaf, Tensor))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _leaves(getattr(value, item.name), f"{path}.{item.name}")
    else:
        yield path, value
