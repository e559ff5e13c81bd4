"""The longest part of a pattern that a graph has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch.fx as fx

from slapo.graph.match.index import GraphIndex, TracedGraph
from slapo.graph.match.search import furthest
from slapo.graph.match.steps import Step
from slapo.graph.trace.nodes import nodes_in

# Layers are alike, so a few starts tell; more would make an explanation dearer than the search.
_STARTS_PER_OPERATION = 8
_STARTS = 200


@dataclass(frozen=True)
class Indexed:
    """A graph with its operations by name."""

    traced: TracedGraph
    index: GraphIndex


@dataclass(frozen=True)
class NearestMatch:
    """The most operations of a pattern that were found together.

    Attributes
    ----------
    places : list of Indexed
        The graphs that were searched.
    place : Indexed
        The one that they are in.
    found : dict
        Operation of the pattern -> node of the graph, in the pattern's order.
    missing : Step or None
        The first that was not found. None if all were, but an argument of the pattern would have
        to stand for two values, or for one that the match computes.
    """

    places: list[Indexed]
    place: Indexed
    found: dict[fx.Node, fx.Node]
    missing: Step | None


def nearest_match(graphs: Sequence[TracedGraph], steps: dict[fx.Node, Step]) -> NearestMatch:
    """Find the longest part of a pattern that some graph has.

    Parameters
    ----------
    graphs
        Where to look; at least one.
    steps
        The operations of the pattern.
    """
    places = [
        Indexed(traced, GraphIndex(traced.graph, traced.module.get_submodule, steps))
        for traced in graphs
    ]
    best, found = places[0], dict[fx.Node, fx.Node]()
    left = _STARTS
    for place in places:
        for anchor, node in _starts(place.index, steps):
            left -= 1
            reached = furthest(steps, place.index, anchor, node) if left >= 0 else {}
            if len(reached) > len(found):
                best, found = place, reached
    missing = _first_missing(places, steps, found)
    return NearestMatch(places, best, {node: found[node] for node in sorted(found)}, missing)


def _starts(index: GraphIndex, steps: dict[fx.Node, Step]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield operations of the pattern with nodes that they may be, the rarest first."""
    candidates = {anchor: index.candidates(step) for anchor, step in steps.items()}
    for anchor in sorted(candidates, key=lambda node: len(candidates[node])):
        yield from ((anchor, node) for node in candidates[anchor][:_STARTS_PER_OPERATION])


def _first_missing(
    places: Sequence[Indexed], steps: dict[fx.Node, Step], found: Collection[fx.Node]
) -> Step | None:
    """Prefer what no graph has, then what is next to the operations found."""

    def order(node: fx.Node) -> tuple[bool, bool, fx.Node]:
        occurs = any(place.index.candidates(steps[node]) for place in places)
        return occurs, not any(other in found for other in _neighbours(node, steps)), node

    missing = [node for node in steps if node not in found]
    return steps[min(missing, key=order)] if missing else None


def _neighbours(node: fx.Node, steps: dict[fx.Node, Step]) -> Iterator[fx.Node]:
    """Operations of a pattern whose value one takes, or which take its value."""
    yield from nodes_in(steps[node].call.args)
    yield from (other for other, step in steps.items() if node in nodes_in(step.call.args))


def in_its_place(nearest: NearestMatch, missing: Step, steps: dict[fx.Node, Step]) -> list[fx.Node]:
    """What takes the values, or gives the value, that the missing operation would."""
    found = nearest.found
    arguments = [found[value] for value in nodes_in(missing.call.args) if value in found]
    users = [user for argument in arguments for user in argument.users]
    givers = [
        value
        for other, node in found.items()
        if missing.node in nodes_in(steps[other].call.args)
        for value in node.all_input_nodes
    ]
    taken = set(found.values())
    return list(dict.fromkeys(n for n in (*users, *givers) if n not in taken and n.op != "output"))
