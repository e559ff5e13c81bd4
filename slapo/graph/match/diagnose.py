"""Explanation of an empty search: the nearest match, opaque modules, and advice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.fx as fx
from torch import nn

from slapo.graph.match.canonical import MISSING, key_of
from slapo.graph.match.index import GraphIndex, compared_arguments
from slapo.graph.match.pattern_ops import Step, pattern_steps
from slapo.graph.match.search import furthest
from slapo.graph.match.values import same_value
from slapo.graph.trace.leaves import is_opaque, is_torch_leaf
from slapo.graph.trace.nodes import nodes_in
from slapo.wrapper import innermost

_SHOWN = 4
# Layers are alike, so a few starts suffice. More would make the explanation slower than the search.
_STARTS_PER_OPERATION = 8
_STARTS = 200


class TracedGraph(NamedTuple):
    """A graph of a traced module, and the module's path relative to the start of the search."""

    path: str
    module: fx.GraphModule
    graph: fx.Graph


Graphs = Sequence[TracedGraph]


def why_no_subgraph(graphs: Graphs, pattern: fx.Graph) -> str:
    """Describe the nearest match of a pattern, the obstacle, and possible fixes."""
    nearest = nearest_match(graphs, pattern_steps(pattern))
    missing, number = nearest.missing, len(nearest.steps)
    if missing is None:
        return (
            f"all {number} operations of the pattern were found, {_found(nearest)}, but one of its "
            "arguments would bind to two different values, or to a value computed inside the "
            "match; give each value its own argument"
        )
    if nearest.found:
        others = _listed(_show(n, nearest.places[0][0]) for n in nearest.in_place_of(missing))
        summary = (
            f"{len(nearest.found)} of {number} operations of the pattern were found together, "
            f"{_found(nearest)}; {_name(missing)} was not{others and ': in its place is '}{others}"
        )
    else:
        there = _listed(sorted(_operations(graphs)))
        summary = f"none of the pattern's operations ({number} in all) was found; there are {there}"
    hints = [*_whereabouts(nearest, missing, graphs), *_other_spellings(missing, graphs)]
    return "\n- ".join([summary, *hints, *_opaque_calls(graphs)])


def why_no_call(graphs: Graphs, regex: re.Pattern[str]) -> str:
    """Describe the called modules that a regular expression did not match."""
    summary = f"{regex.pattern!r} matches none of the {len(_calls(graphs))} module calls"
    return "\n- ".join([summary, _near_names(regex, graphs), *_opaque_calls(graphs)])


def why_no_node(graphs: Graphs) -> str:
    """Describe the nodes for which a predicate was false."""
    nodes = [_show(node, traced) for traced in graphs for node in traced.graph.nodes]
    summary = f"the predicate is false for all {len(nodes)} nodes; there are {_listed(nodes)}"
    return "\n- ".join([summary, *_opaque_calls(graphs)])


def _found(nearest: NearestMatch) -> str:
    path = nearest.places[0][0].path
    names = _listed(f"{_name(nearest.steps[n])} at {at.name}" for n, at in nearest.found.items())
    return f"{names} in the graph of {path!r}" if path else names


def _whereabouts(nearest: NearestMatch, missing: Step, graphs: Graphs) -> Iterator[str]:
    """Describe where else the missing operation occurs."""
    name = _name(missing)
    here = nearest.places[0][1].candidates[missing.node]
    elsewhere = nearest.occurs(missing.node)
    if here:
        misfits = _listed(text for node in here for text in _misfits(nearest, missing, node))
        yield misfits or f"{name} occurs elsewhere, at {_listed(node.name for node in here)}"
    elif elsewhere:
        yield (
            f"{name} is in the graph of {_listed(map(repr, elsewhere))}, but a match cannot span "
            "graphs: trace the common parent with .trace(flatten=True)"
        )
    elif missing.regex is not None:
        yield _near_names(missing.regex, graphs)
    steps = nearest.steps
    absent = _listed(_name(steps[n]) for n in sorted(steps) if not nearest.occurs(n))
    if absent:
        yield f"no graph here has {absent}"


def _misfits(nearest: NearestMatch, step: Step, node: fx.Node) -> Iterator[str]:
    """Yield the constants that differ between a node and the pattern's operation."""
    pairs = compared_arguments(step, node, nearest.places[0][1].call(step, node)) or {}
    for name, (one, other) in sorted(pairs.items(), key=str):
        if (
            MISSING not in (one, other)
            and not nodes_in((one, other))
            and not same_value(one, other)
        ):
            yield f"{node.name} has {name}={other!r}, the pattern {one!r}"


def _opaque_calls(graphs: Graphs) -> Iterator[str]:
    """Describe calls that hide the operations of a module."""
    hidden: list[str] = []
    closed: list[str] = []
    for traced, node in _calls(graphs):
        inner = _module(node, traced)
        if not isinstance(inner, fx.GraphModule) and not is_torch_leaf(inner):
            is_closed = is_opaque(traced.module.get_submodule(str(node.target)))
            (closed if is_closed else hidden).append(_show(node, traced))
    if hidden:
        yield (
            f"the operations inside {_listed(hidden)} are hidden; call .trace(flatten=True) "
            "before the search to include them"
        )
    if closed:
        yield f"{_listed(closed)} stay opaque: they have hooks or wrappers, or traceable = False"


def _other_spellings(missing: Step, graphs: Graphs) -> Iterator[str]:
    """Suggest operations that may contain the missing one, or be a spelling of it."""
    linear = [_show(n, at) for at, n in _calls(graphs) if isinstance(_module(n, at), nn.Linear)]
    if missing.call.key == "add" and linear:
        yield (
            f"{linear[0]} adds its bias internally: call .decompose() on the layer before the "
            "trace to make the addition a separate operation"
        )
    name = _name(missing)
    near = difflib.get_close_matches(name, _operations(graphs) - {name}, n=3, cutoff=0.6)
    if near:
        yield f"similar names are {_listed(near)}"


def _near_names(regex: re.Pattern[str], graphs: Graphs) -> str:
    """Describe names of called modules that a regular expression nearly matches."""
    targets = list(dict.fromkeys(str(node.target) for _, node in _calls(graphs)))
    if not targets:
        return "no graph here calls a module"
    inner = next(filter(regex.search, targets), None)
    if inner is not None:
        return (
            f"{regex.pattern!r} occurs in {inner!r}, but names are matched from their start: "
            f"write {'.*' + regex.pattern!r}"
        )
    near = difflib.get_close_matches(regex.pattern, targets, n=3, cutoff=0.4) or targets
    return f"the graph calls {_listed(map(repr, near))}"


def _operations(graphs: Graphs) -> set[str]:
    """Return names of the operations that a pattern could have."""
    keys = {key_of(node, gm.get_submodule) for _, gm, graph in graphs for node in graph.nodes}
    return {_name_of_key(key) for key in keys - {None}}


def _calls(graphs: Graphs) -> list[tuple[TracedGraph, fx.Node]]:
    return [(traced, n) for traced in graphs for n in traced.graph.find_nodes(op="call_module")]


def _module(node: fx.Node, traced: TracedGraph) -> nn.Module:
    return innermost(traced.module.get_submodule(str(node.target)))


def _show(node: fx.Node, traced: TracedGraph) -> str:
    if node.op == "call_module":
        return f"{node.target} ({type(_module(node, traced)).__name__})"
    return f"{node.name} ({_name_of_key(key_of(node, traced.module.get_submodule)) or node.op})"


def _name(step: Step) -> str:
    """Return an operation of a pattern as it was written."""
    return f"call_module({step.regex.pattern!r})" if step.regex else _name_of_key(step.call.key)


def _name_of_key(key: Any) -> str:
    name = key[1] if isinstance(key, tuple) else key
    return str(getattr(name, "__name__", name or ""))


def _listed(items: Iterable[str]) -> str:
    unique = list(dict.fromkeys(items))
    shown = ", ".join(unique[:_SHOWN])
    return f"{shown} and {len(unique) - _SHOWN} more" if len(unique) > _SHOWN else shown


class NearestMatch(NamedTuple):
    """The largest part of a pattern that was found together, in the first of `places`."""

    steps: dict[fx.Node, Step]
    places: list[tuple[TracedGraph, GraphIndex]]
    found: dict[fx.Node, fx.Node]

    def occurs(self, node: fx.Node) -> list[str]:
        """Return the paths of the graphs that have an operation of the pattern."""
        return [traced.path for traced, index in self.places if index.candidates[node]]

    @property
    def missing(self) -> Step | None:
        """The first missing operation; None if only the arguments do not fit.

        Prefers operations that no graph has, then neighbors of the found ones.
        """
        beside = {value for node in self.found for value in self.steps[node].operands}

        def order(node: fx.Node) -> tuple[bool, bool, fx.Node]:
            takes = not self.found.keys().isdisjoint(self.steps[node].operands)
            return bool(self.occurs(node)), not (takes or node in beside), node

        missing = [node for node in self.steps if node not in self.found]
        return self.steps[min(missing, key=order)] if missing else None

    def in_place_of(self, missing: Step) -> list[fx.Node]:
        """Return nodes that take or give the values that the missing operation would."""
        nearby: list[fx.Node] = []
        for node, match in self.found.items():
            nearby += match.users if node in missing.operands else ()
            nearby += match.all_input_nodes if missing.node in self.steps[node].operands else ()
        known = set(self.found.values())
        return [node for node in nearby if node not in known and node.op != "output"]


def nearest_match(graphs: Graphs, steps: dict[fx.Node, Step]) -> NearestMatch:
    """Find the largest part of a pattern in any graph, starting from the rarest operation."""
    # Unlike a search, try every operation as the start, because the rarest one may be the missing
    # one.
    places = [(g, GraphIndex(g.graph, g.module.get_submodule, steps)) for g in graphs]
    starts = [
        (place, anchor, node)
        for place in places
        for anchor, nodes in sorted(place[1].candidates.items(), key=lambda pair: len(pair[1]))
        for node in nodes[:_STARTS_PER_OPERATION]
    ]
    best, found = places[0], dict[fx.Node, fx.Node]()
    for place, anchor, node in starts[:_STARTS]:
        reached = furthest(steps, place[1], anchor, node)
        if len(reached) > len(found):
            best, found = place, reached
    places.sort(key=lambda place: place is not best)
    return NearestMatch(steps, places, {node: found[node] for node in sorted(found)})
