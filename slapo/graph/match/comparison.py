"""The ways to lay the arguments of a pattern's call over those of a graph's call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.fx as fx

from slapo.graph.match.canonical import Call, positions_and_names
from slapo.graph.match.sizes import sizes_agree
from slapo.graph.match.steps import Step
from slapo.graph.match.values import same_value
from slapo.graph.trace.nodes import Pair

MISSING = object()
"""The value of an argument that a call neither states nor has a default for."""


def argument_pairs(step: Step, node: fx.Node, call: Call) -> Iterator[list[Pair]]:
    """Yield lists of pairs: a value of the pattern and one of the graph, constants first."""
    if step.regex is not None:
        yield from _named_pairs(step, node, call)
        return
    stated, given, op = step.call.args, call.args, call.op
    if stated is None or given is None:
        return
    if is_free_form(step, node):
        stated = {name: value for name, value in stated.items() if name not in step.implied}
    elif not _rest_agrees(step, call):
        return
    values = {name: given.get(name, call.defaults.get(str(name), MISSING)) for name in stated}
    yield _paired(stated, values)
    if op and op.swap and op.swap[0] in values and op.swap[1] in values and _swaps(values):
        first, second = op.swap
        values[first], values[second] = values[second], values[first]
        yield _paired(stated, values)


def is_free_form(step: Step, node: fx.Node) -> bool:
    """Tell whether a functional call of the pattern meets a module.

    What the call leaves out, and sizes, are parameters and attributes of the module's own: any do.
    """
    return step.module is None and step.regex is None and node.op == "call_module"


def _rest_agrees(step: Step, call: Call) -> bool:
    """Compare sizes, and what only the graph's call states with its default."""
    stated, given, op = step.call.args or {}, call.args or {}, call.op
    skipped = op.free | op.ignored | op.sizes if op else frozenset()
    return all(
        same_value(step.call.defaults.get(str(name), MISSING), given[name])
        for name in given.keys() - stated.keys() - skipped
    ) and all(sizes_agree(sizes, given.get(name, MISSING)) for name, sizes in step.sizes.items())


def _paired(wanted: Mapping[str | int, Any], values: Mapping[str | int, Any]) -> list[Pair]:
    """Pair by name; a constant that differs ends the search before it begins."""
    pairs = [(value, values[name]) for name, value in wanted.items()]
    return sorted(pairs, key=lambda pair: isinstance(pair[0], fx.Node))


def _swaps(values: dict[str | int, Any]) -> bool:
    """Tell whether operands may change places: not when one is scaled by ``alpha``."""
    return same_value(values.get("alpha", 1), 1)


def _named_pairs(step: Step, node: fx.Node, call: Call) -> Iterator[list[Pair]]:
    """Compare the arguments that a pattern states for a module that it names."""
    wanted = dict(step.call.args or {})
    given = positions_and_names(node.args, node.kwargs)
    if not wanted.keys() <= given.keys():
        # The same argument may be positional on one side and a keyword on the other.
        names = list(call.args or {})
        wanted = {
            names[k] if isinstance(k, int) and k < len(names) else k: v for k, v in wanted.items()
        }
        given = dict(call.args or {})
    if wanted.keys() <= given.keys():
        yield _paired(wanted, given)
