"""Functions and classes by the path that imports them, and what has no such path."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from slapo.errors import SlapoError
from slapo.history import describe
from slapo.node import Node
from slapo.record.kept import Decode, Part, revive

_NAMED = "a function at the top level of a module that can be imported"


@dataclass(frozen=True)
class Unnamed(Part):
    """An argument that no file can hold: its text, and what to pass in its place."""

    shown: str
    why: str

    @property
    def text(self) -> str:
        """As the call showed it."""
        return self.shown

    def problem(self) -> str:
        """What it is, and what to do."""
        return self.why


@dataclass(frozen=True)
class Named(Part):
    """A function or a class that can be imported."""

    tag = "import"
    module: str
    qualname: str

    @property
    def text(self) -> str:
        """The name without what it lies in."""
        return self.qualname.rpartition(".")[2]

    def encode(self) -> Any:
        """``module:qualname``."""
        return f"{self.module}:{self.qualname}"

    @classmethod
    def decode(cls, data: Any, decode: Decode) -> Named:
        """Take the two apart."""
        module, _, qualname = data.partition(":")
        return cls(module, qualname)

    def revive(self, node: Node | None = None) -> Any:
        """Import it.

        Raises
        ------
        SlapoError
            If it is not there.
        """
        try:
            return look_up(importlib.import_module(self.module), self.qualname)
        except (ImportError, AttributeError) as error:
            raise SlapoError(
                f"{self.encode()} cannot be imported: {error}; put it back there, or write its new "
                "place into the record"
            ) from error


@dataclass(frozen=True)
class Partial(Part):
    """A ``functools.partial``."""

    tag = "partial"
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def text(self) -> str:
        """The name of its class."""
        return "partial"

    def revive(self, node: Node) -> Any:
        """Bind anew."""
        args, kwargs = revive(self.args, node), revive(self.kwargs, node)
        return functools.partial(revive(self.function, node), *args, **kwargs)


@dataclass(frozen=True)
class MadeBy(Part):
    """A module that a function makes for its place, as for ``select(...).replace(make)``."""

    tag = "made_by"
    function: Any
    shown: str

    @property
    def text(self) -> str:
        """The module's class."""
        return self.shown

    def revive(self, node: Node) -> Any:
        """Have it made for what stands there now."""
        return revive(self.function, node)(node.path, node.mod)


def look_up(module: Any, qualname: str) -> Any:
    """What a dotted name stands for in a module.

    Raises
    ------
    AttributeError
        If it is not there.
    """
    return functools.reduce(getattr, qualname.split("."), module)


def import_path(value: Any) -> Named | None:
    """Where `value` can be imported from; None if nowhere."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(name, str) or "<" in name:
        return None
    places = [(getattr(value, "__module__", None), name)]
    # Torch's own functions call themselves by names within the extension.
    last = name.rpartition(".")[2]
    places += [("torch", last), ("torch", f"Tensor.{last}"), ("torch.nn.functional", last)]
    for place, qualname in places:
        module = sys.modules.get(place) if isinstance(place, str) else None
        try:
            found = look_up(module, qualname)
        except AttributeError:
            continue
        if found is value or _is_class_method(value, found):
            return Named(module.__name__, qualname)  # type: ignore[union-attr]
    return None


def _is_class_method(value: Any, found: Any) -> bool:
    """A class method, of which each look-up makes another object."""
    return isinstance(value, MethodType) and isinstance(value.__self__, type) and value == found


def keep_callable(value: Any, keep: Callable[[Any], Any]) -> Part:
    """A function, a class or a partial by its import path."""
    if isinstance(value, functools.partial):
        return Partial(keep(value.func), keep(value.args), keep(value.keywords))
    return import_path(value) or Unnamed(describe(value), _why_unnamed(value))


def _why_unnamed(value: Any) -> str:
    name = str(getattr(value, "__qualname__", ""))
    if "<lambda>" in name:
        return f"a lambda, which has no name to find it by; pass {_NAMED}"
    if "<locals>" in name:
        return f"defined within a function, where nobody else finds it; pass {_NAMED}"
    if isinstance(value, MethodType):
        owner = type(value.__self__).__name__
        return f"a method of a {owner} that your program holds; pass {_NAMED}"
    if name:
        where = f"{value.__module__}:{name}"
        return f"not what can be imported as {where}; pass {_NAMED}"
    return f"an object of {type(value).__qualname__}; pass {_NAMED}, or a functools.partial of one"
