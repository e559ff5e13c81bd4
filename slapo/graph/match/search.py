"""Search for patterns in a graph, along its data flow.

A search starts at an anchor, the pattern's operation with the fewest candidates in the graph, and
follows edges. Its cost does not depend on the rest of the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch.fx as fx

from slapo.graph.match.canonical import MISSING, called_path
from slapo.graph.match.dataflow import is_private, is_size, size_helpers
from slapo.graph.match.index import (
    GraphIndex,
    argument_pairs,
    follows_from,
    size_arguments,
)
from slapo.graph.match.pattern import (
    PATTERN_OF_CHAIN,
    WILDCARD_OPS,
    compile_name,
    trace_pattern,
)
from slapo.graph.match.pattern_ops import Step, pattern_steps
from slapo.graph.match.values import same_value
from slapo.graph.trace.nodes import CONTAINERS, ModuleLookup, Pair, inner_pairs, nodes_in


class Match(list[fx.Node]):
    """The nodes of a match in graph order, with the values of the pattern's arguments."""

    def __init__(self, nodes: Iterable[fx.Node], values: Mapping[str, Any] | None = None) -> None:
        super().__init__(nodes)
        self._values = dict(values or {})
        # Rewrites beside the match may replace its inputs, so an input is looked up in its user's
        # arguments.
        self._places: dict[fx.Node, tuple[fx.Node, int]] = {}
        for user in self if self._values else ():
            for index, value in enumerate(_operands(user)):
                self._places.setdefault(value, (user, index))

    @property
    def bindings(self) -> dict[str, Any]:
        """Argument of the pattern -> its value, in the pattern's order.

        A value is a node, a constant, a :class:`.canonical.ModuleState`, or a container of these.
        """
        return {name: fx.map_arg(value, self._present) for name, value in self._values.items()}

    def _present(self, node: fx.Node) -> fx.Node:
        """Return the node that is now used where `node` was."""
        user, index = self._places.get(node, (None, 0))
        operands = [] if user is None or user._erased else _operands(user)
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

    Nodes that only compute sizes belong to a match if nothing else uses them. A pattern's argument
    never binds None or a value that the match computes. A functional call also matches a module,
    with any sizes and unstated attributes: ``F.layer_norm(x, 1024)`` matches any ``nn.LayerNorm``.
    """
    traced = pattern if isinstance(pattern, fx.Graph) else trace_pattern(pattern)
    steps = pattern_steps(traced)
    index = GraphIndex(graph, modules, steps)
    anchor, candidates = index.rarest()
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
    """Find calls of modules whose path matches (:func:`re.match`), one match per call."""
    compiled = regex if isinstance(regex, re.Pattern) else compile_name(regex)
    called = ((node, called_path(node)) for node in graph.nodes)
    return [Match([node]) for node, path in called if path is not None and compiled.match(path)]


def furthest(
    steps: dict[fx.Node, Step], index: GraphIndex, anchor: fx.Node, node: fx.Node
) -> dict[fx.Node, fx.Node]:
    """Return the largest match with `anchor` at `node`: operation of the pattern -> node."""
    attempt = _Unification(steps, index, ())
    attempt.run(anchor, node)
    return attempt.furthest


class _Unification:
    """Attempt to match a pattern with one operation fixed."""

    def __init__(
        self, steps: dict[fx.Node, Step], index: GraphIndex, taken: Collection[fx.Node]
    ) -> None:
        self._steps, self._index, self._taken = steps, index, taken
        self._bound: dict[fx.Node, Any] = {}
        self._images: set[fx.Node] = set()
        self._found: Match | None = None
        self.furthest: dict[fx.Node, fx.Node] = {}

    def run(self, anchor: fx.Node, node: fx.Node) -> Match | None:
        """Match with `anchor` at `node`; return None on failure."""
        # Unification with backtracking. `pending` has the pairs of pattern and graph values that
        # must agree. Each call works it off up to the first unbound pattern node, and `_bind` tries
        # the rest for each order of its operands. Without pairs, the search goes on at the users of
        # bound nodes.
        self._unify([(anchor, node)])
        return self._found

    def _unify(self, pending: list[Pair]) -> bool:
        """Match pairs of pattern and graph values, and then everything connected to them."""
        while pending:
            # A copy of the list, since another branch may continue from the caller's.
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
        frontier = self._frontier()
        if frontier is None:
            return self._finish()
        wanted, users = frontier
        return any(self._unify([(wanted, user)]) for user in sorted(users))

    def _note_progress(self) -> None:
        """Record the largest partial match, for diagnosis."""
        if len(self._images) > len(self.furthest):
            self.furthest = {node: self._bound[node] for node in self._steps if node in self._bound}

    def _bind(self, wanted: fx.Node, value: Any, rest: list[Pair]) -> bool:
        """Bind a node of the pattern to `value` if the rest can be matched then."""
        step = self._steps.get(wanted)
        ways: Iterable[list[Pair]] = [[]]
        if step is not None:
            if not isinstance(value, fx.Node) or not self._step_fits(step, value):
                return False
            self._images.add(value)
            ways = argument_pairs(step, value, self._index.call(step, value))
        elif not _wildcard_fits(wanted, value):
            return False
        self._bound[wanted] = value
        if any(self._unify(pairs + rest) for pairs in ways):
            return True
        del self._bound[wanted]
        if step is not None:
            self._images.remove(value)
        return False

    def _step_fits(self, step: Step, node: fx.Node) -> bool:
        """Return whether a node is the operation, is free, and writes only private values."""
        if node in self._images or node in self._taken or not self._index.fits(step, node):
            return False
        call = self._index.call(step, node)
        # An in-place operation computes what the pattern does, unless someone else sees the written
        # value.
        writes = call.inplace and not step.call.inplace
        return not writes or is_private((call.args or {}).get("input"), self._index.modules)

    def _frontier(self) -> tuple[fx.Node, Collection[fx.Node]] | None:
        """Return the unbound operation with the fewest candidates, or None."""
        choices = [
            (wanted, bound.users if isinstance(bound, fx.Node) else ())
            for wanted, step in self._steps.items()
            if wanted not in self._bound
            for bound in (self._bound[v] for v in step.operands if v in self._bound)
        ]
        return min(choices, key=lambda choice: len(choice[1]), default=None)

    def _finish(self) -> bool:
        """Accept the match unless an input of the pattern is computed by the match itself."""
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
        """Return the values of arguments among sizes; None if an argument has two values."""
        found: dict[fx.Node, Any] = {}
        for wanted, step in self._steps.items():
            given = self._index.call(step, self._bound[wanted]).args or {} if step.sizes else {}
            for argument, value in size_arguments(step.sizes, given):
                known = self._bound.get(argument, found.get(argument, MISSING))
                # A computed size may be equal to any.
                is_literal = not is_size(known) and not is_size(value)
                if known is MISSING and not follows_from(value, self._images):
                    found[argument] = value
                elif known is not MISSING and is_literal and not same_value(known, value):
                    return None
        return found


def _wildcard_fits(wanted: fx.Node, value: Any) -> bool:
    """Return whether a wildcard matches `value`; None is the absence of a value."""
    # Picked by hand: this parameter, and not any value.
    if wanted.op == "get_attr" and PATTERN_OF_CHAIN in wanted.meta:
        same = (wanted.op, wanted.target)
        return isinstance(value, fx.Node) and (value.op, value.target) == same
    return value is not None and value is not MISSING
