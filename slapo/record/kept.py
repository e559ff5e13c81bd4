"""Arguments as a record keeps them: plain values, containers of these, and stand-ins.

A stand-in (:class:`Part`) is what is left of an argument that may change, that would be kept alive,
or that no file can hold: the import path of a function, the recipe of a module. It turns into JSON
and back, and in a replay into the argument again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from slapo.history import Kept
from slapo.node import Node

#: Values that are what they are, and that a record may hold.
PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)

#: Turns JSON back; see :func:`slapo.record.keep.decode`.
Decode = Callable[[Any], Any]


class Part(Kept):
    """A stand-in for an argument: made of the fields of a dataclass, in JSON a list of them."""

    #: The key of its object in JSON.
    tag = ""

    def inner(self) -> Iterable[Any]:
        """What it is made of, as the record keeps it."""
        return [getattr(self, each.name) for each in dataclasses.fields(self)]  # type: ignore[arg-type]

    def encode(self) -> Any:
        """The value of its object in JSON."""
        return [encode(each) for each in self.inner()]

    @classmethod
    def decode(cls, data: Any, decode: Decode) -> Part:
        """Read what :meth:`encode` wrote."""
        return cls(*map(decode, data))

    def revive(self, node: Node) -> Any:
        """The argument, for a call on `node`."""
        raise NotImplementedError

    def problem(self) -> str:
        """Why a file cannot hold it, and what to do; empty where it can."""
        return ""


def walk(value: Any) -> Iterator[Any]:
    """A kept value and all that is in it."""
    yield value
    inner: Iterable[Any] = ()
    if isinstance(value, Part):
        inner = value.inner()
    elif isinstance(value, Mapping):
        inner = (*value.keys(), *value.values())
    elif isinstance(value, slice):
        inner = (value.start, value.stop, value.step)
    elif isinstance(value, (tuple, list, set, frozenset)):
        inner = value
    for each in inner:
        yield from walk(each)


def encode(value: Any) -> Any:
    """A kept value as JSON; every object there has one key, which says what it is."""
    if isinstance(value, Part):
        return {value.tag: value.encode()}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return _encode_dict(value)
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, (set, frozenset)):  # in the same order in every process
        return {type(value).__name__: sorted((encode(item) for item in value), key=repr)}
    if isinstance(value, slice):
        return {"slice": [encode(part) for part in (value.start, value.stop, value.step)]}
    return _encode_plain(value)


def _encode_dict(value: dict[Any, Any]) -> Any:
    if all(type(key) is str for key in value):
        return {"dict": {key: encode(item) for key, item in value.items()}}
    return {"items": [[encode(key), encode(item)] for key, item in value.items()]}


def _encode_plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, _OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return {"ellipsis": []} if value is ... else value


def decode_plain(tag: str, data: Any, decode: Decode) -> Any:
    """What an object in JSON stands for, which is no stand-in.

    Raises
    ------
    KeyError
        If nothing has that tag.
    """
    readers: dict[str, Callable[[Any], Any]] = {
        "tuple": lambda items: tuple(map(decode, items)),
        "set": lambda items: set(map(decode, items)),
        "frozenset": lambda items: frozenset(map(decode, items)),
        "dict": lambda items: {key: decode(item) for key, item in items.items()},
        "items": lambda items: {decode(key): decode(item) for key, item in items},
        "slice": lambda parts: slice(*map(decode, parts)),
        "complex": lambda parts: complex(*map(decode, parts)),
        "float": float,
        "torch": lambda name: getattr(torch, name),
        "device": torch.device,
        "ellipsis": lambda _: ...,
    }
    return readers[tag](data)


def revive(value: Any, node: Node) -> Any:
    """The argument that a kept value stands for, in containers of its own."""
    if isinstance(value, Part):
        return value.revive(node)
    if isinstance(value, dict):
        return {revive(key, node): revive(item, node) for key, item in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(revive(item, node) for item in value)
    if isinstance(value, slice):
        return slice(*(revive(part, node) for part in (value.start, value.stop, value.step)))
    return value
