"""Why a search found nothing: how far it came, what it could not look into, what to try."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch.fx as fx

from slapo.graph.match.canonical import Call
from slapo.graph.match.comparison import MISSING, is_free_form
from slapo.graph.match.hints import (
    hidden_modules,
    listed,
    name_of,
    near_names,
    opaque_calls,
    other_spellings,
    show,
)
from slapo.graph.match.index import TracedGraph
from slapo.graph.match.nearest import NearestMatch, in_its_place, nearest_match
from slapo.graph.match.sizes import sizes_agree
from slapo.graph.match.steps import Step, pattern_steps
from slapo.graph.match.values import same_value
from slapo.graph.trace.nodes import nodes_in


def why_no_subgraph(graphs: Sequence[TracedGraph], pattern: fx.Graph) -> str:
    """Say how much of a pattern the graphs have, what is in the way, and what to try.

    Parameters
    ----------
    graphs
        Where the search looked.
    pattern
        The traced pattern.

    Returns
    -------
    str
        A sentence, and hints on lines of their own.
    """
    steps = pattern_steps(pattern)
    nearest = nearest_match(graphs, steps)
    missing = nearest.missing
    if missing is None:
        return (
            f"all {len(steps)} operations of the pattern are there, {_places(nearest, steps)}, but "
            "one of its arguments would stand for two different values, or for a value that the "
            "match computes itself; give each value an argument of its own"
        )
    hints = [
        *_whereabouts(nearest, missing, graphs),
        *_absent(nearest, steps),
        *other_spellings(missing, graphs),
        *opaque_calls(graphs),
    ]
    return "\n- ".join([_summary(nearest, missing, steps), *hints])


def why_no_call(graphs: Sequence[TracedGraph], regex: re.Pattern[str]) -> str:
    """Say what the modules are called whose calls a regular expression did not match."""
    number = sum(len(traced.graph.find_nodes(op="call_module")) for traced in graphs)
    hints = [*near_names(regex, graphs), *hidden_modules(graphs, regex), *opaque_calls(graphs)]
    summary = f"{regex.pattern!r} matches none of the {number} calls of modules"
    return "\n- ".join([summary, *hints])


def why_no_node(graphs: Sequence[TracedGraph]) -> str:
    """Say how many nodes a predicate was asked about."""
    number = sum(len(graph.nodes) for _, _, graph in graphs)
    summary = f"the predicate holds for none of the {number} nodes"
    return "\n- ".join([summary, *opaque_calls(graphs)])


def _summary(nearest: NearestMatch, missing: Step, steps: dict[fx.Node, Step]) -> str:
    if not nearest.found:
        return f"of the operations of the pattern, {len(steps)} in all, none was found"
    others = [show(n, nearest.place.traced) for n in in_its_place(nearest, missing, steps)]
    return (
        f"{len(nearest.found)} of {len(steps)} operations of the pattern were found together, "
        f"{_places(nearest, steps)}; {name_of(missing)} was not"
        + (f": in its place is {listed(others)}" if others else "")
    )


def _places(nearest: NearestMatch, steps: dict[fx.Node, Step]) -> str:
    path = nearest.place.traced.path
    places = listed([f"{name_of(steps[n])} at {at.name}" for n, at in nearest.found.items()])
    return f"{places} in the graph of {path!r}" if path else places


def _whereabouts(
    nearest: NearestMatch, missing: Step, graphs: Sequence[TracedGraph]
) -> Iterator[str]:
    """Say where else the missing operation is."""
    name = name_of(missing)
    here = nearest.place.index.candidates(missing)
    elsewhere = [repr(p.traced.path) for p in nearest.places if p.index.candidates(missing)]
    if here:
        misfits = [text for node in here for text in _misfits(nearest, missing, node)]
        at = listed([node.name for node in here])
        yield listed(misfits) if misfits else f"{name} is elsewhere, at {at}"
    elif elsewhere:
        yield (
            f"{name} is in the graph of {listed(elsewhere)}, and a match lies in one graph: trace "
            "the common parent with .trace(flatten=True)"
        )
    elif missing.regex is not None:
        yield from near_names(missing.regex, graphs)


def _absent(nearest: NearestMatch, steps: dict[fx.Node, Step]) -> Iterator[str]:
    """Name the operations that no graph has."""
    indices = [place.index for place in nearest.places]
    absent = [
        name_of(steps[node])
        for node in sorted(steps)
        if not any(index.candidates(steps[node]) for index in indices)
    ]
    if absent:
        yield f"no graph here has {listed(absent)}"


def _misfits(nearest: NearestMatch, step: Step, node: fx.Node) -> Iterator[str]:
    """Tell constants of the pattern from other ones of a node that is the same operation."""
    call = nearest.place.index.call(step, node)
    for name, wanted, given in _compared(step, node, call):
        if MISSING not in (wanted, given) and not nodes_in((wanted, given)):
            yield f"{node.name} has {name}={given!r}, the pattern {wanted!r}"


def _compared(step: Step, node: fx.Node, call: Call) -> Iterator[tuple[Any, Any, Any]]:
    """Yield name, value in the pattern and value in the graph of arguments that differ."""
    wanted: dict[Any, Any] = {**step.sizes, **dict(step.call.args or {})}
    given = call.args or {}
    names = set(wanted)
    if is_free_form(step, node):
        names -= {*step.implied, *step.sizes}
    elif step.regex is None:
        names |= given.keys() - (call.op.free | call.op.ignored | call.op.sizes if call.op else ())
    for name in sorted(names, key=str):
        one = wanted.get(name, step.call.defaults.get(str(name), MISSING))
        other = given.get(name, call.defaults.get(str(name), MISSING))
        same = sizes_agree if name in step.sizes else same_value
        if not same(one, other):
            yield name, one, other
