"""Encoding of arguments for a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from slapo.history import describe
from slapo.node import Node
from slapo.record.modules import keep_module
from slapo.record.parts import (
    PLAIN,
    MadeBy,
    Named,
    Part,
    Partial,
    Unnamed,
    keep_callable,
    keep_tensor,
    map_inner,
)
from slapo.record.subgraphs import is_found, keep_found


def keep(value: Any, node: Node) -> Any:
    """Encode an argument of a primitive of `node` for a record, before it is applied.

    The result holds no module, graph or large tensor, and later changes of `value` do not affect
    it. Values that no file can hold become their text; saving the record then raises.
    """
    # By exact type: a subclass of int or str, such as an enum member, would come back as its base.
    if type(value) in PLAIN or isinstance(value, Part):
        return value

    def inner(each: Any) -> Any:
        return keep(each, node)

    if isinstance(value, nn.Module):
        return keep_module(value, inner, node)
    if isinstance(value, Tensor):
        return keep_tensor(value)
    if isinstance(value, (tuple, list, Mapping, set, frozenset, range, slice)):
        return _keep_container(value, inner, node)
    if callable(value):
        return keep_callable(value, inner)
    why = f"an object of {type(value).__qualname__}; pass plain values, or leave it out"
    return Unnamed(describe(value), why)


def _keep_container(value: Any, inner: Any, node: Node) -> Any:
    if is_found(value):
        return keep_found(value, inner, node)
    if hasattr(value, "_fields"):
        why = f"a named tuple, {type(value).__qualname__}; pass a tuple or a dict"
        return Unnamed(describe(value), why)
    try:
        return map_inner(list(value) if isinstance(value, range) else value, inner)
    except TypeError:  # keys and items were hashable, but their encoded forms are not
        why = f"a {type(value).__qualname__} of objects; pass plain values in it"
        return Unnamed(describe(value), why)


def made_by(make: Any, module: nn.Module, node: Node) -> Any:
    """Encode a module made by `make`, as the function if it can be imported."""
    function = keep(make, node)
    is_named = isinstance(function, (Named, Partial))
    return MadeBy(function, describe(module)) if is_named else keep(module, node)
