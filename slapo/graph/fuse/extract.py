"""Taking a subgraph out of a graph as a module of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.fx as fx
from torch import nn

from slapo.graph.match.dataflow import tells_mode
from slapo.graph.trace.modes import select_by_mode
from slapo.graph.trace.names import spare_self
from slapo.graph.trace.nodes import attribute, called_name

_SCALARS = (bool, int, float)
_INTEGER_ARITHMETIC = frozenset({"add", "sub", "mul", "floordiv", "mod", "neg"})


def extract(gm: fx.GraphModule, nodes: Collection[fx.Node], name: str) -> fx.GraphModule:
    """Make a module that computes a subgraph.

    ``gm: b = fc(x); c = f(b, y)  -->  module(x, y) = f(fc(x), y)``

    The graph of `gm` stays as it is. Submodules, parameters and buffers are shared, not copied,
    and have the paths that they have in `gm`. Submodules without state are the exception: they
    go by the last part of their path, so that equal subgraphs give equal code.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of the graph.
    nodes : collection of torch.fx.Node
        The subgraph.
    name : str
        Name of the new module's class.

    Returns
    -------
    torch.fx.GraphModule
        Its inputs are those of the subgraph in order of first use; a look-up of the ``training``
        flag outside of the subgraph is an input like others. It returns the last value of the
        subgraph, or a tuple if further values are used outside.

    Examples
    --------
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    >>> calls = [n for n in gm.graph.nodes if n.op == "call_module"]
    >>> part = extract(gm, calls[:2], "Part")
    >>> part.get_submodule("0") is gm.get_submodule("0")
    True
    """
    ordered = sorted(set(nodes))
    state = _SharedState(gm, ordered)
    graph = spare_self(fx.Graph())
    copies = _copy_inputs(gm, ordered, graph)
    for node in ordered:
        has_path = node.op in ("get_attr", "call_module")
        target = state.path(node) if has_path else node.target
        args = fx.map_arg(node.args, copies.__getitem__)
        kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
        # Fresh names: equal subgraphs then give equal code, wherever they come from.
        copies[node] = graph.create_node(node.op, target, args, kwargs, type_expr=node.type)
        copies[node].meta = dict(node.meta)
    graph.output(_result(ordered, copies))
    module = fx.GraphModule(state.objects, graph, name)
    state.restore_persistence(module)
    module.training = gm.training  # not .train(): the shared submodules keep their own mode
    return module


def python_type(node: fx.Node, gm: fx.GraphModule) -> Any:
    """Tell the type of a value that is no tensor, as far as the graph shows it.

    Parameters
    ----------
    node : torch.fx.Node
        The value.
    gm : torch.fx.GraphModule
        The owner of the graph.

    Returns
    -------
    type or None
        ``bool``, ``int``, ``float`` or ``list[int]``; None for tensors and unknown types.

    Examples
    --------
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

    def __init__(self, gm: fx.GraphModule, nodes: list[fx.Node]) -> None:
        self._gm = gm
        self._paths: dict[str, str] = {}
        targets = [str(node.target) for node in nodes if node.op in ("get_attr", "call_module")]
        self._reserved = {target.split(".")[0] for target in targets}
        self._not_persistent: list[str] = []
        self.objects: dict[str, Any] = {}

    def path(self, node: fx.Node) -> str:
        """Return the path of a node's target in the new module; share what is there."""
        target = str(node.target)
        if target not in self._paths:
            self._paths[target] = new = self._choose(node, target)
            self.objects[new] = attribute(self._gm, target)
            owner, _, field = target.rpartition(".")
            if field in self._gm.get_submodule(owner)._non_persistent_buffers_set:
                self._not_persistent.append(new)
        return self._paths[target]

    def _choose(self, node: fx.Node, target: str) -> str:
        """Keep paths to state; shorten those of modules without, and use the own mode."""
        if node.op == "get_attr":
            return "training" if tells_mode(node) else target
        module = self._gm.get_submodule(target)
        if "." not in target or module.state_dict() or next(module.buffers(), None) is not None:
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
            module.get_submodule(owner)._non_persistent_buffers_set.add(field)


def _copy_inputs(
    gm: fx.GraphModule, nodes: list[fx.Node], graph: fx.Graph
) -> dict[fx.Node, fx.Node]:
    """Make a placeholder for each input of a subgraph, in order of first use."""
    inside = set(nodes)
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for value in node.all_input_nodes:
            if value not in inside and value not in copies:
                name = f"input_{len(copies) + 1}"
                copies[value] = graph.placeholder(name, python_type(value, gm))
    return copies


def _result(nodes: list[fx.Node], copies: dict[fx.Node, fx.Node]) -> Any:
    """Return what an extracted module returns."""
    inside = set(nodes)
    used = [node for node in nodes[:-1] if any(user not in inside for user in node.users)]
    results = tuple(copies[node] for node in [*used, nodes[-1]])
    return results if used else results[0]


def _scalar_type(*values: Any) -> Any:
    """Return the type that plain numbers have in common."""
    kinds = {type(value) for value in values}
    return kinds.pop() if len(kinds) == 1 and kinds <= set(_SCALARS) else None


def _type_of_method(node: fx.Node) -> Any:
    """Tell the type of a method's value: only sizes are known."""
    if node.target in ("dim", "numel") or (
        node.target == "size" and len(node.args) + len(node.kwargs) == 2
    ):
        return int
    return list[int] if node.target == "size" else None


def _type_of_function(node: fx.Node, gm: fx.GraphModule) -> Any:
    """Tell the type of a function's value: sizes, arithmetic on them, and constants by mode."""
    if node.target is select_by_mode:
        return _scalar_type(*node.args[1:])
    if node.target is getattr:
        return {"shape": list[int], "ndim": int}.get(str(node.args[1]))
    name = called_name(node)
    kinds = [
        python_type(value, gm) if isinstance(value, fx.Node) else type(value) for value in node.args
    ]
    if name == "getitem" and kinds[0] == list[int]:
        return int if kinds[1] is int else list[int]
    return int if name in _INTEGER_ARITHMETIC and set(kinds) == {int} else None
