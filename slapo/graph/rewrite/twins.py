"""One rewrite in several graphs: those of a traced module for different kinds of calls.

A model called with and without a mask has two graphs over the same submodules. Operations that are
the same in both carry the same number, ``node.meta["slapo_twin"]``. What replaces them in one graph
replaces them in the others too, where they are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from slapo.graph.match.values import same_constant
from slapo.graph.rewrite.bookkeeping import graphs_of
from slapo.graph.rewrite.plan import Plan, lay_out
from slapo.graph.trace.modes import TWIN
from slapo.graph.trace.nodes import CONTAINERS, inner_pairs
from slapo.logger import get_logger

logger = get_logger("slapo")


def with_twins(plan: Plan) -> tuple[Plan, ...]:
    """Plan the same rewrite for all graphs of a module that have the same operations.

    Parameters
    ----------
    plan : Plan
        The rewrite of one graph.

    Returns
    -------
    tuple of Plan
        `plan`, and one for each further graph. A graph that has only some of the operations, or
        has them otherwise, keeps its own; that is logged.

    Examples
    --------
    >>> from slapo.graph.rewrite.plan import NewCall
    >>> gm = fx.symbolic_trace(lambda x: x.exp())
    >>> x, exp, _ = gm.graph.nodes
    >>> len(with_twins(lay_out(gm, [[exp]], NewCall(abs, "", (x,), {}))))
    1
    """
    plans = [plan]
    for other in graphs_of(plan.gm):
        if other is plan.gm:
            continue
        try:
            twin = _twin_plan(plan, other)
        except ValueError as difference:
            kept = ", ".join(node.name for node in plan.nodes)
            logger.info("another graph of the module keeps its own %s: %s", kept, difference)
        else:
            plans.extend([twin] if twin else [])
    return tuple(plans)


def _twin_plan(plan: Plan, other: fx.GraphModule) -> Plan | None:
    """Plan the rewrite of another graph; None if it has none of the operations."""
    twins = _twins(plan.nodes, other)
    if not twins:
        return None
    alone = [node.name for node in plan.nodes if node not in twins]
    if alone:
        raise ValueError(f"it has no {', '.join(alone)}")
    correspondence = _Correspondence(plan.gm, other, twins)
    for node, twin in twins.items():
        correspondence.check(node, twin)
    chains = [[twins[node] for node in chain] for chain in plan.chains]
    for chain in chains:
        if max(chain) is not chain[-1]:
            raise ValueError(f"{chain[-1].name} is not the last of them there")
    args = correspondence.translated(plan.call.args)
    kwargs = correspondence.translated(dict(plan.call.kwargs))
    return lay_out(other, chains, dataclasses.replace(plan.call, args=args, kwargs=kwargs))


def _twins(nodes: Sequence[fx.Node], other: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Pair nodes with those of another graph that have the same number."""
    wanted = {node.meta[TWIN]: node for node in nodes if TWIN in node.meta}
    found = {}
    for twin in other.graph.nodes if wanted else ():
        node = wanted.get(twin.meta.get(TWIN))
        if node is not None:
            found[node] = twin
    return {node: found[node] for node in nodes if node in found}


class _Correspondence:
    """Which values of two graphs stand for one another around paired operations."""

    def __init__(
        self, gm: fx.GraphModule, other: fx.GraphModule, twins: dict[fx.Node, fx.Node]
    ) -> None:
        self._gm, self._other = gm, other
        self._there = dict(twins)
        self._here = {twin: node for node, twin in twins.items()}

    def check(self, node: fx.Node, twin: fx.Node) -> None:
        """Refuse a pair of operations that are not the same."""
        if node.op != twin.op or not self._same_target(node, twin):
            raise ValueError(f"{node.name} calls {node.target}, and {twin.target} there")
        if not self._same((node.args, dict(node.kwargs)), (twin.args, dict(twin.kwargs))):
            raise ValueError(
                f"{node.name} has the arguments {(*node.args, dict(node.kwargs))}, and "
                f"{(*twin.args, dict(twin.kwargs))} there"
            )

    def translated(self, value: Any) -> Any:
        """Put the nodes of the other graph in place of this one's."""
        return fx.map_arg(value, self._translated_node)

    def _translated_node(self, node: fx.Node) -> fx.Node:
        if node not in self._there:
            raise ValueError(f"nothing there is known to be {node.name}")
        return self._there[node]

    def _same_target(self, node: fx.Node, twin: fx.Node) -> bool:
        if node.op != "call_module" or node.target != twin.target:
            return node.target is twin.target or node.target == twin.target
        path = str(node.target)
        return self._gm.get_submodule(path) is self._other.get_submodule(path)

    def _same(self, one: Any, other: Any) -> bool:
        """Compare arguments; inputs from outside are paired when they are first met."""
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            there = self._there.setdefault(one, other)
            return there is other and self._here.setdefault(other, one) is one
        if isinstance(one, CONTAINERS) and type(one) is type(other):
            pairs = inner_pairs(one, other)
            return pairs is not None and all(self._same(a, b) for a, b in pairs)
        return same_constant(one, other)
