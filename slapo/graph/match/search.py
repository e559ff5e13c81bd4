"""Search for patterns in a graph, along its data flow.

The traced pattern is laid over the graph from an anchor: the operation of the pattern that the
graph has least often. From there the search follows edges, to arguments and to users, so its cost
is that of the pattern and does not depend on what else the graph holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch.fx as fx

from slapo.graph.match.canonical import (
    Call,
    ModuleLookup,
    bind_signature,
    call_of,
    key_of,
    module_key,
)
from slapo.graph.match.comparison import (
    MISSING,
    Pair,
    argument_pairs,
    inner_pairs,
    same_settings,
    same_value,
)
from slapo.graph.match.dataflow import size_helpers, writes_in_private
from slapo.graph.match.pattern import call_module, trace_pattern
from slapo.graph.match.steps import WILDCARD_OPS, Step, nodes_in, pattern_steps


def find_subgraphs(
    graph: fx.Graph, modules: ModuleLookup, pattern: Callable[..., Any] | type | fx.Graph
) -> list[list[fx.Node]]:
    """Find all places where a graph computes what a pattern computes.

    Parameters
    ----------
    graph : torch.fx.Graph
        The graph to search.
    modules : callable
        Gives the module for the target of a ``call_module`` node, as ``gm.get_submodule`` does.
    pattern : callable, Pattern, or torch.fx.Graph
        The pattern, or the graph that :func:`trace_pattern` made of it.

    Returns
    -------
    list of list of torch.fx.Node
        The matches in graph order, each with its nodes in graph order. They do not overlap. Nodes
        that compute sizes, as ``view`` takes them, belong to the match if nothing else uses
        them. A match may have inner values that are used outside.

    Raises
    ------
    ValueError
        If the pattern cannot be traced, holds no operation, falls into unconnected parts, or
        is longer than Python's recursion limit allows (a few hundred operations).

    Notes
    -----
    A wildcard binds a value of the graph or a constant, but neither None nor a value that the
    match itself computes. A wildcard in the place of a weight also binds the weight of a module.

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
    >>> find_subgraphs(gm.graph, gm.get_submodule, lambda a, b: F.gelu(a + b))
    [[add, act]]
    """
    traced = pattern if isinstance(pattern, fx.Graph) else trace_pattern(pattern)
    steps = pattern_steps(traced)
    index = _GraphIndex(graph, modules, steps)
    anchor, candidates = _rarest(steps, index)
    taken: set[fx.Node] = set()
    matches = []
    for candidate in candidates:
        try:
            found = _Search(steps, index, taken).run(anchor, candidate)
        except RecursionError:
            raise ValueError(
                f"the pattern is too long ({len(steps)} operations); find a part of it"
            ) from None
        if found:
            taken.update(found)
            matches.append(found)
    return sorted(matches, key=lambda match: match[0])


def find_by_name(graph: fx.Graph, regex: str) -> list[list[fx.Node]]:
    """Find the calls of modules whose path matches a regular expression.

    Parameters
    ----------
    graph : torch.fx.Graph
        The graph to search.
    regex : str
        Compared with the targets of ``call_module`` nodes by :func:`re.match`.

    Returns
    -------
    list of list of torch.fx.Node
        One list of one node for each call, in graph order.

    Raises
    ------
    ValueError
        If `regex` is not a regular expression.

    Examples
    --------
    >>> from torch import nn
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> find_by_name(gm.graph, "1")
    [[_1]]
    """
    try:
        compiled = re.compile(regex)
    except re.error as error:
        raise ValueError(f"{regex!r} is not a regular expression: {error}") from error
    calls = graph.find_nodes(op="call_module")
    return [[node] for node in calls if compiled.match(str(node.target))]


class _GraphIndex:
    """The nodes of a graph by the operations of one pattern."""

    def __init__(self, graph: fx.Graph, modules: ModuleLookup, steps: dict[fx.Node, Step]) -> None:
        self._modules = modules
        self._calls: dict[tuple[fx.Node, bool], Call] = {}
        self.nodes: dict[Hashable, list[fx.Node]] = {step.call.key: [] for step in steps.values()}
        by_class = any(isinstance(key, tuple) and key[0] == "module" for key in self.nodes)
        for node in graph.nodes:
            found = self.nodes.get(key_of(node, modules))
            if found is not None:
                found.append(node)
            if node.op == "call_module":
                self._add_module_call(node, by_class)

    def _add_module_call(self, node: fx.Node, by_class: bool) -> None:
        """List the call of a module under its other names."""
        if call_module in self.nodes:
            self.nodes[call_module].append(node)
        if by_class:
            key = module_key(type(self._modules(str(node.target))))
            found = self.nodes.get(key)
            if found is not None and (not found or found[-1] is not node):
                found.append(node)

    def candidates(self, step: Step) -> list[fx.Node]:
        """List the nodes that may be `step`, in graph order."""
        nodes = self.nodes[step.call.key]
        if step.regex is None:
            return nodes
        return [node for node in nodes if step.regex.match(str(node.target))]

    def fits(self, step: Step, node: fx.Node) -> bool:
        """Tell whether `node` is the same operation as `step`, arguments aside."""
        if step.regex is not None:
            return node.op == "call_module" and bool(step.regex.match(str(node.target)))
        if step.call.op is None and isinstance(step.call.key, tuple) and node.op == "call_module":
            module = self._modules(str(node.target))
            same = module_key(type(module)) == step.call.key
            return same and step.module is not None and same_settings(step.module, module)
        return key_of(node, self._modules) == step.call.key

    def call(self, step: Step, node: fx.Node) -> Call:
        """Describe the call of `node` in the terms of `step`."""
        as_module = step.call.op is None and node.op == "call_module"
        key = (node, as_module)
        if key not in self._calls:
            self._calls[key] = (
                self._module_call(node) if as_module else call_of(node, self._modules)
            )
        return self._calls[key]

    def _module_call(self, node: fx.Node) -> Call:
        """Describe the call of a module by the parameters of its ``forward``."""
        forward = self._modules(str(node.target)).forward
        return Call(None, bind_signature(forward, node.args, node.kwargs))


def _rarest(steps: dict[fx.Node, Step], index: _GraphIndex) -> tuple[fx.Node, Sequence[fx.Node]]:
    """Choose the operation that the graph has least often; stop at one that it has not at all."""
    best: tuple[fx.Node, Sequence[fx.Node]] | None = None
    for node, step in steps.items():
        candidates = index.candidates(step)
        if best is None or len(candidates) < len(best[1]):
            best = (node, candidates)
        if not candidates:
            break
    assert best is not None, "a pattern has an operation"
    return best


class _Search:
    """The attempt to lay a pattern over a graph with one of its operations fixed."""

    def __init__(
        self, steps: dict[fx.Node, Step], index: _GraphIndex, taken: Collection[fx.Node]
    ) -> None:
        self._steps = steps
        self._index = index
        self._taken = taken
        self._bound: dict[fx.Node, Any] = {}
        self._images: set[fx.Node] = set()
        self._found: list[fx.Node] = []

    def run(self, anchor: fx.Node, node: fx.Node) -> list[fx.Node]:
        """Match with `anchor` at `node`; return the nodes of the match, or an empty list."""
        return self._found if self._unify([(anchor, node)]) else []

    def _unify(self, pending: list[Pair]) -> bool:
        """Match pairs of a pattern's and a graph's value, and then all that is connected."""
        while pending:
            (wanted, value), pending = pending[0], pending[1:]
            if isinstance(wanted, fx.Node) and wanted not in self._bound:
                return self._bind(wanted, value, pending)
            if not isinstance(wanted, fx.Node):
                inner = inner_pairs(wanted, value)
                if inner is None:
                    return False
                pending = inner + pending
            elif not same_value(self._bound[wanted], value):
                return False
        return self._extend()

    def _bind(self, wanted: fx.Node, value: Any, rest: list[Pair]) -> bool:
        """Let a node of the pattern stand for `value`, if the rest can be matched then."""
        if wanted.op in WILDCARD_OPS:
            return self._bind_wildcard(wanted, value, rest)
        return isinstance(value, fx.Node) and self._bind_step(wanted, value, rest)

    def _bind_wildcard(self, wanted: fx.Node, value: Any, rest: list[Pair]) -> bool:
        """Let a wildcard stand for `value`; None is the absence of a value."""
        if value is None or value is MISSING:
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
        if call.inplace and not step.call.inplace and not writes_in_private(call):
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
        inputs = [value for wanted, value in self._bound.items() if wanted.op in WILDCARD_OPS]
        if len(self._images) < len(self._steps) or self._images & set(nodes_in(inputs)):
            return False
        nodes = self._images | size_helpers(self._images, set(nodes_in(inputs)))
        self._found = sorted(nodes)
        return True
