"""Canonical names of operators, independent of how a graph spells them.

``F.gelu(x)`` and ``nn.GELU()(x)`` are one operator, as are ``a + b`` and ``a.add(b)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from slapo.graph.match.operators import FUNCTIONS, METHODS, MODULES, Op, Spelling
from slapo.graph.trace.nodes import ModuleLookup

Key = Any
"""Name of an operator: a string, a class of modules, or a pair for what is not in the table."""

_KEYWORD_ALIASES = {"axis": "dim", "keepdims": "keepdim", "self": "input", "size": "shape"}

MISSING = object()
"""The value of an argument that a call neither states nor has a default for."""

SHOWN_NAME = "slapo_shown_name"
"""Key of ``node.meta``: the path that a called module has in the graph that is shown."""


def called_path(node: fx.Node) -> str | None:
    """Return the path of the module that a node calls, even through a stand-in, else None."""
    if node.op == "call_module":
        return str(node.target)
    return node.meta.get(SHOWN_NAME) if node.op == "call_function" else None


@dataclass(frozen=True)
class ModuleState:
    """A parameter of a called module, where a function would take it as an argument."""

    target: str
    name: str


@dataclass(frozen=True)
class Call:
    """A call in canonical form: equal operators have equal keys, and arguments go by name.

    ``args`` is None if the arguments do not fit; positions replace unknown names.
    """

    key: Key
    args: Mapping[str | int, Any] | None
    op: Op | None = None
    inplace: bool = False

    def default(self, name: str | int) -> Any:
        """Return the value that an argument has if a call omits it."""
        return self.op.defaults.get(str(name), MISSING) if self.op else MISSING

    def value(self, name: str | int) -> Any:
        """Return the value of an argument, stated or by default."""
        return (self.args or {}).get(name, self.default(name))


def key_of(node: fx.Node, modules: ModuleLookup) -> Key:
    """Return the operator's name, the same for all its spellings; None for other nodes."""
    return _identify(node, modules)[0]


def call_of(node: fx.Node, modules: ModuleLookup) -> Call:
    """Convert the call of a node to canonical form."""
    key, spelling = _identify(node, modules)
    if spelling is None:
        return Call(key, _unlisted_arguments(node, modules))
    if node.op == "call_module":
        module = modules(str(node.target))
        bound = _bind(("input",), node.args, node.kwargs)
        if bound is not None:
            # The attributes of a module take the role of a function's arguments: `eps`,
            # `approximate`, `weight`.
            bound |= _settings(spelling.params[1:], module, str(node.target))
        inplace = getattr(module, "inplace", False) is True
    else:
        # ``getattr(x, "shape")`` is spelled as ``x.size()``, without a second argument.
        args = node.args[:1] if node.target is getattr else node.args
        bound = _bind(spelling.params, args, node.kwargs)
        inplace = spelling.inplace or bool(bound and bound.get("inplace") is True)
    return Call(key, bound, spelling.op, inplace)


def _identify(node: fx.Node, modules: ModuleLookup) -> tuple[Key, Spelling | None]:
    """Return the key of a node's operator, and the spelling that the node uses."""
    spelling: Spelling | None = None
    key: Key = None
    if node.op == "call_function":
        if node.target is getattr and node.args[1:] == ("shape",):
            spelling = METHODS["size"]
        else:
            key, spelling = _identify_function(node.target)
    elif node.op == "call_method":
        key, spelling = ("torch", node.target), METHODS.get(str(node.target))
        # x.view(torch.int32) reinterprets the bytes as another dtype: not a reshape.
        if node.target == "view" and len(node.args) == 2 and isinstance(node.args[1], torch.dtype):
            key, spelling = ("torch", "view.dtype"), None
    elif node.op == "call_module":
        key = type(modules(str(node.target)))
        spelling = MODULES.get(key)
    return spelling.op.name if spelling else key, spelling


@lru_cache(maxsize=4096)
def _identify_function(target: Any) -> tuple[Key, Spelling | None]:
    """Look up a function. An unlisted ``torch.f`` shares its name with the method ``x.f``."""
    name = str(getattr(target, "__name__", ""))
    is_method = getattr(torch.Tensor, name, None) is target
    in_torch = is_method or getattr(torch, name, None) is target
    spelling = FUNCTIONS.get(target) or (METHODS.get(name) if is_method else None)
    return ("torch", name) if in_torch else ("function", target), spelling


def _bind(
    params: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str | int, Any] | None:
    """Bind arguments to `params`, the last of which may be ``*name``; None if they do not fit."""
    bound: dict[str | int, Any] = dict(zip(params, args, strict=False))
    rest = args[len(params) :]
    if params[-1].startswith("*") and len(args) >= len(params):
        del bound[params[-1]]
        # x.permute(0, 2, 1) and x.permute((0, 2, 1)) are the same call.
        rest, given = (), args[len(params) - 1 :]
        is_packed = len(given) == 1 and isinstance(given[0], (tuple, list))
        bound[params[-1][1:]] = given[0] if is_packed else given
    known = {name.lstrip("*") for name in params}
    for name, value in kwargs.items():
        name = name if name in known else _KEYWORD_ALIASES.get(name, name)
        if name not in known or name in bound:
            return None
        bound[name] = value
    return None if rest else bound


def _settings(names: tuple[str, ...], module: nn.Module, target: str) -> dict[str | int, Any]:
    """Read a module's attributes that a function would take as arguments."""
    settings: dict[str | int, Any] = {}
    for name in (name for name in names if hasattr(module, name)):
        value = getattr(module, name)
        is_state = name in module._parameters and value is not None
        settings[name] = ModuleState(target, name) if is_state else value
    return settings


def _unlisted_arguments(node: fx.Node, modules: ModuleLookup) -> dict[str | int, Any] | None:
    """Bind the arguments of an operator outside the table, by its signature if there is one."""
    if node.op == "call_module":
        return bind_signature(modules(str(node.target)).forward, node.args, node.kwargs)
    if node.op == "call_function" and inspect.isfunction(node.target):
        return bind_signature(node.target, node.args, node.kwargs)
    args, kwargs = list(node.args), dict(node.kwargs)
    # Torch's functions take their first operand by keyword too; as a method it can only be
    # positional.
    if not args and "input" in kwargs:
        args = [kwargs.pop("input")]
    return positions_and_names(args, kwargs)


def bind_signature(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str | int, Any] | None:
    """Bind arguments to a function's parameters, with defaults; None if they do not fit."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return positions_and_names(args, kwargs)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return positions_and_names((), bound.arguments)


def positions_and_names(args: Sequence[Any], kwargs: Mapping[Any, Any]) -> dict[str | int, Any]:
    """Merge the arguments of a call into one dictionary, positional ones by index."""
    return {**dict(enumerate(args)), **kwargs}
