"""One name for each operator, whichever way a graph spells it.

``F.gelu(x)``, ``nn.GELU()(x)`` and, in today's PyTorch, ``torch._C._nn.gelu(x)`` are one operator.
So are ``a + b``, ``torch.add(a, b)`` and ``a.add(b)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from slapo.graph.match.operators import FUNCTIONS, METHODS, MODULES, ModuleSpelling, Op, Spelling
from slapo.graph.trace.nodes import ModuleLookup

_KEYWORD_ALIASES = {"axis": "dim", "keepdims": "keepdim", "self": "input", "size": "shape"}


SHOWN_NAME = "slapo_shown_name"
"""Key of ``node.meta``: the path that a called module has in the graph that is shown."""


def called_path(node: fx.Node) -> str | None:
    """Path of the module that a node calls, also where another one stands for it; else None."""
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
    """A call in canonical form: equal operators have equal keys, arguments go by name.

    ``args`` is None where the arguments do not fit the operator; positions stand for names that are
    unknown. ``inplace`` calls write their result into their first operand.
    """

    key: Hashable
    args: Mapping[str | int, Any] | None
    op: Op | None = None
    inplace: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


def key_of(node: fx.Node, modules: ModuleLookup) -> Hashable:
    """Name the operator of a node, the same for all its spellings; None for what is no call."""
    if node.op == "call_function":
        if node.target is getattr and node.args[1:] == ("shape",):
            return "size"
        return _function_key(node.target)
    if node.op == "call_method":
        return _method_key(node)
    if node.op == "call_module":
        kind = type(modules(str(node.target)))
        spelling = MODULES.get(kind)
        return spelling.op.name if spelling else module_key(kind)
    return None


def module_key(kind: type[nn.Module]) -> Hashable:
    """Name the call of a module class that is no spelling of an operator."""
    return ("module", kind)


def call_of(node: fx.Node, modules: ModuleLookup) -> Call:
    """Bring the call of a node into canonical form.

    >>> graph = fx.symbolic_trace(lambda x, y: x.add(y)).graph
    >>> node = next(n for n in graph.nodes if n.op == "call_method")
    >>> call = call_of(node, lambda target: nn.Module())
    >>> call.key, dict(call.args)
    ('add', {'input': x, 'other': y})
    """
    if node.op == "call_module":
        return _module_call(node, modules(str(node.target)))
    key = key_of(node, modules)
    if node.target is getattr and key == "size":
        return _spelled(METHODS["size"], node.args[:1], {}, key)
    spelling = _spelling(node)
    if spelling is not None and key == spelling.op.name:
        return _spelled(spelling, node.args, node.kwargs, key)
    return _unlisted_call(node, key)


def written_operand(call: Call) -> Any:
    """Return the value that an in-place call overwrites, or None."""
    return call.args.get("input") if call.inplace and call.args else None


@lru_cache(maxsize=4096)
def _function_spelling(target: Any) -> Spelling | None:
    """Look a function up; methods of ``torch.Tensor`` count as the method."""
    found = FUNCTIONS.get(target)
    if found is None and _is_attribute_of(torch.Tensor, target):
        found = METHODS.get(target.__name__)
    return found


@lru_cache(maxsize=4096)
def _function_key(target: Any) -> Hashable:
    """Name a function. An unlisted ``torch.f`` shares its name with the method ``x.f``."""
    spelling = _function_spelling(target)
    if spelling is not None:
        return spelling.op.name
    if _is_attribute_of(torch, target) or _is_attribute_of(torch.Tensor, target):
        return ("torch", target.__name__)
    return ("function", target)


def _is_attribute_of(owner: Any, target: Any) -> bool:
    """Tell whether `target` is what `owner` knows under the target's own name."""
    name = getattr(target, "__name__", None)
    return isinstance(name, str) and getattr(owner, name, None) is target


def _method_key(node: fx.Node) -> Hashable:
    """Name a method call."""
    spelling = METHODS.get(str(node.target))
    if spelling is None:
        return ("torch", node.target)
    # x.view(torch.int32) reads the same bytes as another type: not a change of shape.
    if node.target == "view" and len(node.args) == 2 and isinstance(node.args[1], torch.dtype):
        return ("torch", "view.dtype")
    return spelling.op.name


def _spelling(node: fx.Node) -> Spelling | None:
    """Look up how a function or method node spells its operator."""
    if node.op == "call_method":
        return METHODS.get(str(node.target))
    return _function_spelling(node.target)


def _spelled(
    spelling: Spelling, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Hashable
) -> Call:
    bound = _bind(spelling.params, args, kwargs)
    inplace = spelling.inplace or bool(bound and bound.get("inplace") is True)
    return Call(key, bound, spelling.op, inplace, spelling.op.defaults)


def _bind(
    params: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str | int, Any] | None:
    """Bind arguments to `params`, of which the last may be ``*name``; None if they do not fit."""
    bound: dict[str | int, Any] = {}
    rest = list(args)
    for name in params:
        if name.startswith("*"):
            if rest:
                bound[name[1:]] = _varargs(rest)
            rest = []
        elif rest:
            bound[name] = rest.pop(0)
    known = {name.lstrip("*") for name in params}
    for name, value in kwargs.items():
        name = name if name in known else _KEYWORD_ALIASES.get(name, name)
        if name not in known or name in bound:
            return None
        bound[name] = value
    return None if rest else bound


def _varargs(values: list[Any]) -> Any:
    """Treat ``x.permute(0, 2, 1)`` and ``x.permute((0, 2, 1))`` alike."""
    if len(values) == 1 and isinstance(values[0], (tuple, list)):
        return values[0]
    return tuple(values)


def _module_call(node: fx.Node, module: nn.Module) -> Call:
    """Bring the call of a module into canonical form."""
    spelling = MODULES.get(type(module))
    if spelling is None:
        bound = bind_signature(module.forward, node.args, node.kwargs)
        return Call(module_key(type(module)), bound)
    bound = _bind(("input",), node.args, node.kwargs)
    if bound is not None:
        bound |= _settings(spelling, module, str(node.target))
    inplace = getattr(module, "inplace", False) is True
    return Call(spelling.op.name, bound, spelling.op, inplace, spelling.op.defaults)


def _settings(spelling: ModuleSpelling, module: nn.Module, target: str) -> dict[str | int, Any]:
    """Read what a function would take as arguments from the attributes of a module."""
    settings: dict[str | int, Any] = {}
    for name in spelling.attributes:
        value = getattr(module, name)
        is_state = name in module._parameters and value is not None
        settings[name] = ModuleState(target, name) if is_state else value
    return settings


def _unlisted_call(node: fx.Node, key: Hashable) -> Call:
    """Describe the call of an operator outside the table, by signature if it has one."""
    args = tuple(node.args)
    if node.op == "call_function" and inspect.isfunction(node.target):
        return Call(key, bind_signature(node.target, args, node.kwargs))
    bound: dict[str | int, Any] = dict(enumerate(args))
    for name, value in node.kwargs.items():
        bound[0 if name == "input" and not args else name] = value
    return Call(key, bound)


def bind_signature(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str | int, Any] | None:
    """Bind arguments to a function's parameters, defaults included; None if they do not fit."""
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


def positions_and_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str | int, Any]:
    """Put the arguments of a call into one dictionary, the positional ones by position."""
    given: dict[str | int, Any] = dict(enumerate(args))
    given.update(kwargs)
    return given
