"""Inputs that a recorded graph may be called without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from slapo.errors import TraceError
from slapo.graph.trace.modes import same_without
from slapo.graph.trace.module import CallContract, Guard
from slapo.graph.trace.recorder.expressions import Size
from slapo.graph.trace.recorder.guards import SizeGuard


@dataclass(frozen=True)
class UnlessNone(SizeGuard):
    """A guard that concerns a parameter only when it is given."""

    parameter: str = ""
    guard: Guard = field(default_factory=lambda: SizeGuard(""))

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """See :meth:`SizeGuard.holds`."""
        return bound.get(self.parameter) is None or self.guard.holds(bound)


def allow_none(
    contract: CallContract,
    graph: fx.Graph,
    defaults_to_none: list[str],
    record_without: Callable[[str], fx.Graph],
) -> CallContract:
    """The contract, with None allowed where it takes no other path through the code.

    A module that hands an optional mask on to a function works without it too; one that asks
    ``if mask is not None`` does not. A second recording tells.

    Parameters
    ----------
    contract, graph
        Of the recording with tensors.
    defaults_to_none
        Parameters recorded as tensors whose default is None.
    record_without
        Records the module again with one of them None.
    """
    for name in defaults_to_none:
        node = next(n for n in graph.nodes if n.op == "placeholder" and n.target == name)
        if not _is_handed_on(node):
            continue
        try:
            same = same_without(graph, record_without(name), name)
        except TraceError:
            continue
        if same:
            contract = _without_demand(contract, name)
    return contract


def _is_handed_on(node: fx.Node) -> bool:
    """True when nothing looks into the value: every use passes it to a module or function."""
    return all(
        user.op == "call_module"
        or (user.op == "call_function" and user.target is not getattr)
        or user.op == "output"
        for user in node.users
    )


def _without_demand(contract: CallContract, name: str) -> CallContract:
    guards = tuple(
        UnlessNone(guard.text, True, name, guard) if _mentions(guard, name) else guard
        for guard in contract.size_guards
    )
    return replace(contract, never_none=contract.never_none - {name}, size_guards=guards)


def _mentions(guard: Guard, name: str) -> bool:
    path = getattr(guard, "path", ())
    return bool(path and path[0] == name) or _formula_mentions(
        getattr(guard, "relation", None), name
    )


def _formula_mentions(formula: Any, name: str) -> bool:
    if isinstance(formula, Size):
        return bool(formula.path[0] == name)
    return isinstance(formula, tuple) and any(_formula_mentions(part, name) for part in formula)
