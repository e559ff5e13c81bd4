"""What lies in containers and configurations, to be compared with what a graph has built in."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
from torch import nn

PLAIN = (bool, int, float, str)
#: Values that are what they are, besides numbers and strings.
FIXED = (torch.dtype, torch.device, Enum, FunctionType, BuiltinFunctionType, type)
_CONTAINERS = (dict, list, tuple, set, frozenset)
#: A graph holds no caches, whatever the configuration says.
_WITHOUT_EFFECT = frozenset({"use_cache"})
#: Containers within containers, and configurations within configurations.
_DEEPEST = 4
#: Of larger dictionaries only the keys that code has in words are compared.
_MOST_ENTRIES = 64


class Known(Enum):
    """What is known of an attribute that has no value to compare."""

    ABSENT = "missing"
    TENSOR = "a parameter or buffer"

    def __repr__(self) -> str:
        return self.value


ABSENT = Known.ABSENT


@dataclass(frozen=True)
class Entries:
    """How many entries a container has."""

    number: int

    def __repr__(self) -> str:
        return f"{self.number} entries"


@dataclass(frozen=True)
class Contents:
    """Plain values in a dictionary, list or configuration, and in what it holds.

    Parameters
    ----------
    items
        Key, or name of an attribute, and value or contents.
    size
        The number of entries; None for what is no container.
    """

    items: tuple[tuple[Any, Any], ...]
    size: int | None = None

    def changed(self, holder: Any) -> tuple[str, Any, Any] | None:
        """Where in a holder something differs, what it was and what it is now."""
        inside = _inside(holder)
        for key, traced in self.items:
            now = _entry(holder, inside, key)
            if now is traced:
                continue
            if type(traced) is Contents:
                deeper = traced.changed(now)
                if deeper is not None:
                    return _place(holder, key) + deeper[0], *deeper[1:]
            elif type(now) is not type(traced) or now != traced:
                return _place(holder, key), traced, now
        if self.size is not None and len(inside) != self.size:
            return "", Entries(self.size), Entries(len(inside))
        return None


def contents_of(holder: Any, names: Set[str], depth: int = 1) -> Contents | None:
    """What of a holder code may read that has these names in it; None where that is nothing."""
    if isinstance(holder, (torch.Tensor, nn.Module)):
        return None
    inside = _inside(holder)
    is_container = isinstance(holder, _CONTAINERS)
    reads_all = is_container and len(inside) <= _MOST_ENTRIES
    items = []
    for key, value in inside.items():
        if key in _WITHOUT_EFFECT or not (reads_all or key in names or type(key) is int):
            continue
        if value is None or type(value) in PLAIN or isinstance(value, FIXED):
            items.append((key, value))
        elif depth < _DEEPEST:
            deeper = contents_of(value, names, depth + 1)
            if deeper is not None:
                items.append((key, deeper))
    items += [] if is_container else _looked_up(holder, names - inside.keys())
    if not items and not is_container:
        return None
    return Contents(tuple(items), len(inside) if is_container else None)


def _inside(holder: Any) -> Mapping[Any, Any]:
    """The entries of a container, the attributes of anything else.

    By its type: ``isinstance`` asks the object as well, and configurations of Transformers look
    every attribute up in Python.
    """
    kind = type(holder)
    if issubclass(kind, dict):
        return cast("Mapping[Any, Any]", holder)
    if issubclass(kind, (list, tuple)):
        return dict(enumerate(holder))
    if issubclass(kind, (set, frozenset)):
        return dict.fromkeys(holder, True)
    try:
        state: Mapping[Any, Any] = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return state


def _entry(holder: Any, inside: Mapping[Any, Any], key: Any) -> Any:
    """What stands under a key, or what an object computes for the name of an attribute."""
    if key in inside:
        return inside[key]
    if issubclass(type(holder), _CONTAINERS) or type(key) is not str:
        return ABSENT
    try:
        return getattr(holder, key, ABSENT)
    except Exception:  # it is code of others that runs here
        return ABSENT


def _looked_up(holder: Any, names: Set[str]) -> list[tuple[str, Any]]:
    """Plain values that an object does not hold under their names.

    Such as defaults of its class, properties, slots, and what configurations of Transformers know
    under another name.
    """
    aliases = _entry(holder, {}, "attribute_map")
    known = {*dir(type(holder)), *(aliases if isinstance(aliases, dict) else ())}
    found = []
    for name in sorted((names & known) - _WITHOUT_EFFECT):
        with warnings.catch_warnings(record=True) as told:
            value = _entry(holder, {}, name)
        if not told and (value is None or type(value) in PLAIN):
            found.append((name, value))
    return found


def _place(holder: Any, key: Any) -> str:
    return f"[{key!r}]" if isinstance(holder, _CONTAINERS) else f".{key}"
