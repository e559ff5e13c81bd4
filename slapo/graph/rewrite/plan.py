"""The plan of a rewrite of one graph: checked in full before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any

import torch.fx as fx
from torch import Tensor

from slapo.errors import SlapoError
from slapo.graph.match.canonical import ModuleState
from slapo.graph.match.dataflow import is_size
from slapo.graph.rewrite.effects import HasGraph
from slapo.graph.rewrite.reorder import check_reorder, outward_effects
from slapo.graph.trace.nodes import nodes_in
from slapo.graph.trace.operator_effects import MARKS


@dataclass
class Plan:
    """A rewrite of one graph; :func:`lay_out` makes and checks it.

    The last node of each chain gives its value. The new call will stand before `place`; side by
    side it gives one result for each chain. `meta` is what is noted with the call.
    """

    graph: fx.Graph
    chains: list[list[fx.Node]]
    place: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    side_by_side: bool
    meta: dict[str, Any] = field(default_factory=dict)
    #: the new call, once it is there
    call: fx.Node | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """The operations that go, in graph order."""
        return sorted(node for chain in self.chains for node in chain)

    def carry_out(self, target: Any, checked: bool = False) -> None:
        """Put the call of a submodule, by its path, or of a function where the operations are.

        In a graph that runs and is not looked at, results side by side are `checked` by a node.
        """
        graph, nodes = self.graph, self.nodes
        inputs = subgraph_inputs(nodes)
        with graph.inserting_before(self.place):
            given = (self.args, dict(self.kwargs))
            args, kwargs = fx.node.map_aggregate(given, partial(_with_state, graph))
            op = "call_module" if isinstance(target, str) else "call_function"
            self.call = call = graph.create_node(op, target, args, kwargs)
            if checked and self.side_by_side:
                graph.call_function(check_results, (call, len(self.chains), call.name))
            for index, chain in enumerate(self.chains):
                value = graph.call_function(getitem, (call, index)) if self.side_by_side else call
                chain[-1].replace_all_uses_with(value)
                value.meta = {k: v for k, v in chain[-1].meta.items() if k != MARKS}
                value.type = chain[-1].type
        call.meta.update(self.meta)
        for node in reversed(nodes):
            for check in [user for user in node.users if user.target is check_results]:
                graph.erase_node(check)
            graph.erase_node(node)
        _erase_idle_sizes(inputs)


def check_results(results: Any, count: int, name: str) -> None:
    """Refuse other than one result for each chain: an index would take a tensor's rows for them."""
    is_tensor = isinstance(results, Tensor)
    if is_tensor or len(results) != count:
        given = "one tensor" if is_tensor else f"{len(results)} results"
        raise SlapoError(wrong_results(repr(name), given, count))


def wrong_results(callee: str, given: str, count: int) -> str:
    """Say what a call must return that takes the place of several chains."""
    return (
        f"{callee} returns {given}, but takes the place of {count} subgraphs side by side; "
        f"return a tuple of {count} results, one for each subgraph"
    )


def lay_out(
    gm: HasGraph,
    chains: Sequence[Collection[fx.Node]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    side_by_side: bool = False,
) -> Plan:
    """Check that one call can take the place of operations; nothing is changed."""
    ordered = [in_order(gm.graph, chain) for chain in chains]
    for chain in ordered:
        check_closed(chain)
    inside = {node for chain in ordered for node in chain}
    place = _place_before_uses(ordered, (args, kwargs)) if side_by_side else ordered[0][-1]
    check_reorder(gm, inside, place)
    meta = {MARKS: outward_effects(gm, inside)}
    return Plan(gm.graph, ordered, place, args, kwargs, side_by_side, meta)


def in_order(graph: fx.Graph, nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Put the nodes of a subgraph in graph order; refuse nodes that are not operations of it."""
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


def check_closed(nodes: Collection[fx.Node]) -> None:
    """Refuse, by a ``ValueError``, a subgraph of which more than the last value is used outside."""
    inside = set(nodes)
    for node in sorted(inside)[:-1]:
        for user in node.users:
            if user not in inside and user.target is not check_results:
                raise ValueError(
                    f"inner value {node.name!r} of the subgraph is also used outside, by "
                    f"{user.name!r}; include that use in the pattern, or leave {node.name!r} out"
                )


def subgraph_inputs(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """List the values that a subgraph takes from outside, in order of first use."""
    inside = set(nodes)
    inputs = (value for node in sorted(inside) for value in node.all_input_nodes)
    return list(dict.fromkeys(value for value in inputs if value not in inside))


def common_inputs(chains: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    """The inputs of side-by-side subgraphs; refuses those that are not independent."""
    if not chains:
        raise ValueError("there is no subgraph to replace; hand over what find() returned")
    owner: dict[fx.Node, int] = {}
    for index, chain in enumerate(chains):
        for node in chain:
            if owner.setdefault(node, index) != index:
                raise ValueError(f"node {node.name!r} is part of several of the subgraphs")
    inputs = [subgraph_inputs(chain) for chain in chains]
    for index, values in enumerate(inputs):
        for value in values:
            if value in owner:
                raise ValueError(
                    f"subgraph {owner[value]} feeds subgraph {index} (by {value.name!r}), so they "
                    "cannot become one call; replace them one by one, or as one chain"
                )
        # The sizes that a subgraph uses may differ: a call can do without them.
        if not all(map(is_size, set(values) ^ set(inputs[0]))):
            raise ValueError(
                f"the subgraphs have different inputs: {inputs[0]} and {values}; "
                "one call can only replace subgraphs with the same inputs"
            )
    return list(dict.fromkeys(value for values in inputs for value in values))


def _place_before_uses(chains: Sequence[Sequence[fx.Node]], arguments: Any) -> fx.Node:
    """Find the node before which a call can stand: after its inputs, before all uses."""
    inside = {node for chain in chains for node in chain}
    inputs = {*subgraph_inputs(inside), *nodes_in(arguments)}
    start, last_input = min(inside), max(inputs, default=None)
    if last_input is None or last_input < start:
        return start
    for result in (chain[-1] for chain in chains):
        for user in result.users:
            if user <= last_input:
                raise ValueError(
                    f"result {result.name!r} is used by {user.name!r} before the input "
                    f"{last_input.name!r} is known; replace the subgraphs one by one"
                )
    return last_input.next


def _with_state(graph: fx.Graph, value: Any) -> Any:
    """Look up the parameters of called modules that are arguments now."""
    if isinstance(value, ModuleState):
        return graph.create_node("get_attr", f"{value.target}.{value.name}")
    return value


def _erase_idle_sizes(inputs: Sequence[fx.Node]) -> None:
    """Erase sizes that only the operations have used."""
    idle = [value for value in inputs if is_size(value)]
    while idle:
        value = idle.pop()
        if not value.users and not value._erased and is_size(value):
            idle.extend(value.all_input_nodes)
            value.graph.erase_node(value)
