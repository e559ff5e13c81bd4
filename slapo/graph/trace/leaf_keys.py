"""What decides the form of a leaf's output: siblings that are equal in all of it share one run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slapo.graph.trace.output_capture import is_capturing

#: Attributes that number a layer. They may differ between siblings that share a run; a module
#: that reads one in its forward is run by itself.
_ORDINAL = re.compile(r"(^|_)(idx|index|layer_id|layer_number|block_id)$")
_SLOTS = frozenset({"_parameters", "_buffers", "_modules", "_slapo_leaf", "_slapo_items"})


def state_key(module: nn.Module) -> Any:
    """What decides the form of a module's output, its class aside.

    Plain values count by value, functions and other objects by identity.
    """
    held = [*module._parameters.items(), *module._buffers.items()]
    return (
        tuple(
            (k, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad)) for k, t in held
        ),
        tuple(
            (k, _hooks_key(v) if "_hooks" in k and isinstance(v, dict) else _value_key(v))
            for k, v in vars(module).items()
            if _counts(k, v)
        ),
    )


def has_values(module: nn.Module) -> bool:
    """Whether a module has buffers of one element, from which Python may read numbers."""
    return any(buffer.numel() == 1 for buffer in module.buffers())


def _counts(attribute: str, value: Any) -> bool:
    """Most attributes of a module are empty tables of hooks."""
    if attribute in _SLOTS or (isinstance(value, dict) and not value):
        return False
    return not _is_ordinal(attribute, value)


def _is_ordinal(attribute: str, value: Any) -> bool:
    return type(value) is int and _ORDINAL.search(attribute) is not None


def _value_key(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, complex, torch.dtype, torch.device)):
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(map(_value_key, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_value_key, value))
    if isinstance(value, dict):
        return tuple((_value_key(k), _value_key(v)) for k, v in value.items())
    return id(value)


def _hooks_key(table: dict[Any, Any]) -> Any:
    """The hooks, which are listed under numbers that no two hooks share.

    Left out are the collectors of Transformers, one for each module, which change nothing.
    """
    return tuple(_value_key(hook) for hook in table.values() if not is_capturing(hook))


@contextmanager
def ordinal_reads(module: nn.Module) -> Iterator[set[str]]:
    """The attributes that number a layer and are read within the block, below `module`."""
    read: set[str] = set()
    watched: list[tuple[nn.Module, type[nn.Module]]] = []
    for each in module.modules():
        names = [name for name, value in vars(each).items() if _is_ordinal(name, value)]
        if names and not isinstance(each, torch.jit.ScriptModule):
            watched.append((each, type(each)))
            each.__class__ = _watching(type(each), tuple(names), read)
    try:
        yield read
    finally:
        for each, before in watched:
            each.__class__ = before


def _watching(kind: Any, names: tuple[str, ...], read: set[str]) -> type:
    def reader(name: str) -> property:
        def get(self: nn.Module) -> Any:
            read.add(name)
            return vars(self)[name]

        return property(get)

    members: dict[str, Any] = {name: reader(name) for name in names}
    return type(kind)(kind.__name__, (kind,), {"__module__": kind.__module__, **members})
