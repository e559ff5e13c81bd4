"""Some operations of a traced module as a module that has no state of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx, nn

from slapo.graph.rewrite.subgraph import subgraph_inputs
from slapo.graph.trace.contract import CallContract
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.names import spare_self
from slapo.graph.trace.state import SLOTS


class Subgraph(nn.Module):
    """What a view calls itself."""


def subgraph_view(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> TracedModule:
    """A module that runs `nodes` on the state of `gm`.

    It looks children and parameters up in `gm`, by name, at every call; so it follows when one of
    them is replaced there. Its inputs are those of the subgraph in order of first use.
    """
    graph = spare_self(fx.Graph())
    copies = {value: graph.placeholder(value.name) for value in subgraph_inputs(nodes)}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[nodes[-1]])
    view = TracedModule.from_graph(Subgraph(), graph, CallContract())
    for slot in SLOTS:
        view.__dict__[slot] = gm.__dict__[slot]
    view.training = gm.training
    return view
