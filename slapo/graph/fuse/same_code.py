"""When two modules without state are the same code, so that one compilation serves both."""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from slapo.graph.fuse.extract import has_state

_PLAIN = (
    *(type(None), type(...), bool, int, str, torch.dtype, torch.device),
    *(torch.layout, torch.memory_format),
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"}


class _Incomparable(Exception):
    """A module has something that cannot be compared with another's."""


class _Identity:
    """A function in a key: equal to itself only, and alive while the key is, as its id must be."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._function is other._function

    def __hash__(self) -> int:
        return id(self._function)


def code_key(module: fx.GraphModule) -> Hashable | None:
    """Describe all that decides how an extracted module is compiled.

    Equal keys mean equal code: operations, functions by identity, submodules by class, mode and
    the values of their attributes. None if that cannot be compared, or there is state.

    >>> def key(module):
    ...     return code_key(fx.symbolic_trace(nn.Sequential(module)))
    >>> key(nn.Softmax(0)) == key(nn.Softmax(0)), key(nn.Softmax(0)) == key(nn.Softmax(1))
    (True, False)
    >>> key(nn.Linear(1, 1)) is None
    True
    """
    if has_state(module):
        return None
    below = [(path, m) for path, m in module.named_modules(remove_duplicate=False) if path]
    try:
        nodes = tuple(_node_key(node) for node in module.graph.nodes)
        return (module.training, nodes, tuple((path, _module_key(m)) for path, m in below))
    except _Incomparable:
        return None


def _node_key(node: fx.Node) -> Hashable:
    target = node.target if isinstance(node.target, str) else _Identity(node.target)
    return (node.op, node.name, target, _frozen(node.args), _frozen(dict(node.kwargs)), node.type)


def _module_key(module: nn.Module) -> Hashable:
    """Describe a module of torch; users' classes may depend on more than their attributes."""
    attributes = vars(module)
    if not type(module).__module__.startswith("torch.nn."):
        raise _Incomparable
    if any(attributes.get(slot) for slot in _OF_ALL_MODULES if "hooks" in slot):
        raise _Incomparable
    own = {name: v for name, v in attributes.items() if name not in _OF_ALL_MODULES}
    return (type(module), _frozen(own))


def _frozen(value: Any) -> Hashable:
    """Put a value into a form that equals another only if the value does, type and sign alike."""
    if isinstance(value, fx.Node):
        return (fx.Node, value.name)
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(map(_frozen, value)))
    if isinstance(value, dict):
        return (type(value), tuple((_frozen(k), _frozen(v)) for k, v in value.items()))
    if isinstance(value, slice):
        return (slice, _frozen((value.start, value.stop, value.step)))
    if isinstance(value, _FUNCTIONS):
        return _Identity(value)
    raise _Incomparable
