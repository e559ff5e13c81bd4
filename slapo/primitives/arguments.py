"""Arguments of primitives, declared by the annotations of ``apply`` and checked in one place.

``Annotated[int, "an axis of the tensor"]`` adds what to pass to the message.
"""

from __future__ import annotations

import collections.abc
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from slapo.errors import with_nearest
from slapo.history import describe

_WORDS = {
    int: "an integer",
    bool: "True or False",
    str: "a string",
    type: "a class",
    collections.abc.Callable: "a function",
    collections.abc.Mapping: "a dict",
    collections.abc.Sequence: "a sequence",
    collections.abc.Collection: "a sequence",
    nn.Module: "a module",
}


def check_arguments(apply: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` or ``ValueError`` for an argument that is not what `apply` declares."""
    for name, (kinds, choices, hint) in _declared(apply).items():
        value = given.get(name)
        unasked = isinstance(value, nn.Module) and nn.Module not in kinds  # though one is callable
        if name not in given or (any(_is_of(value, kind) for kind in kinds) and not unasked):
            continue
        if choices:
            shown = [*choices, *([None] if type(None) in kinds else [])]
            known = with_nearest(str(value), choices, f"known are {shown}")
            raise ValueError(f"unknown {name} {value!r}; {known}")
        wanted = " or ".join(_WORDS[kind] for kind in kinds if kind in _WORDS)
        raise TypeError(f"{name} is {describe(value)}; pass {wanted}{f', {hint}' if hint else ''}")


def _is_of(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is collections.abc.Callable:
        return callable(value)
    if isinstance(value, str):  # which is a collection, but not meant as one
        return kind is str
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


@functools.cache
def _declared(apply: Callable[..., Any]) -> dict[str, tuple[tuple[Any, ...], tuple[str, ...], str]]:
    """Name -> the kinds that it may have, known strings, and what to pass."""
    found = {}
    for name, hint in get_type_hints(apply, include_extras=True).items():
        note = ""
        if get_origin(hint) is Annotated:
            hint, note = get_args(hint)
        kinds = tuple(_kinds(hint))
        choices = [c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
        if name != "return" and Any not in kinds:
            found[name] = kinds, tuple(choices), note
    return found


def _kinds(hint: Any) -> Iterator[Any]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for each in get_args(hint):
            yield from _kinds(each)
    else:
        yield hint if origin is None or origin is Literal else origin
