"""Taking a subgraph out of a graph as a module of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.fx as fx
from torch import nn

from slapo.graph.rewrite.subgraph import HasGraph, attribute, subgraph_inputs
from slapo.graph.trace.nodes import called_name, spare_self

PATHS = "_slapo_paths"
"""Attribute of an extracted module: path of a child in the original -> its path in the module."""

_SCALARS = (bool, int, float)
_INTEGER_ARITHMETIC = frozenset({"add", "sub", "mul", "floordiv", "mod", "neg"})


def extract(
    gm: HasGraph, nodes: Collection[fx.Node], name: str, training: bool = True
) -> fx.GraphModule:
    """Make a module of the class `name` that computes a subgraph; the graph stays as it is.

    ``gm: b = fc(x); c = f(b, y)  -->  module(x, y) = f(fc(x), y)``

    Its inputs are those of the subgraph in order of first use, and it returns the last value, the
    only one that may be used outside. Submodules, parameters and buffers are shared, not
    copied, and have the paths that they have in `gm`. Submodules without state are the exception:
    they go by the last part of their path, so that equal subgraphs give equal code.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    >>> calls = [n for n in gm.graph.nodes if n.op == "call_module"]
    >>> part = extract(gm, calls[:2], "Part")
    >>> part.get_submodule("0") is gm.get_submodule("0")
    True
    """
    ordered = sorted(set(nodes))
    state = _SharedState(gm, ordered)
    graph = spare_self(fx.Graph())
    copies = {
        value: graph.placeholder(f"input_{k}", python_type(value, gm))
        for k, value in enumerate(subgraph_inputs(ordered), 1)
    }
    for node in ordered:
        target = state.path(node) if node.op in ("get_attr", "call_module") else node.target
        args = fx.map_arg(node.args, copies.__getitem__)
        kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
        # Fresh names: equal subgraphs then give equal code, wherever they come from.
        copies[node] = graph.create_node(node.op, target, args, kwargs, type_expr=node.type)
        copies[node].meta = dict(node.meta)
    graph.output(copies[ordered[-1]])
    module = fx.GraphModule(state.objects, graph, name)
    state.restore_persistence(module)
    module.training = training  # not .train(): the shared submodules keep their own mode
    module.__dict__[PATHS] = state.paths
    return module


def python_type(node: fx.Node, gm: HasGraph) -> Any:
    """The type of a value that is no tensor, as far as the graph shows it; None for all others.

    >>> gm = fx.symbolic_trace(lambda x: x.size(0) * 2)
    >>> [python_type(n, gm) for n in gm.graph.nodes if n.op == "call_method"]
    [<class 'int'>]
    """
    if node.op == "placeholder":
        return node.type if node.type in _SCALARS else _scalar_type(*node.args)
    if node.op == "get_attr":
        return _scalar_type(attribute(gm, str(node.target)))
    if node.op == "call_method":
        return _type_of_method(node)
    if node.op == "call_function":
        return _type_of_function(node, gm)
    return None


class _SharedState:
    """The submodules and tensors that an extracted module shares, by their paths in it."""

    def __init__(self, gm: HasGraph, nodes: list[fx.Node]) -> None:
        self._gm = gm
        self.paths: dict[str, str] = {}
        targets = [str(node.target) for node in nodes if node.op in ("get_attr", "call_module")]
        self._reserved = {target.split(".")[0] for target in targets}
        self._not_persistent: list[str] = []
        self.objects: dict[str, Any] = {}

    def path(self, node: fx.Node) -> str:
        """Return the path of a node's target in the new module; share what is there."""
        target = str(node.target)
        if target not in self.paths:
            self.paths[target] = new = self._choose(node, target)
            is_module = node.op == "call_module"
            self.objects[new] = (
                self._gm.get_submodule(target) if is_module else attribute(self._gm, target)
            )
            owner, _, field = target.rpartition(".")
            if not is_module and field in _unsaved(self._gm.get_submodule(owner)):
                self._not_persistent.append(new)
        return self.paths[target]

    def _choose(self, node: fx.Node, target: str) -> str:
        """Keep paths to state; shorten those of modules without."""
        if node.op == "get_attr":
            return target
        if "." not in target or has_state(self._gm.get_submodule(target)):
            return target
        stem = target.rpartition(".")[2]
        short, k = stem, 0
        while short in self._reserved or hasattr(fx.GraphModule, short):
            short, k = f"{stem}_{k}", k + 1
        self._reserved.add(short)
        return short

    def restore_persistence(self, module: nn.Module) -> None:
        """Keep buffers that are not saved out of the new module's state too."""
        for path in self._not_persistent:
            owner, _, field = path.rpartition(".")
            _unsaved(module.get_submodule(owner)).add(field)


def has_state(module: nn.Module) -> bool:
    """Whether a module has parameters, buffers, or other state that is saved."""
    return bool(module.state_dict()) or next(module.buffers(), None) is not None


def _unsaved(module: nn.Module) -> set[str]:
    return module._non_persistent_buffers_set


def _scalar_type(*values: Any) -> Any:
    """Return the type that plain numbers have in common."""
    kinds = {type(value) for value in values}
    return kinds.pop() if len(kinds) == 1 and kinds <= set(_SCALARS) else None


def _type_of_method(node: fx.Node) -> Any:
    """The type of a method's value: only sizes are known."""
    if node.target in ("dim", "numel") or (
        node.target == "size" and len(node.args) + len(node.kwargs) == 2
    ):
        return int
    return list[int] if node.target == "size" else None


def _type_of_function(node: fx.Node, gm: HasGraph) -> Any:
    """The type of a function's value: sizes, and arithmetic on them."""
    if node.target is getattr:
        return {"shape": list[int], "ndim": int}.get(str(node.args[1]))
    name = called_name(node)
    kinds = [
        python_type(value, gm) if isinstance(value, fx.Node) else type(value) for value in node.args
    ]
    if name == "getitem" and kinds[0] == list[int]:
        return int if kinds[1] is int else list[int]
    return int if name in _INTEGER_ARITHMETIC and set(kinds) == {int} else None
