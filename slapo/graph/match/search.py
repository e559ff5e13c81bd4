"""Search for patterns in a graph, along its data flow.

The traced pattern is laid over the graph from an anchor: the operation of the pattern that the
graph has least often. From there the search follows edges, to arguments and to users, so its cost
is that of the pattern and does not depend on what else the graph holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch.fx as fx

from slapo.graph.match.canonical import called_path, written_operand
from slapo.graph.match.dataflow import is_private, size_helpers
from slapo.graph.match.index import (
    MISSING,
    GraphIndex,
    argument_pairs,
    follows_from,
    may_be_same_size,
    size_arguments,
)
from slapo.graph.match.pattern import PATTERN_OF_CHAIN, compile_name, trace_pattern
from slapo.graph.match.pattern_ops import WILDCARD_OPS, Step, pattern_steps
from slapo.graph.trace.nodes import CONTAINERS, ModuleLookup, Pair, inner_pairs, nodes_in


class Match(list[fx.Node]):
    """The nodes of a match, in graph order, with what the pattern's arguments stand for."""

    def __init__(self, nodes: Iterable[fx.Node], values: Mapping[str, Any] | None = None) -> None:
        super().__init__(nodes)
        self._values = dict(values or {})
        # Rewrites beside the match put other nodes in place of its inputs, so an input is looked
        # up where the match uses it.
        self._places: dict[fx.Node, tuple[fx.Node, int]] = {}
        wanted = set(nodes_in(self._values))
        for user in self if wanted else ():
            for index, value in enumerate(_operands(user)):
                if value in wanted:
                    self._places.setdefault(value, (user, index))

    @property
    def bindings(self) -> dict[str, Any]:
        """Name of each argument of the pattern -> what it stands for, in the pattern's order.

        That is a node, a constant, the weight of a module (:class:`.canonical.ModuleState`), or a
        container of these. Arguments that the pattern does not use are left out.
        """
        return {name: fx.map_arg(value, self._present) for name, value in self._values.items()}

    def _present(self, node: fx.Node) -> fx.Node:
        """The node that is used where `node` was."""
        user, index = self._places.get(node, (None, 0))
        if user is None or user._erased:
            return node
        operands = _operands(user)
        return operands[index] if index < len(operands) else node


def _operands(node: fx.Node) -> list[fx.Node]:
    return nodes_in((node.args, node.kwargs))


def find_subgraphs(
    graph: fx.Graph,
    modules: ModuleLookup,
    pattern: Callable[..., Any] | type | fx.Graph,
    overlapping: bool = False,
) -> list[Match]:
    """Find all places where a graph computes what a pattern computes, in graph order.

    Matches do not overlap, unless they may. Nodes that compute sizes, as ``view`` takes them,
    belong to a match if nothing else uses them. A match may have inner values that are used
    outside.

    An argument of the pattern binds a value of the graph or a constant, but neither None nor a
    value that the match itself computes; used twice, it is the same value. Instead of a weight it
    also binds the weight of a module. A constant of the pattern, number or tensor, must be equal to
    that of the graph. A functional call also matches the module that computes the same, whatever
    attributes and weights it has where the call states nothing, and whatever sizes:
    ``F.layer_norm(x, 1024)`` matches any ``nn.LayerNorm``.

    Raises
    ------
    ValueError
        If the pattern cannot be traced, holds no operation, falls into unconnected parts, or
        is longer than Python's recursion limit allows (a few hundred operations).

    Examples
    --------
    >>> import torch.nn.functional as F
    >>> from torch import nn
    >>> class Mlp(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc, self.act = nn.Linear(2, 2), nn.GELU()
    ...     def forward(self, x, y):
    ...         return self.act(y + self.fc(x))
    >>> gm = fx.symbolic_trace(Mlp())
    >>> matches = find_subgraphs(gm.graph, gm.get_submodule, lambda a, b: F.gelu(a + b))
    >>> matches
    [[add, act]]
    >>> matches[0].bindings
    {'a': y, 'b': fc}
    """
    traced = pattern if isinstance(pattern, fx.Graph) else trace_pattern(pattern)
    steps = pattern_steps(traced)
    index = GraphIndex(graph, modules, steps)
    anchor, candidates = index.rarest(steps)
    taken: set[fx.Node] = set()
    matches = []
    for candidate in candidates:
        try:
            found = _Unification(steps, index, taken).run(anchor, candidate)
        except RecursionError:
            raise ValueError(
                f"the pattern is too long ({len(steps)} operations); find a part of it"
            ) from None
        if found is not None:
            taken.update(() if overlapping else found)
            matches.append(found)
    return sorted(matches, key=lambda match: match[0])


def find_by_name(graph: fx.Graph, regex: str | re.Pattern[str]) -> list[Match]:
    """Find the calls of modules whose path matches, by :func:`re.match`: one match for each."""
    compiled = regex if isinstance(regex, re.Pattern) else compile_name(regex)
    called = ((node, called_path(node)) for node in graph.nodes)
    return [Match([node]) for node, path in called if path is not None and compiled.match(path)]


def furthest(
    steps: dict[fx.Node, Step], index: GraphIndex, anchor: fx.Node, node: fx.Node
) -> dict[fx.Node, fx.Node]:
    """Operations of a pattern -> nodes: the most that fit together with `anchor` at `node`."""
    attempt = _Unification(steps, index, ())
    attempt.run(anchor, node)
    return attempt.furthest


class _Unification:
    """The attempt to lay a pattern over a graph with one of its operations fixed."""

    def __init__(
        self, steps: dict[fx.Node, Step], index: GraphIndex, taken: Collection[fx.Node]
    ) -> None:
        self._steps, self._index, self._taken = steps, index, taken
        self._bound: dict[fx.Node, Any] = {}
        self._images: set[fx.Node] = set()
        self._found: Match | None = None
        #: The most operations of the pattern that were found together, and as which nodes.
        self.furthest: dict[fx.Node, fx.Node] = {}

    def run(self, anchor: fx.Node, node: fx.Node) -> Match | None:
        """Match with `anchor` at `node`; None if it does not."""
        return self._found if self._unify([(anchor, node)]) else None

    def _unify(self, pending: list[Pair]) -> bool:
        """Match pairs of a pattern's and a graph's value, and then all that is connected."""
        while pending:
            (wanted, value), pending = pending[0], pending[1:]
            if isinstance(wanted, fx.Node) and wanted not in self._bound:
                self._note_progress()
                return self._bind(wanted, value, pending)
            if isinstance(wanted, CONTAINERS):
                inner = inner_pairs(wanted, value)
                if inner is None:
                    return False
                pending = inner + pending
            else:
                known = self._bound[wanted] if isinstance(wanted, fx.Node) else wanted
                if not self._index.same(known, value):
                    return False
        self._note_progress()
        return self._extend()

    def _note_progress(self) -> None:
        """Remember how far the search came, to tell when it fails."""
        if len(self._images) > len(self.furthest):
            self.furthest = {node: self._bound[node] for node in self._steps if node in self._bound}

    def _bind(self, wanted: fx.Node, value: Any, rest: list[Pair]) -> bool:
        """Let a node of the pattern stand for `value`, if the rest can be matched then."""
        if wanted.op in WILDCARD_OPS:
            return self._bind_wildcard(wanted, value, rest)
        return isinstance(value, fx.Node) and self._bind_step(wanted, value, rest)

    def _bind_wildcard(self, wanted: fx.Node, value: Any, rest: list[Pair]) -> bool:
        """Let a wildcard stand for `value`; None is the absence of a value."""
        if value is None or value is MISSING:
            return False
        if (
            wanted.op == "get_attr"
            and PATTERN_OF_CHAIN in wanted.meta
            and not (
                isinstance(value, fx.Node)
                and (value.op, value.target) == (wanted.op, wanted.target)
            )
        ):
            return False
        self._bound[wanted] = value
        if self._unify(rest):
            return True
        del self._bound[wanted]
        return False

    def _bind_step(self, wanted: fx.Node, node: fx.Node, rest: list[Pair]) -> bool:
        """Let an operation of the pattern stand for `node`, with any order of its operands."""
        step = self._steps[wanted]
        if node in self._images or node in self._taken or not self._index.fits(step, node):
            return False
        call = self._index.call(step, node)
        written = written_operand(call)
        if call.inplace and not step.call.inplace and not is_private(written, self._index.modules):
            return False
        self._bound[wanted] = node
        self._images.add(node)
        for pairs in argument_pairs(step, node, call):
            if self._unify(pairs + rest):
                return True
        del self._bound[wanted]
        self._images.remove(node)
        return False

    def _extend(self) -> bool:
        """Go on with an operation that uses a value already bound, if one is left."""
        frontier = self._frontier()
        if frontier is None:
            return self._finish()
        wanted, users = frontier
        return any(self._unify([(wanted, user)]) for user in sorted(users))

    def _frontier(self) -> tuple[fx.Node, Collection[fx.Node]] | None:
        """Choose the unbound operation with the fewest nodes that it may be."""
        best: tuple[fx.Node, Collection[fx.Node]] | None = None
        for wanted, step in self._steps.items():
            if wanted in self._bound:
                continue
            for value in nodes_in(step.call.args):
                bound = self._bound.get(value)
                users = bound.users if isinstance(bound, fx.Node) else ()
                if value in self._bound and (best is None or len(users) < len(best[1])):
                    best = (wanted, users)
        return best

    def _finish(self) -> bool:
        """Accept the match unless an input of the pattern is a value of the match itself."""
        bound = {wanted: v for wanted, v in self._bound.items() if wanted.op in WILDCARD_OPS}
        if len(self._images) < len(self._steps) or self._images & set(nodes_in(bound)):
            return False
        sizes = self._bound_sizes()
        if sizes is None:
            return False
        bound |= sizes
        helpers = size_helpers(self._images, set(nodes_in(bound)))
        read = {bound[w] for w in bound if w.op == "get_attr" and PATTERN_OF_CHAIN in w.meta}
        arguments = [w for w in sorted(bound) if w.op == "placeholder"]
        values = {str(w.target).lstrip("*"): bound[w] for w in arguments}
        self._found = Match(sorted(self._images | helpers | read), values)
        return True

    def _bound_sizes(self) -> dict[fx.Node, Any] | None:
        """What arguments stand for among sizes; None if one would be two different values."""
        found: dict[fx.Node, Any] = {}
        for wanted, step in self._steps.items():
            if not step.sizes:
                continue
            given = self._index.call(step, self._bound[wanted]).args or {}
            for argument, value in size_arguments(step.sizes, given):
                known = self._bound.get(argument, found.get(argument, MISSING))
                if known is not MISSING and not may_be_same_size(known, value):
                    return None
                if known is MISSING and not follows_from(value, self._images):
                    found[argument] = value
        return found
