"""Arguments in a record: plain values, containers of these, and stand-ins.

A stand-in (:class:`Part`) replaces an argument that may change, that would be kept alive, or that
no file can hold. Examples are the import path of a function and the constructor arguments of a
module. It converts to JSON and back, and in a replay to the argument again.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.history import Kept, describe
from slapo.node import Node

#: Types of values that a record holds unchanged.
PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)

#: Tag -> class of the stand-ins that a file can hold.
_PARTS: dict[str, type[Part]] = {}


class Part(Kept):
    """A stand-in for an argument; a dataclass whose fields form a list in JSON."""

    #: The key of its object in JSON; empty if no file can hold it.
    tag = ""

    def __init_subclass__(cls) -> None:
        if cls.tag:
            _PARTS[cls.tag] = cls

    def inner(self) -> Iterable[Any]:
        """Return its encoded fields."""
        return [getattr(self, each.name) for each in dataclasses.fields(self)]  # type: ignore[arg-type]

    def encode(self) -> Any:
        """Return the value of its object in JSON."""
        return [encode(each) for each in self.inner()]

    @classmethod
    def decode(cls, data: Any) -> Part:
        """Rebuild a part from the output of :meth:`encode`."""
        return cls(*map(decode, data))

    def revive(self, node: Node) -> Any:
        """Return the argument, for a call on `node`."""
        raise NotImplementedError

    def problem(self) -> str:
        """Return why a file cannot hold it, with the fix, or ``""``."""
        return ""


def map_inner(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to the items of a container; return other values unchanged."""
    if isinstance(value, Mapping):
        return {function(key): function(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*map(function, (value.start, value.stop, value.step)))
    for kind in (tuple, list, set, frozenset):
        if isinstance(value, kind):
            return kind(map(function, value))
    return value


def walk(value: Any) -> Iterator[Any]:
    """Yield an encoded value and everything in it."""
    yield value
    inner: list[Any] = list(value.inner()) if isinstance(value, Part) else []
    map_inner(value, inner.append)
    for each in inner:
        yield from walk(each)


def revive(value: Any, node: Node) -> Any:
    """Return the argument of an encoded value, in new containers."""
    if isinstance(value, Part):
        return value.revive(node)
    return map_inner(value, lambda each: revive(each, node))


def encode(value: Any) -> Any:
    """Convert an encoded value to JSON; every object there has one key, its type."""
    if isinstance(value, Part):
        return {value.tag: value.encode()}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return _encode_dict(value)
    # JSON has lists only, and pads or shapes of a primitive may have to be tuples.
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, (set, frozenset)):  # the same order in every process
        return {type(value).__name__: sorted((encode(item) for item in value), key=repr)}
    if isinstance(value, slice):
        return {"slice": [encode(part) for part in (value.start, value.stop, value.step)]}
    return _encode_plain(value)


def _encode_dict(value: dict[Any, Any]) -> Any:
    if all(type(key) is str for key in value):
        return {"dict": {key: encode(item) for key, item in value.items()}}
    return {"items": [[encode(key), encode(item)] for key, item in value.items()]}


def _encode_plain(value: Any) -> Any:
    # JSON has no infinity or NaN.
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, _OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return {"ellipsis": []} if value is ... else value


def decode(data: Any) -> Any:
    """Decode the output of :func:`encode`."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    try:
        ((tag, inner),) = data.items()
        return _PARTS[tag].decode(inner) if tag in _PARTS else _PLAIN[tag](inner)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{data!r} is not an argument of a record ({error})") from error


def _of_torch(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, _OF_TORCH):
        raise ValueError(f"torch.{name} is not a dtype, layout or memory format")
    return found


#: Tag of any other object in JSON -> function that decodes its value.
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(map(decode, items)),
    "set": lambda items: set(map(decode, items)),
    "frozenset": lambda items: frozenset(map(decode, items)),
    "dict": lambda items: {key: decode(item) for key, item in items.items()},
    "items": lambda items: {decode(key): decode(item) for key, item in items},
    "slice": lambda parts: slice(*map(decode, parts)),
    "complex": lambda parts: complex(*map(decode, parts)),
    "float": float,
    "torch": _of_torch,
    "device": torch.device,
    "ellipsis": lambda _: ...,
}


# --- functions and classes ------------------------------------------------------------------------
_NAMED = "a top-level function of an importable module"


@dataclass(frozen=True)
class Unnamed(Part):
    """An argument that no file can hold: its text, and what to pass instead."""

    shown: str
    why: str

    @property
    def text(self) -> str:
        return self.shown

    def problem(self) -> str:
        return self.why


@dataclass(frozen=True)
class Named(Part):
    """A function or a class that can be imported."""

    tag = "import"
    module: str
    qualname: str
    #: True if the name comes from a file; see :func:`check_value`
    is_read: bool = field(default=False, compare=False)

    @property
    def text(self) -> str:
        return self.qualname.rpartition(".")[2]

    def encode(self) -> Any:
        return f"{self.module}:{self.qualname}"

    @classmethod
    def decode(cls, data: Any) -> Named:
        module, _, qualname = data.partition(":")
        return cls(module, qualname, is_read=True)

    def inner(self) -> Iterable[Any]:
        return ()

    def revive(self, node: Node | None = None) -> Any:
        try:
            return look_up(importlib.import_module(self.module), self.qualname)
        except (ImportError, AttributeError) as error:
            raise SlapoError(
                f"{self.encode()} cannot be imported: {error}; restore it, or write its new "
                "location into the record"
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
        return "partial"

    def revive(self, node: Node) -> Any:
        args, kwargs = revive(self.args, node), revive(self.kwargs, node)
        return functools.partial(revive(self.function, node), *args, **kwargs)


@dataclass(frozen=True)
class MadeBy(Part):
    """A module made by a function, as for ``select(...).replace(make)``."""

    tag = "made_by"
    function: Any
    shown: str

    @property
    def text(self) -> str:
        return self.shown

    def revive(self, node: Node) -> Any:
        return revive(self.function, node)(node.path, node.mod)


def look_up(module: Any, qualname: str) -> Any:
    """Return the value of a dotted name in a module."""
    return functools.reduce(getattr, qualname.split("."), module)


#: Packages that names in a file may always refer to, and their modules with purely computing
#: functions. Other modules load files, download, or start programs.
TRUSTED = {
    "torch": r"torch|torch\.(functional|nn\.functional|nn\.init|_C\._\w+)",
    "slapo": r"slapo\.(op|sharding|pattern|model_schedule)\b.*",
    "transformers": r"transformers\.(activations|pytorch_utils|models\.\w+\.modeling_\w+)",
}


def check_package(named: Named, allow: Collection[str]) -> None:
    """Refuse a name from a file outside the trusted packages, without importing it."""
    package = named.module.partition(".")[0]
    if named.is_read and package not in TRUSTED and package not in allow:
        raise SlapoError(
            f"{named.encode()} is in the package {package!r}, but a record from a file may only "
            f"name {', '.join(TRUSTED)}; if you trust it, pass allow=[{package!r}]"
        )


def check_value(named: Named, allow: Collection[str]) -> None:
    """Import a name; refuse a name from a file whose value may do harm when called."""
    value = named.revive()
    if not named.is_read:
        return
    owner = value if hasattr(value, "__module__") else getattr(value, "__objclass__", None)
    # Where the value was defined, and not the name in the file: trusted modules also hold imports
    # of ``os`` and others.
    home = str(getattr(owner, "__module__", None))
    root = home.partition(".")[0]
    if root not in allow:
        is_plain = isinstance(value, (FunctionType, BuiltinFunctionType, MethodDescriptorType))
        fits = is_plain and re.fullmatch(TRUSTED.get(root, ""), home)
        is_method = isinstance(value, MethodDescriptorType) and home == "torch._C"
        is_module = isinstance(value, type) and issubclass(value, nn.Module) and root in TRUSTED
        if not (fits or is_method or is_module):
            raise SlapoError(
                f"{named.encode()} is a {type(value).__name__} of {home}; a record from a file may "
                "only name module classes and tensor functions there"
            )


def import_path(value: Any) -> Named | None:
    """Return the path that `value` can be imported from, or None."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(name, str) or "<" in name:
        return None
    places = [(getattr(value, "__module__", None), name)]
    # Torch's own functions have names within the extension.
    last = name.rpartition(".")[2]
    places += [("torch", last), ("torch", f"Tensor.{last}"), ("torch.nn.functional", last)]
    # Only a name that leads back to this very object is written: a replay must not call another
    # one.
    for place, qualname in places:
        # Only imported modules are searched: keeping an argument must import nothing.
        module = sys.modules.get(place) if isinstance(place, str) else None
        try:
            found = look_up(module, qualname)
        except AttributeError:
            continue
        if found is value or _is_class_method(value, found):
            return Named(module.__name__, qualname)  # type: ignore[union-attr]
    return None


def _is_class_method(value: Any, found: Any) -> bool:
    """Return whether both are one class method, which each look-up wraps in a new object."""
    return isinstance(value, MethodType) and isinstance(value.__self__, type) and value == found


def keep_callable(value: Any, keep: Callable[[Any], Any]) -> Part:
    """Encode a function, a class or a partial by its import path."""
    if isinstance(value, functools.partial):
        return Partial(keep(value.func), keep(value.args), keep(value.keywords))
    return import_path(value) or Unnamed(describe(value), _why_unnamed(value))


def _why_unnamed(value: Any) -> str:
    name = str(getattr(value, "__qualname__", ""))
    if "<lambda>" in name:
        return f"a lambda, which cannot be found by name; pass {_NAMED}"
    if "<locals>" in name:
        return f"defined inside a function, where it cannot be imported; pass {_NAMED}"
    if isinstance(value, MethodType):
        owner = type(value.__self__).__name__
        return f"a method of a {owner} object of your program; pass {_NAMED}"
    if name:
        where = f"{value.__module__}:{name}"
        return f"not the object that is imported as {where}; pass {_NAMED}"
    return f"an object of {type(value).__qualname__}; pass {_NAMED}, or a functools.partial of one"


# --- small tensors --------------------------------------------------------------------------------
#: Maximum number of tensor elements in a record, so that its file stays readable.
MOST = 16_384


@dataclass(frozen=True, eq=False)
class Values(Part):
    """A private copy of a tensor."""

    tag = "tensor"
    tensor: Tensor
    #: device type; the index differs between ranks
    device: str

    @property
    def text(self) -> str:
        return describe(self.tensor)

    def encode(self) -> Any:
        """Return shape, dtype, device type, and the values as one list (None on meta)."""
        tensor = self.tensor
        values = None if tensor.is_meta else encode(tensor.flatten().tolist())
        return [list(tensor.shape), encode(tensor.dtype), self.device, values]

    @classmethod
    def decode(cls, data: Any) -> Values:
        """Rebuild the tensor, on CPU until it is needed."""
        shape, dtype, device, values = data
        dtype = decode(dtype)
        if values is None:
            return cls(torch.empty(shape, dtype=dtype, device="meta"), device)
        return cls(torch.tensor(decode(values), dtype=dtype).reshape(shape), device)

    def revive(self, node: Node) -> Tensor:
        """Return a copy, which the primitive may change."""
        # Not to the recorded index, as each rank has its own device.
        return self.tensor.clone().to(self.device)


def keep_tensor(value: Tensor) -> Part:
    """Encode a small plain tensor by its values."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_complex():
        why = f"a {type(value).__name__}, which has no text form; pass a plain tensor"
        return Unnamed(describe(value), why)
    if value.numel() > MOST:
        why = f"a tensor of {value.numel()} elements, over the limit {MOST}; pass a smaller one"
        return Unnamed(describe(value), why)
    return Values(value.detach().clone(), value.device.type)
