"""What a rewrite will do: checked in full before anything changes, then done in all graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import nn

from slapo.graph.match.canonical import ModuleState
from slapo.graph.rewrite.arguments import is_optional
from slapo.graph.rewrite.bookkeeping import check_stem, drop_unused, first_free_name, graphs_of
from slapo.graph.rewrite.may_move import may_move, outward_effects
from slapo.graph.rewrite.subgraph import check_closed, in_order, subgraph_inputs
from slapo.graph.trace.modes import TWIN
from slapo.graph.trace.nodes import nodes_in
from slapo.graph.trace.operator_effects import MARKS
from slapo.graph.trace.results import result_at


@dataclass(frozen=True)
class NewCall:
    """The call that takes the place of operations.

    Parameters
    ----------
    new
        A module, which becomes a submodule, or a function.
    stem
        The submodule will be called ``<stem>_<k>``.
    args, kwargs
        The arguments, of which nodes belong to the graph.
    side_by_side
        The call gives one result for each of several subgraphs.
    keep_modules
        Submodules that are called no more stay.
    """

    new: Callable[..., Any]
    stem: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    side_by_side: bool = False
    keep_modules: bool = False

    def __post_init__(self) -> None:
        if not callable(self.new):
            raise TypeError(f"the replacement must be a module or a function, got {self.new!r}")


@dataclass(frozen=True)
class Plan:
    """A rewrite of one graph; made by :func:`lay_out`, which checks it, done by :func:`apply`.

    Parameters
    ----------
    gm
        The owner of the graph.
    chains
        The operations that go, in graph order; the last of each gives its value.
    place
        The new call will stand before this node.
    call
        The new call.
    effects
        What it does beside returning values.
    """

    gm: fx.GraphModule
    chains: tuple[tuple[fx.Node, ...], ...]
    place: fx.Node
    call: NewCall
    effects: frozenset[str]

    @property
    def nodes(self) -> list[fx.Node]:
        """The operations that go, in graph order."""
        return sorted(node for chain in self.chains for node in chain)


def lay_out(gm: fx.GraphModule, chains: Sequence[Collection[fx.Node]], call: NewCall) -> Plan:
    """Check that a call can take the place of operations; nothing is changed.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of the graph.
    chains : sequence of collections of torch.fx.Node
        The operations; several chains for a call that stands side by side.
    call : NewCall
        The new call.

    Returns
    -------
    Plan
        What :func:`apply` takes.

    Raises
    ------
    ValueError
        If an inner value is used outside, there is no place for the call, the name is none, or an
        operation may not move there.
    """
    if isinstance(call.new, nn.Module):
        check_stem(call.stem)
    ordered = tuple(tuple(in_order(gm, chain)) for chain in chains)
    for chain in ordered:
        check_closed(chain)
    inside = {node for chain in ordered for node in chain}
    place = _place_before_uses(ordered, call) if call.side_by_side else ordered[0][-1]
    may_move(gm, inside, place)
    return Plan(gm, ordered, place, call, outward_effects(gm, inside))


def apply(plans: Sequence[Plan]) -> fx.Node:
    """Do what was planned for the graphs of one module.

    Parameters
    ----------
    plans : sequence of Plan
        For one graph each. A new submodule gets the same name in all, and the submodules that no
        graph needs any more go.

    Returns
    -------
    torch.fx.Node
        The new call in the graph of the first plan.
    """
    # A traced module whose graph alone is changed would drop its further graphs.
    together = getattr(type(plans[0].gm), "rewritten_together", nullcontext)
    with together(plans[0].gm):
        return _apply(plans)


def _apply(plans: Sequence[Plan]) -> fx.Node:
    first = plans[0]
    target: Any = first.call.new
    if isinstance(target, functools.partial):
        target = _with_name(target)
    if isinstance(target, nn.Module):
        target = first_free_name(first.gm, first.call.stem)
        first.gm.add_module(target, first.call.new)  # type: ignore[arg-type]
    number = _free_number(first.gm) if first.call.side_by_side else None
    called = [str(n.target) for plan in plans for n in plan.nodes if n.op == "call_module"]
    calls = [_rewrite(plan, target, number) for plan in plans]
    if not first.call.keep_modules:
        drop_unused(first.gm, called)
    for plan in plans:
        plan.gm.recompile()
    return calls[0]


def _with_name(function: functools.partial[Any]) -> Any:
    """A partial as graphs write calls: by name, which must not be that of the bare function."""
    named: Any = functools.partial(function)
    named.__name__ = f"partial_{getattr(function.func, '__name__', 'call')}"
    named.__module__ = functools.__name__
    return named


def _rewrite(plan: Plan, target: Any, number: int | None) -> fx.Node:
    """Put the call into one graph and take the operations out of it."""
    graph, inputs = plan.gm.graph, subgraph_inputs(plan.nodes)
    with graph.inserting_before(plan.place):
        args, kwargs = (_with_state(graph, v) for v in (plan.call.args, dict(plan.call.kwargs)))
        op = "call_module" if isinstance(plan.call.new, nn.Module) else "call_function"
        call = graph.create_node(op, target, args, kwargs)
        if plan.call.side_by_side:
            for index, chain in enumerate(plan.chains):
                place = (call, index, len(plan.chains))
                _take_over(chain[-1], graph.call_function(result_at, place))
        else:
            _take_over(plan.chains[0][-1], call)
    if number is not None:
        call.meta[TWIN] = number
    call.meta[MARKS] = plan.effects
    for node in reversed(plan.nodes):
        graph.erase_node(node)
    _erase_idle(inputs)
    return call


def _with_state(graph: fx.Graph, value: Any) -> Any:
    """Look up the parameters of called modules that are arguments now."""
    if isinstance(value, ModuleState):
        return graph.create_node("get_attr", f"{value.target}.{value.name}")
    if isinstance(value, (tuple, list)):
        return type(value)(_with_state(graph, item) for item in value)
    if isinstance(value, dict):
        return {name: _with_state(graph, item) for name, item in value.items()}
    return value


def _take_over(old: fx.Node, new: fx.Node) -> None:
    """Give the users of a node, and what is known of its value, to another."""
    old.replace_all_uses_with(new)
    new.meta = {key: value for key, value in old.meta.items() if key != MARKS}
    new.type = old.type


def _erase_idle(inputs: Sequence[fx.Node]) -> None:
    """Erase sizes and flags that only the operations have used."""
    idle = [value for value in inputs if is_optional(value)]
    while idle:
        value = idle.pop()
        if not value.users and not value._erased and is_optional(value):
            idle.extend(value.all_input_nodes)
            value.graph.erase_node(value)


def _place_before_uses(chains: Sequence[Sequence[fx.Node]], call: NewCall) -> fx.Node:
    """Find the node before which a call can stand: after its inputs, before all uses."""
    inside = {node for chain in chains for node in chain}
    inputs = {*subgraph_inputs(inside), *nodes_in((call.args, call.kwargs))}
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


def _free_number(gm: fx.GraphModule) -> int | None:
    """Choose a number for an operation that is new in all graphs; None if there is one graph."""
    graphs = graphs_of(gm)
    return 1 + max(_numbers(graphs), default=-1) if len(graphs) > 1 else None


def _numbers(graphs: Sequence[fx.GraphModule]) -> Iterator[int]:
    for gm in graphs:
        yield from (node.meta[TWIN] for node in gm.graph.nodes if TWIN in node.meta)
