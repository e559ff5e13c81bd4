"""The longest part of a pattern that a graph has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.fx as fx

from slapo.graph.match.index import GraphIndex, TracedGraph
from slapo.graph.match.search import furthest
from slapo.graph.match.steps import Step
from slapo.graph.trace.nodes import nodes_in

# Layers are alike, so a few starts tell; more would make an explanation dearer than the search.
_STARTS_PER_OPERATION = 8
_STARTS = 200

Place = tuple[TracedGraph, GraphIndex]


@dataclass(frozen=True)
class NearestMatch:
    """The most operations of a pattern that were found together.

    Attributes
    ----------
    steps : dict
        The operations of the pattern.
    places : list
        The graphs that were searched; the first has what was found.
    found : dict
        Operation of the pattern -> node of the graph, in the pattern's order.
    """

    steps: dict[fx.Node, Step]
    places: list[Place]
    found: dict[fx.Node, fx.Node]

    def occurs(self, node: fx.Node) -> list[str]:
        """Paths of the graphs that have an operation of the pattern."""
        return [traced.path for traced, index in self.places if index.candidates(self.steps[node])]

    @property
    def missing(self) -> Step | None:
        """The first that was not found: prefer what no graph has, then what is next to the others.

        None if all were, but an argument of the pattern would have to stand for two values, or for
        one that the match computes.
        """
        beside = {value for node in self.found for value in nodes_in(self.steps[node].call.args)}

        def order(node: fx.Node) -> tuple[bool, bool, fx.Node]:
            takes = any(value in self.found for value in nodes_in(self.steps[node].call.args))
            return bool(self.occurs(node)), not (takes or node in beside), node

        missing = [node for node in self.steps if node not in self.found]
        return self.steps[min(missing, key=order)] if missing else None

    def in_place_of(self, missing: Step) -> list[fx.Node]:
        """What takes the values, or gives the value, that the missing operation would."""
        arguments = [self.found[v] for v in nodes_in(missing.call.args) if v in self.found]
        users = [user for argument in arguments for user in argument.users]
        givers = [
            value
            for other, node in self.found.items()
            if missing.node in nodes_in(self.steps[other].call.args)
            for value in node.all_input_nodes
        ]
        known = set(self.found.values())
        return [n for n in (*users, *givers) if n not in known and n.op != "output"]


def nearest_match(graphs: Sequence[TracedGraph], steps: dict[fx.Node, Step]) -> NearestMatch:
    """Find the longest part of a pattern that some graph has."""
    places = [(g, GraphIndex(g.graph, g.module.get_submodule, steps)) for g in graphs]
    best, found = places[0], dict[fx.Node, fx.Node]()
    starts = [(place, *start) for place in places for start in _starts(place[1], steps)]
    for place, anchor, node in starts[:_STARTS]:
        reached = furthest(steps, place[1], anchor, node)
        if len(reached) > len(found):
            best, found = place, reached
    places.sort(key=lambda place: place is not best)
    return NearestMatch(steps, places, {node: found[node] for node in sorted(found)})


def _starts(index: GraphIndex, steps: dict[fx.Node, Step]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield operations of the pattern with nodes that they may be, the rarest first."""
    candidates = {anchor: index.candidates(step) for anchor, step in steps.items()}
    for anchor in sorted(candidates, key=lambda node: len(candidates[node])):
        yield from ((anchor, node) for node in candidates[anchor][:_STARTS_PER_OPERATION])
