"""Nested Python values, such as call arguments: their elements, copies and keys."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Key in ``node.meta`` for the kind of a node's value; see :func:`kind_of`.
KIND = "slapo_kind"

#: Key in ``node.meta`` for the dimensions of a tensor that have one element for any input.
ONES = "slapo_ones"

#: Key in ``node.meta`` for the path of the module whose forward makes the call.
OWNER = "slapo_owner"

#: Symbolic values: sizes, and results of Python arithmetic on them.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_PLAIN = (bool, int, float, str)
_HASHABLE = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


class Part(NamedTuple):
    """One element of a container, reached by ``access(container, key)``."""

    access: Callable[..., Any]
    key: Any
    value: Any


def parts(value: Any) -> list[Part] | None:
    """Return the elements of a tuple, list, mapping or dataclass; None for anything else.

    Transformers' model outputs are dataclasses that omit fields that are None.

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
    """Return ``"tensor"``, ``"container"``, or ``"value"`` for anything else, such as a shape."""
    if isinstance(value, Tensor):
        return "tensor"
    return "value" if parts(value) is None else "container"


def ones_of(value: Any) -> tuple[bool, ...]:
    """Return for each dimension of a tensor whether its size is the constant 1."""
    return tuple([type(size) is int and size == 1 for size in getattr(value, "shape", ())])


def rebuild(value: Any, items: list[Any]) -> Any:
    """Make a container like `value` from `items`, in the order of :func:`parts`."""
    kind: Any = type(value)
    if dataclasses.is_dataclass(value):
        names = [part.key for part in parts(value) or ()]
        return kind(**dict(zip(names, items, strict=True)))
    if isinstance(value, Mapping):
        return kind(zip(value.keys(), items, strict=True))
    return kind(*items) if hasattr(value, "_fields") else kind(items)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to everything in `value` that is not a container."""
    elements = parts(value)
    if elements is None:
        return function(value)
    return rebuild(value, [map_leaves(part.value, function) for part in elements])


def leaves(value: Any) -> Iterator[Any]:
    """Yield everything in `value` that is not a container, in order."""
    elements = parts(value)
    if elements is None:
        yield value
    for part in elements or ():
        yield from leaves(part.value)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in `value`, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


# --- forms that dynamo's graphs can hold ---------------------------------------------------------
def flatten(value: Any, flat: list[Any]) -> tuple[Any, ...]:
    """Return a value's structure as nested tuples; append its tensors and sizes to `flat`."""
    if isinstance(value, (Tensor, *SYMBOLIC)):
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
    """Return the steps to each tensor and size in a value, in the order of :func:`flatten`."""
    if isinstance(value, (Tensor, *SYMBOLIC)):
        return [()]
    elements = parts(value) or ()
    if isinstance(value, torch.Size):
        elements = [Part(operator.getitem, i, size) for i, size in enumerate(value)]
    return [((p.access, p.key), *rest) for p in elements for rest in accesses(p.value)]


def assemble(structure: Any, flat: Any) -> Any:
    """Build a value of this structure from `flat`; dynamo interprets this function."""
    tag, content = structure[0], structure[1]
    if tag == "leaf":
        return flat[content]
    if tag == "value":
        return content
    items = [assemble(inner, flat) for inner in structure[2]]
    # Dynamo cannot guard a type that comes from a constant, so these four are written out.
    if tag == "tuple":
        return tuple(items)
    if tag == "list":
        return items
    if tag == "size":
        return torch.Size(items)
    if tag == "dict":
        return dict(zip(structure[3], items))  # noqa: B905  (dynamo does not support strict=)
    if tag == "fields":
        return content(**dict(zip(structure[3], items)))  # noqa: B905
    return content(*items) if tag == "record" else content(items)


# --- keys of calls -------------------------------------------------------------------------------
class _Same:
    """Wrapper that equals itself only; it keeps the object alive, so its id is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def call_key(
    args: tuple[Any, ...], kwargs: dict[str, Any], within_compile: bool = False
) -> tuple[Any, ...]:
    """Return everything that Python can read from a call's arguments, except sizes above 1.

    The key is exact on purpose: a call with another key is captured again, never refused. An outer
    ``torch.compile`` guards on autocast itself.

    >>> x, y = torch.ones(3, 5), torch.ones(2, 7)
    >>> call_key((x,), {}) == call_key((y,), {}), call_key((x,), {}) == call_key((), {"input": x})
    (True, False)
    """
    seen: list[Tensor] = []
    exact = not within_compile
    key = (_key(args, seen, exact), _key(kwargs, seen, exact), torch.is_grad_enabled())
    if within_compile:
        return key
    return (*key, torch.is_inference_mode_enabled(), _autocast(), collected_keys())


def _autocast() -> tuple[Any, ...]:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple([torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in devices])


def collected_keys() -> tuple[str, ...]:
    """Return the outputs that a Transformers model collects by hooks in the current call."""
    home = sys.modules.get("transformers.utils.output_capturing")
    active = home._active_collector.get() if home is not None else None
    return tuple(active) if active else ()


def _key(value: Any, seen: list[Tensor], exact: bool) -> Any:
    if isinstance(value, Tensor):
        # Dynamo makes one input of a tensor that is passed twice, so its graph is wrong for two
        # tensors.
        alias = next((k for k, other in enumerate(seen) if other is value), len(seen))
        seen.append(value)
        small = tuple([s if s < 2 else 2 for s in value.shape])  # 0 and 1 are special cases
        return (small, value.dtype, value.device, value.requires_grad, alias)
    if value is None:
        return None
    kind = type(value)
    if kind in _PLAIN:
        return (kind, value) if exact else value
    elements = parts(value)
    if elements is not None:
        return (kind, *[(key, _key(item, seen, exact)) for _, key, item in elements])
    if isinstance(value, _HASHABLE) or not exact:
        return value
    return _Same(value)


def size_check(conditions: Iterable[str]) -> Callable[[Any, Any], bool]:
    """Return a function of ``(args, kwargs)`` that checks all conditions."""
    text = " and ".join(f"({condition})" for condition in conditions) or "True"
    check: Callable[[Any, Any], bool] = eval(  # written by torch's shape engine
        f"lambda args, kwargs: {text}", {"math": math, "torch": torch}
    )
    return check
