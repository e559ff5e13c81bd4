"""Subgraphs: the values that go in and out of a set of nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch.fx as fx
from torch import nn


class HasGraph(Protocol):
    """A graph with the modules that it calls: a graph module, or a view of a traced module."""

    @property
    def graph(self) -> fx.Graph:
        """The graph."""

    def get_submodule(self, target: str, /) -> nn.Module:
        """The module that a ``call_module`` node calls."""


def attribute(gm: HasGraph, target: str) -> Any:
    """What the target of a ``get_attr`` node leads to."""
    owner, _, name = target.rpartition(".")
    return getattr(gm.get_submodule(owner), name)


def subgraph_inputs(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """List the values that a subgraph takes from outside, in order of first use.

    >>> gm = fx.symbolic_trace(lambda x, y: (y * x).relu() + y)
    >>> subgraph_inputs([n for n in gm.graph.nodes if n.op.startswith("call")])
    [y, x]
    """
    inside = set(nodes)
    inputs = (value for node in sorted(inside) for value in node.all_input_nodes)
    return list(dict.fromkeys(value for value in inputs if value not in inside))


def check_closed(nodes: Collection[fx.Node]) -> None:
    """Refuse, by a ``ValueError``, a subgraph of which more than the last value is used outside."""
    inside = set(nodes)
    for node in sorted(inside)[:-1]:
        for user in node.users:
            if user not in inside:
                raise ValueError(
                    f"inner value {node.name!r} of the subgraph is also used outside, by "
                    f"{user.name!r}; include that use in the pattern, or leave {node.name!r} out"
                )


def in_order(graph: fx.Graph, nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Put the nodes of a subgraph in graph order; refuse what is no operation of the graph."""
    unique = set(nodes)
    for node in unique:
        if not isinstance(node, fx.Node):
            raise TypeError(f"a subgraph is a list of graph nodes, got {node!r} in it")
        if node._erased or node.graph is not graph:
            raise ValueError(
                f"node {node.name!r} is not (or no longer) part of this graph; "
                "call find() again after a rewrite"
            )
        if node.op in ("placeholder", "output"):
            raise ValueError(
                f"node {node.name!r} is the graph's {node.op}; only operations can be replaced"
            )
    if not unique:
        raise ValueError("the subgraph is empty; hand over what find() returned")
    return sorted(unique)
