"""Names for new submodules, and the removal of those that no graph needs any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.fx as fx
from torch import nn

from slapo.graph.match.subgraph_view import SubgraphView
from slapo.graph.trace.module import Traced, park_unused
from slapo.wrapper import innermost


def check_stem(name: str) -> None:
    """Refuse what cannot be part of an attribute's name, by a ``ValueError``."""
    if not name.isidentifier():
        raise ValueError(
            f"name={name!r} cannot name a submodule; use letters, digits and underscores"
        )


def drop_unused(gm: fx.GraphModule, targets: Iterable[str]) -> list[str]:
    """Remove the submodules at these paths that the module's graph does not need; returns them.

    A submodule stays if a node calls it, calls a module that it is part of, or calls or reads
    something in it; nodes that a checkpoint has moved into a :class:`.SubgraphView` count too.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> drop_unused(gm, ["0", "1"])
    []
    """
    graphs = _graphs_of(gm)
    asked = [target for target in dict.fromkeys(targets) if _has(gm, target)]
    idle = [t for t in asked if not any(_needs(graph, gm, t) for graph in graphs)]
    if isinstance(gm, Traced):
        return park_unused(gm, idle)
    for target in idle:
        gm.delete_submodule(target)
    return idle


def calls_of(gm: fx.GraphModule, target: str) -> list[fx.Node]:
    """List the calls of a submodule in the graph of a module and in its views."""
    graphs = _graphs_of(gm)
    return [n for graph in graphs for n in graph.find_nodes(op="call_module", target=target)]


def _graphs_of(gm: fx.GraphModule) -> list[fx.Graph]:
    return [gm.graph, *(view.graph for view in views_of(gm))]


def views_of(gm: nn.Module) -> Iterator[SubgraphView]:
    """Yield the views of chains of a module, which its children wrap."""
    for child in gm._modules.values():
        view = innermost(child) if child is not None else None
        if isinstance(view, SubgraphView) and view.owner is gm:
            yield view


def _has(gm: fx.GraphModule, path: str) -> bool:
    try:
        gm.get_submodule(path)
    except AttributeError:
        return False
    return True


def _needs(graph: fx.Graph, gm: fx.GraphModule, path: str) -> bool:
    """Tell whether a graph calls a module, one around it, or something in it, or reads from it."""
    atoms = path.split(".")
    around = [".".join(atoms[:length]) for length in range(1, len(atoms) + 1)]
    if any(graph.find_nodes(op="call_module", target=p, sort=False) for p in around):
        return True
    # Most modules have no children, so that nothing in them can be called.
    ops = ("get_attr", "call_module") if gm.get_submodule(path)._modules else ("get_attr",)
    inner = (str(n.target) for op in ops for n in graph.find_nodes(op=op, sort=False))
    return any(p == path or p.startswith(f"{path}.") for p in inner)
