"""Subgraphs: what goes in and out of a set of nodes."""

from __future__ import annotations

from collections.abc import Collection

import torch.fx as fx


def subgraph_inputs(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """List the values that a subgraph takes from outside.

    Parameters
    ----------
    nodes : collection of torch.fx.Node
        The subgraph.

    Returns
    -------
    list of torch.fx.Node
        The inputs in order of first use.

    Examples
    --------
    >>> gm = fx.symbolic_trace(lambda x, y: (y * x).relu() + y)
    >>> subgraph_inputs([n for n in gm.graph.nodes if n.op.startswith("call")])
    [y, x]
    """
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in sorted(inside):
        for value in node.all_input_nodes:
            if value not in inside:
                inputs[value] = None
    return list(inputs)


def check_closed(nodes: Collection[fx.Node]) -> None:
    """Check that only the last value of a subgraph is used outside of it.

    Parameters
    ----------
    nodes : collection of torch.fx.Node
        The subgraph.

    Raises
    ------
    ValueError
        If another value is used outside; the message names both nodes.

    Examples
    --------
    >>> gm = fx.symbolic_trace(lambda x: x.exp().relu())
    >>> check_closed([n for n in gm.graph.nodes if n.op.startswith("call")])
    """
    inside = set(nodes)
    for node in sorted(inside)[:-1]:
        for user in node.users:
            if user not in inside:
                raise ValueError(
                    f"inner value {node.name!r} of the subgraph is also used outside, by "
                    f"{user.name!r}; include that use in the pattern, or leave {node.name!r} out"
                )


def in_order(gm: fx.GraphModule, nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Put the nodes of a subgraph in graph order; refuse what is no operation of the graph.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of the graph.
    nodes : collection of torch.fx.Node
        The subgraph.

    Returns
    -------
    list of torch.fx.Node
        Each node once.

    Raises
    ------
    TypeError
        If something else than a node is given.
    ValueError
        If there is no node, or one of them is of another graph, erased, an input or the output.

    Examples
    --------
    >>> gm = fx.symbolic_trace(lambda x: x.exp().relu())
    >>> in_order(gm, reversed(list(gm.graph.find_nodes(op="call_method"))))
    [exp, relu]
    """
    unique = set(nodes)
    for node in unique:
        if not isinstance(node, fx.Node):
            raise TypeError(f"a subgraph is a list of graph nodes, got {node!r} in it")
        if node._erased or node.graph is not gm.graph:
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
