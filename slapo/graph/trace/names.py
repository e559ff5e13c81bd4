"""Names of nodes that generated code cannot have."""

from __future__ import annotations

from torch import fx


def spare_self(graph: fx.Graph) -> fx.Graph:
    """The empty `graph`, in which no node will be called ``self``.

    Nodes are named after the modules they call, and BERT has a child ``self``: its result would
    take the name of the first parameter of the generated forward.

    Examples
    --------
    >>> graph = spare_self(fx.Graph())
    >>> graph.call_module("self").name
    'self_1'
    """
    graph.erase_node(graph.create_node("placeholder", "self", name="self"))
    return graph
