"""Records of applied primitives: path, arguments and the calling line."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Kept:
    """Stand-in for an argument that a record must not keep alive.

    Its kinds, and their treatment, are in :mod:`slapo.record`.
    """

    @property
    def text(self) -> str:
        """Text of the argument in messages and digests."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Record:
    """One applied primitive, as data.

    Parameters
    ----------
    path
        Path of the schedule node; empty for the root.
    primitive
        Name of the primitive.
    given
        Argument name -> value, without defaults. Values that may change later or must not be kept
        alive are replaced by :func:`slapo.record.keep`.
    location
        ``file:line`` of the caller.
    positional
        Number of arguments that the caller passed by position.
    identity
        Identity of modules and functions among the arguments, beyond their names: see `identify`.
    """

    path: str
    primitive: str
    given: Mapping[str, Any]
    location: str
    positional: int = 0
    identity: str = ""

    @functools.cached_property
    def arguments(self) -> Mapping[str, str]:
        """Argument name -> text of its value, without defaults."""
        return {name: describe(value) for name, value in self.given.items()}

    def __str__(self) -> str:
        return f"{self.call()}  # {self.location}"

    __repr__ = __str__

    def call(self) -> str:
        """The record as the line of Python that applies it."""
        arguments = ", ".join(f"{k}={v}" for k, v in self.arguments.items())
        return f"{spelled(self.path)}.{self.primitive}({arguments})"

    def as_written(self) -> str:
        """The primitive and its arguments as the caller wrote them, without the path."""
        items = enumerate(self.arguments.items())
        shown = [text if k < self.positional else f"{name}={text}" for k, (name, text) in items]
        return f"{self.primitive}({', '.join(shown)})"


def spelled(path: str) -> str:
    """Source text of a node, such as ``sch["0"]``."""
    return f'sch["{path}"]' if path else "sch"


def contains(path: str, inner: str) -> bool:
    """Return whether the module at `path` is the one at `inner`, or contains it."""
    return not path or inner == path or inner.startswith(f"{path}.")


def numberless(path: str) -> str:
    """Replace layer indices in a path by ``*``, so that equal modules of all layers match."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def applied_at(records: Sequence[Record], paths: Collection[str]) -> list[Record]:
    """Records of some modules and of their descendants, or else of their ancestors."""
    below = [r for r in records if any(contains(path, r.path) for path in paths)]
    return below or [r for r in records if any(contains(r.path, path) for path in paths)]


def listed(records: Sequence[Record]) -> str:
    """The first few records, as the end of a message."""
    return "primitives applied there:\n  " + "\n  ".join(map(str, records[:8]))


def digest(records: Iterable[Record]) -> str:
    """Return a fingerprint of some records; equal on ranks that applied the same primitives."""
    # Without the caller's line: a replay or another script may apply the same schedule.
    text = "\n".join(f"{record.call()} {record.identity}" for record in records)
    return hashlib.sha256(text.encode()).hexdigest()


def caller_location() -> str:
    """``file:line`` of the nearest frame outside this package."""
    frame = _caller_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn_caller(message: str) -> None:
    """Warn at the line that called into this package, at any depth."""
    frame = _caller_frame()
    # With the caller's registry, a filter such as "once per line" counts the caller's lines.
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    where = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))
    warnings.warn_explicit(message, UserWarning, *where, registry=registry)


def _caller_frame() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def describe(value: Any) -> str:
    """Short text of an argument, the same on every rank."""
    if isinstance(value, Kept):
        return value.text
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"Tensor{tuple(value.shape)}"
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _describe_sequence(value)
    if isinstance(value, (set, frozenset)):  # set order differs between processes
        return "{" + ", ".join(sorted(map(describe, value))) + "}"
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    text = repr(value)
    return text if " at 0x" not in text else type(value).__name__


def identify(value: Any) -> str:
    """Identity of an argument: class and configuration of a module, code of a function.

    It is the same on every rank that passes the same value, and empty for plain values.
    """
    parts: list[str] = []
    _add_identity(value, parts)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""


_PLAIN = (str, bool, int, float, type(None))


def _is_plain(item: Any) -> bool:
    """Return whether an item is a keyword with a plain value."""
    return isinstance(item, tuple) and all(isinstance(part, _PLAIN) for part in item)


def _add_identity(value: Any, parts: list[str]) -> None:
    if isinstance(value, _PLAIN):
        return
    if isinstance(value, functools.partial):
        given = [*value.args, *value.keywords.items()]
        parts.append(repr([each for each in given if isinstance(each, _PLAIN) or _is_plain(each)]))
        value = [value.func, value.args, value.keywords]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, nn.Module):
        for name, module in value.named_modules():
            kind = type(module)
            shown = "" if isinstance(module, fx.GraphModule) else module.extra_repr()
            parts.append(f"{name}: {kind.__module__}.{kind.__qualname__}({shown})")
    elif isinstance(value, (FunctionType, MethodType)):
        code = value.__code__
        # By bytecode, so that functions of one name differ: ids and addresses are not equal in two
        # processes.
        parts.append(f"{value.__module__}.{value.__qualname__} {code.co_code.hex()}")
        # Leave out code objects, whose text contains an address.
        plain = ", ".join(_shown(c) for c in code.co_consts if not isinstance(c, CodeType))
        parts.append(f"[{plain}] {code.co_names} {_shown(value.__defaults__)}")
    elif isinstance(value, Sequence):
        origin = getattr(value, "origin", None)  # a match is identified by the search that found it
        if origin is not None:
            _add_identity(origin.pattern, parts)
            return
        for item in value:
            _add_identity(item, parts)


def _shown(value: Any) -> str:
    """Text of a constant or of default values, the same in every process."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))}{',' * (len(value) == 1)})"
    if isinstance(value, (set, frozenset)):  # ``x in {"a", "b"}`` has a set as a constant
        return "{" + ", ".join(sorted(map(_shown, value))) + "}"
    text = repr(value)
    # The repr of an object, such as a process group, may have its address.
    return text if " at 0x" not in text else type(value).__name__


def _describe_sequence(value: Sequence[Any]) -> str:
    if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], fx.Node):
        return describe(value[1])  # (parent path, node): the node suffices
    items = [describe(v) for v in value[:8]] + (["..."] if len(value) > 8 else [])
    inner = ", ".join(items)
    return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
