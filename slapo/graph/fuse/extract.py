"""Taking a chain out of a graph as a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx
from torch import nn

from slapo.graph.rewrite.effects import HasGraph
from slapo.graph.rewrite.plan import subgraph_inputs
from slapo.graph.trace.nodes import attribute, called_name, spare_self

_SCALARS = (bool, int, float)
_INTEGER_ARITHMETIC = frozenset({"add", "sub", "mul", "floordiv", "mod", "neg"})


def extract(
    gm: HasGraph, chain: Sequence[fx.Node], name: str, training: bool = True
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Make a module of the class `name` that computes a chain; the graph stays as it is.

    ``gm: b = fc(x); c = f(b, y)  -->  module(x, y) = f(fc(x), y)``

    Its inputs are those of the chain in order of first use, and it returns the last value, the only
    one that may be used outside. Submodules are shared, not copied. Also returns path in `gm` ->
    path in the module: the same, but for submodules without state, which go by the last part of
    their path. So equal chains give equal code.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    >>> calls = list(gm.graph.find_nodes(op="call_module"))
    >>> part, paths = extract(gm, calls[:2], "Part")
    >>> part.get_submodule("0") is gm.get_submodule("0"), paths
    (True, {'0': '0', '1': '1'})
    """
    graph = spare_self(fx.Graph())
    copies = {
        value: graph.placeholder(f"input_{k}", python_type(value, gm))
        for k, value in enumerate(subgraph_inputs(chain), 1)
    }
    called = [str(node.target) for node in chain if node.op == "call_module"]
    paths = _paths_of({path: gm.get_submodule(path) for path in called})
    for node in chain:
        target: Any = node.target if node.op != "call_module" else paths[str(node.target)]
        args: Any = fx.map_arg(node.args, copies.__getitem__)
        kwargs: Any = fx.map_arg(dict(node.kwargs), copies.__getitem__)
        # Fresh names: equal chains then give equal code, wherever they come from.
        copies[node] = graph.create_node(node.op, target, args, kwargs, type_expr=node.type)
        copies[node].meta = dict(node.meta)
    graph.output(copies[chain[-1]])
    # In place of the children at first: fx recompiles those that are graph modules themselves, and
    # a traced one would take that for an edit by hand.
    module = fx.GraphModule({paths[path]: nn.Module() for path in called}, graph, name)
    for path in called:
        module.set_submodule(paths[path], gm.get_submodule(path))
    module.training = training  # not .train(): the shared submodules keep their own mode
    return module, paths


def _paths_of(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Short paths for modules without state, those that they have for others."""
    paths: dict[str, str] = {}
    taken = {path.split(".")[0] for path in modules}
    for path, module in modules.items():
        paths[path] = path
        if "." in path and not has_state(module):
            stem = name = path.rpartition(".")[2]
            k = 0
            while name in taken or hasattr(fx.GraphModule, name):
                name, k = f"{stem}_{k}", k + 1
            paths[path] = name
            taken.add(name)
    return paths


def has_state(module: nn.Module) -> bool:
    """Whether a module has parameters, buffers, or other state that is saved."""
    return bool(module.state_dict()) or next(module.buffers(), None) is not None


def python_type(node: fx.Node, gm: HasGraph) -> Any:
    """The type of a value that is no tensor, as far as the graph shows it; None for all others.

    >>> gm = fx.symbolic_trace(lambda x: x.size(0) * 2)
    >>> [python_type(n, gm) for n in gm.graph.nodes if n.op == "call_method"]
    [<class 'int'>]
    """
    if node.op == "placeholder":
        return node.type if node.type in _SCALARS else _scalar_type(*node.args)
    if node.op == "get_attr":
        return _scalar_type(attribute(gm, str(node.target)))  # type: ignore[arg-type]
    if node.op == "call_method":
        one = node.target == "size" and len(node.args) + len(node.kwargs) == 2
        return int if one or node.target in ("dim", "numel") else _LISTS.get(node.target)
    return _type_of_function(node, gm) if node.op == "call_function" else None


_LISTS: dict[Any, Any] = {"size": list[int], "shape": list[int], "ndim": int}


def _scalar_type(*values: Any) -> Any:
    """Return the type that plain numbers have in common."""
    kinds = {type(value) for value in values}
    return kinds.pop() if len(kinds) == 1 and kinds <= set(_SCALARS) else None


def _type_of_function(node: fx.Node, gm: HasGraph) -> Any:
    """The type of a function's value: sizes, and arithmetic on them."""
    if node.target is getattr:
        return _LISTS.get(node.args[1])
    name = called_name(node)
    kinds = [python_type(v, gm) if isinstance(v, fx.Node) else type(v) for v in node.args]
    if name == "getitem" and kinds[0] == list[int]:
        return int if kinds[1] is int else list[int]
    return int if name in _INTEGER_ARITHMETIC and set(kinds) == {int} else None
