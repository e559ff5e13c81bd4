"""Nodes of a graph: names, targets, and values."""

from __future__ import annotations

import enum
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from slapo.errors import TraceError

#: Returns the module for the target of a ``call_module`` node, as ``gm.get_submodule`` does.
ModuleLookup = Callable[[str], nn.Module]

#: Types that are compared element by element.
CONTAINERS = (tuple, list, dict, slice)

Pair = tuple[Any, Any]

_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_PLAIN = (str, int, float, bool, complex, torch.dtype, torch.device, enum.Enum, type(None))

# By name, as in graphs loaded from a file.
_BEGINS = frozenset({"_enter_autocast", "_enter_inference_mode"})
_ENDS = frozenset({"_exit_autocast", "_exit_inference_mode"})


@dataclass(frozen=True)
class FunctionApply:
    """Target of a node that calls ``function.apply``.

    It has the names that generated code needs and compares by the function. It pickles by reference
    to it, and stays one node in a symbolic trace.
    """

    #: a subclass of ``torch.autograd.Function``
    function: Any
    #: (position, argument) that generated code cannot express, such as a process group
    constants: tuple[tuple[int, Any], ...] = ()

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}_apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, fx.Proxy):
                return value.tracer.create_proxy("call_function", self, args, kwargs)
        given = list(args)
        for position, value in self.constants:
            given.insert(position, value)
        return self.function.apply(*given, **kwargs)


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """Target of a node whose value is a tensor from outside the module, such as a global."""

    tensor: Any
    __name__ = "held_tensor"

    def __call__(self) -> Any:
        return self.tensor


@dataclass(frozen=True, eq=False)
class HeldModule:
    """Target of a node that calls a module which is not a child, so that names and state stay."""

    module: nn.Module

    @property
    def __name__(self) -> str:
        return type(self.module).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def like_input(result: Any, given: Tensor, path: str) -> Any:
    """Check that a result which the graph assumes to be like an input is so in this call."""
    if not isinstance(result, Tensor) or result.shape != given.shape:
        shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise TraceError(
            f"{path!r} returned {shown} for an input of shape {tuple(given.shape)}; the graph "
            "above was captured when the result had its input's shape, and is valid only for that"
        )
    return result


def called_name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls, or ``""``."""
    target: Any = node.target
    if isinstance(target, str):
        return target if node.op == "call_method" else ""
    if isinstance(target, OpOverload):
        return target._schema.name.split("::")[-1]
    return str(getattr(target, "__name__", ""))


def switches_mode(node: fx.Node) -> bool:
    """Return whether a node begins or ends ``no_grad``, ``autocast`` or inference mode."""
    name = called_name(node) if node.op == "call_function" else ""
    return name in ("_set_grad_enabled", *_BEGINS, *_ENDS)


class OpenRegions:
    """The regions of ``no_grad``, ``autocast`` or inference mode that are open at a node.

    >>> graph = fx.Graph()
    >>> nodes = [graph.call_function(torch._C._set_grad_enabled, (on,)) for on in (False, True)]
    >>> regions = OpenRegions()
    >>> [len(regions.follow(node)) for node in nodes]
    [1, 0]
    """

    def __init__(self) -> None:
        self._open: list[fx.Node] = []

    def follow(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the nodes that began the regions open after `node`; call it on nodes in order."""
        name = called_name(node) if node.op == "call_function" else ""
        last = self._open[-1] if self._open else None
        # a return to the mode before the innermost region ends that region
        if name == "_set_grad_enabled":
            ends = last is not None and last.target is node.target and last.args != node.args
            self._open = self._open[:-1] if ends else [*self._open, node]
        elif name in _BEGINS:
            self._open = [*self._open, node]
        elif name in _ENDS:
            self._open = self._open[:-1]
        return tuple(self._open)


def nodes_in(value: Any) -> list[fx.Node]:
    """Return the nodes in nested containers, in order."""
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)
    return nodes


def attribute(root: nn.Module, target: str) -> Any:
    """Return the attribute of `root` at the target of a ``get_attr`` node."""
    owner, _, name = target.rpartition(".")
    return getattr(root.get_submodule(owner), name)


def inner_pairs(one: Any, other: Any) -> list[Pair] | None:
    """Pair the elements of two containers; return None if their structures differ."""
    if isinstance(one, (tuple, list)):
        same = isinstance(other, (tuple, list)) and len(one) == len(other)
        return list(zip(one, other, strict=True)) if same else None
    if isinstance(one, dict):
        same = isinstance(other, dict) and one.keys() == other.keys()
        return [(one[key], other[key]) for key in one] if same else None
    if not isinstance(other, slice):
        return None
    return [(getattr(one, k), getattr(other, k)) for k in ("start", "stop", "step")]


def spare_self(graph: fx.Graph) -> fx.Graph:
    """Reserve the name ``self`` in the empty `graph` and return it.

    Nodes are named after the modules they call. BERT has a child ``self``, whose result would
    shadow the first parameter of the generated forward.

    >>> graph = spare_self(fx.Graph())
    >>> graph.call_module("self").name
    'self_1'
    """
    # An erased node's name stays taken in the graph's namespace.
    graph.erase_node(graph.create_node("placeholder", "self", name="self"))
    return graph


def add_placeholder(graph: fx.Graph, parameter: inspect.Parameter) -> fx.Node:
    """Add the placeholder of a parameter, with the same name and default."""
    star, default = _STARS.get(parameter.kind, ""), parameter.default
    if star or default is parameter.empty:
        given: tuple[Any, ...] = ()
    elif _is_plain(default):
        given = (default,)
    else:
        raise TraceError(
            f"the default of parameter {parameter.name!r}, {default!r}, cannot be written in a "
            "graph; make the module a leaf"
        )
    return graph.create_node("placeholder", star + parameter.name, given, name=parameter.name)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


# --- pickles -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Reference:
    """Reference to the node in a row."""

    row: int


def rows_of(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Convert a graph to picklable rows; linked nodes of a long graph would recurse too deeply.

    >>> graph = fx.Graph()
    >>> graph.output(graph.call_function(torch.relu, (graph.placeholder("x"),))).name
    'output'
    >>> str(graph_of(rows_of(graph))) == str(graph)
    True
    """
    rows: Any = {node: _Reference(row) for row, node in enumerate(graph.nodes)}
    return [
        (
            node.op,
            _name_of(node.target),
            fx.map_arg(node.args, rows.__getitem__),
            fx.map_arg(node.kwargs, rows.__getitem__),
            node.name,
            # Other metadata, such as dynamo's fake tensors and stacks, cannot be pickled.
            {key: value for key, value in node.meta.items() if key.startswith("slapo")},
        )
        for node in graph.nodes
    ]


def graph_of(rows: list[tuple[Any, ...]]) -> fx.Graph:
    """Rebuild a graph from its rows."""
    graph = spare_self(fx.Graph())
    nodes: list[fx.Node] = []

    def restored(value: Any) -> Any:
        return nodes[value.row] if isinstance(value, _Reference) else value

    for op, saved, args, kwargs, name, meta in rows:
        target: Any = _located(saved.name) if isinstance(saved, _Name) else saved
        args, kwargs = (fx.node.map_aggregate(each, restored) for each in (args, kwargs))
        nodes.append(graph.create_node(op, target, args, kwargs, name))
        nodes[-1].meta.update(meta)
    return graph


@dataclass(frozen=True)
class _Name:
    """Name of a torch function, as some of these cannot be pickled."""

    name: str


def _name_of(target: Any) -> Any:
    home, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    path = f"{home.replace('torch._ops', 'torch.ops')}.{name}"
    is_torchs = home.startswith("torch") and callable(target)
    return _Name(path) if is_torchs and _located(path) is target else target


def _located(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError, ValueError):
        return None
