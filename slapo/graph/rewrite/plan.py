"""Plan of a rewrite of one graph, checked completely before anything changes."""

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
    """A rewrite of one graph, made and checked by :func:`lay_out`.

    The last node of each chain is its result. The new call goes before `place`; side by side it
    returns one result per chain. `meta` is stored on the call.
    """

    graph: fx.Graph
    chains: list[list[fx.Node]]
    place: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    side_by_side: bool
    meta: dict[str, Any] = field(default_factory=dict)
    #: the new call, once inserted
    call: fx.Node | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """The replaced operations, in graph order."""
        return sorted(node for chain in self.chains for node in chain)

    def carry_out(self, target: Any, checked: bool = False) -> None:
        """Replace the operations by the call of a function, or of a submodule by its path.

        With `checked`, a node checks side-by-side results. It is meant for graphs that run but are
        never shown.
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
                # Marks describe the call; the value taken out of its results has no effects of its
                # own.
                value.meta = {k: v for k, v in chain[-1].meta.items() if k != MARKS}
                value.type = chain[-1].type
        call.meta.update(self.meta)
        # Users first, since fx refuses to erase a node that has some.
        for node in reversed(nodes):
            for check in [user for user in node.users if user.target is check_results]:
                graph.erase_node(check)
            graph.erase_node(node)
        _erase_idle_sizes(inputs)


def check_results(results: Any, count: int, name: str) -> None:
    """Require one result per chain, since indexing a single tensor would take its rows."""
    is_tensor = isinstance(results, Tensor)
    if is_tensor or len(results) != count:
        given = "one tensor" if is_tensor else f"{len(results)} results"
        raise SlapoError(wrong_results(repr(name), given, count))


def wrong_results(callee: str, given: str, count: int) -> str:
    """Return the message for a replacement of several chains with wrong results."""
    return (
        f"{callee} returns {given}, but replaces {count} subgraphs side by side; "
        f"return a tuple of {count} results, one for each subgraph"
    )


def lay_out(
    gm: HasGraph,
    chains: Sequence[Collection[fx.Node]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    side_by_side: bool = False,
) -> Plan:
    """Check that one call can replace the operations, without changing anything."""
    ordered = [in_order(chain) for chain in chains]
    for chain in ordered:
        check_closed(chain)
    inside = {node for chain in ordered for node in chain}
    # One chain becomes a call at its last node, where all inputs are known. Of several chains, one
    # may end before another's inputs are known, so a place is sought before the first use of any
    # result.
    place = _place_before_uses(ordered, (args, kwargs)) if side_by_side else ordered[0][-1]
    check_reorder(gm, inside, place)
    meta = {MARKS: outward_effects(gm, inside)}
    return Plan(gm.graph, ordered, place, args, kwargs, side_by_side, meta)


def in_order(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Sort the nodes of a subgraph in graph order; refuse nodes that are not its operations."""
    unique = set(nodes)
    for node in unique:
        if node.op in ("placeholder", "output"):
            raise ValueError(
                f"node {node.name!r} is the graph's {node.op}; only operations can be replaced"
            )
    return sorted(unique)


def check_closed(nodes: Collection[fx.Node]) -> None:
    """Refuse a subgraph if more than its last value is used outside."""
    inside = set(nodes)
    for node in sorted(inside)[:-1]:
        for user in node.users:
            if user not in inside and user.target is not check_results:
                raise ValueError(
                    f"inner value {node.name!r} of the subgraph is also used outside, by "
                    f"{user.name!r}; include that use in the pattern, or leave {node.name!r} out"
                )


def subgraph_inputs(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Return the values that a subgraph takes from outside, in order of first use."""
    inside = set(nodes)
    inputs = (value for node in sorted(inside) for value in node.all_input_nodes)
    return list(dict.fromkeys(value for value in inputs if value not in inside))


def common_inputs(chains: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    """Return the inputs of side-by-side subgraphs; refuse dependent subgraphs."""
    owner: dict[fx.Node, int] = {}
    for index, chain in enumerate(chains):
        for node in chain:
            if owner.setdefault(node, index) != index:
                raise ValueError(f"node {node.name!r} is in several of the subgraphs")
    inputs = [subgraph_inputs(chain) for chain in chains]
    for index, values in enumerate(inputs):
        for value in values:
            if value in owner:
                raise ValueError(
                    f"subgraph {owner[value]} feeds subgraph {index} (by {value.name!r}), so they "
                    "cannot become one call; replace them one by one, or as one chain"
                )
        # The sizes that a subgraph uses may differ, as a call can do without them.
        if not all(map(is_size, set(values) ^ set(inputs[0]))):
            raise ValueError(
                f"the subgraphs have different inputs: {inputs[0]} and {values}; "
                "one call can only replace subgraphs with the same inputs"
            )
    return list(dict.fromkeys(value for values in inputs for value in values))


def _place_before_uses(chains: Sequence[Sequence[fx.Node]], arguments: Any) -> fx.Node:
    """Return the node before which a call can be placed: after its inputs, before all uses."""
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
    """Insert get_attr nodes for module parameters that are arguments now."""
    if isinstance(value, ModuleState):
        return graph.create_node("get_attr", f"{value.target}.{value.name}")
    return value


def _erase_idle_sizes(inputs: Sequence[fx.Node]) -> None:
    """Erase sizes that only the replaced operations used."""
    idle = [value for value in inputs if is_size(value)]
    while idle:
        value = idle.pop()
        if not value.users and not value._erased and is_size(value):
            idle.extend(value.all_input_nodes)
            value.graph.erase_node(value)
