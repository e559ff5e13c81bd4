"""Index of a graph for one pattern: candidate nodes, and pairs of arguments to compare.

Tracers spell sizes (of ``view``, ``expand``, norms) differently: ``x.size(0)``, ``x.shape[0]``,
``-1``, an integer. Only literal sizes are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.fx as fx

from slapo.graph.match.canonical import (
    Call,
    Key,
    ModuleState,
    bind_signature,
    call_of,
    called_path,
    key_of,
    positions_and_names,
)
from slapo.graph.match.dataflow import is_size
from slapo.graph.match.operators import UNSTATED
from slapo.graph.match.pattern import call_module
from slapo.graph.match.pattern_ops import Step
from slapo.graph.match.values import same_settings, same_value
from slapo.graph.trace.nodes import ModuleLookup, Pair


class GraphIndex:
    """Index of a graph's nodes by the operations of one pattern."""

    def __init__(self, graph: fx.Graph, modules: ModuleLookup, steps: dict[fx.Node, Step]) -> None:
        self.modules = modules
        self._calls: dict[tuple[fx.Node, bool], Call] = {}
        by_key: dict[Key, list[fx.Node]] = {step.call.key: [] for step in steps.values()}
        for node in graph.nodes:
            for key in self._keys(node) & by_key.keys():
                by_key[key].append(node)
        #: operation of the pattern -> candidate nodes, in graph order
        self.candidates: dict[fx.Node, list[fx.Node]] = {}
        for wanted, step in steps.items():
            nodes = by_key[step.call.key]
            if step.regex is not None:
                nodes = [node for node in nodes if step.regex.match(called_path(node) or "")]
            self.candidates[wanted] = nodes
        self._fitting = {wanted: set(nodes) for wanted, nodes in self.candidates.items()}

    def _keys(self, node: fx.Node) -> set[Key]:
        """Return the keys by which a pattern may name a node: operator, path or module class."""
        keys = {key_of(node, self.modules)}
        if called_path(node) is not None:
            keys.add(call_module)
        if node.op == "call_module":
            keys.add(type(self.modules(str(node.target))))
        return keys

    def rarest(self) -> tuple[fx.Node, list[fx.Node]]:
        """Return the operation with the fewest candidates in the graph."""
        return min(self.candidates.items(), key=lambda pair: len(pair[1]))

    def fits(self, step: Step, node: fx.Node) -> bool:
        """Return whether `node` is the same operation as `step`, arguments aside."""
        if node not in self._fitting[step.node]:
            return False
        if step.module is None or step.call.op is not None:
            return True
        return same_settings(step.module, self.modules(str(node.target)))

    def call(self, step: Step, node: fx.Node) -> Call:
        """Return the call of `node` with the argument names of `step`."""
        # A module outside the table is compared by the parameters of its forward, not as an
        # operator.
        as_module = step.call.op is None and node.op == "call_module"
        key = (node, as_module)
        if key not in self._calls:
            if as_module:
                forward = self.modules(str(node.target)).forward
                call = Call(None, bind_signature(forward, node.args, node.kwargs))
            else:
                call = call_of(node, self.modules)
            self._calls[key] = call
        return self._calls[key]

    def same(self, one: Any, other: Any) -> bool:
        """Return whether two values are the same, or get_attr of the same or an equal tensor."""
        if same_value(one, other):
            return True
        tensor = self._tensor(other)
        if tensor is None:
            return False
        # A tensor of the pattern is compared by value. Two lookups in the graph must be one tensor:
        # equal values, as of two fresh norms, train apart.
        is_held = isinstance(one, torch.Tensor)
        return same_value(one, tensor) if is_held else self._tensor(one) is tensor

    def _tensor(self, value: Any) -> torch.Tensor | None:
        """Return the tensor that a get_attr node or a module's weight refers to, else None."""
        if isinstance(value, ModuleState):
            owner, name = value.target, value.name
        elif isinstance(value, fx.Node) and value.op == "get_attr":
            owner, _, name = str(value.target).rpartition(".")
        else:
            return None
        found = getattr(self.modules(owner), name, None)
        return found if isinstance(found, torch.Tensor) else None


def argument_pairs(step: Step, node: fx.Node, call: Call) -> Iterator[list[Pair]]:
    """Yield lists of (pattern value, graph value) pairs, constants first."""
    pairs = compared_arguments(step, node, call)
    if pairs is None:
        return
    yield _constants_first(pairs.values())
    swap = call.op.swap if call.op and step.regex is None else None
    # Operands may be swapped, but not if one is scaled by ``alpha``.
    is_scaled = not same_value(call.value("alpha"), call.default("alpha"))
    if swap and pairs.keys() >= set(swap) and not is_scaled:
        (one, first), (other, second) = (pairs[name] for name in swap)
        pairs = {**pairs, swap[0]: (one, second), swap[1]: (other, first)}
        yield _constants_first(pairs.values())


def _constants_first(pairs: Iterable[Pair]) -> list[Pair]:
    """Sort pairs so that a differing constant ends the search early."""
    return sorted(pairs, key=lambda pair: isinstance(pair[0], fx.Node))


def compared_arguments(step: Step, node: fx.Node, call: Call) -> dict[str | int, Pair] | None:
    """Return the pairs of arguments that must agree, or None if none can.

    If a functional call of the pattern meets a module, omitted arguments and sizes match any
    attributes of the module.
    """
    stated, given = step.call.args, call.args
    if step.regex is not None:
        return _named_arguments(stated or {}, node, call)
    if stated is None or given is None:
        return None
    pairs = {name: (value, call.value(name)) for name, value in stated.items()}
    if step.module is None and node.op == "call_module":
        return {name: pair for name, pair in pairs.items() if name not in step.implied}
    if step.is_open:
        return pairs
    # An argument that only the graph states must equal the default that the pattern leaves it at.
    for name in given.keys() - stated.keys() - (UNSTATED if call.op else frozenset()):
        pairs[name] = (step.call.default(name), given[name])
    for name, wanted in step.sizes.items():
        sizes, values = _as_tuple(wanted), _as_tuple(given.get(name))
        if all(isinstance(size, int) for size in (*sizes, *values)):
            pairs[name] = (sizes, values)
    return pairs


def _named_arguments(
    wanted: Mapping[str | int, Any], node: fx.Node, call: Call
) -> dict[str | int, Pair] | None:
    """Pair the arguments that a pattern states for a module called by name."""
    given: Mapping[str | int, Any] = positions_and_names(node.args, node.kwargs)
    if not wanted.keys() <= given.keys():
        # The same argument may be positional on one side and a keyword on the other.
        given = call.args or {}
        names: dict[int, Any] = dict(enumerate(given))
        wanted = {names.get(k, k) if isinstance(k, int) else k: v for k, v in wanted.items()}
    if not wanted.keys() <= given.keys():
        return None
    return {name: (value, given[name]) for name, value in wanted.items()}


def size_arguments(wanted: Mapping[str, Any], given: Mapping[str | int, Any]) -> Iterator[Pair]:
    """Yield the pattern's arguments that are sizes, each with the value in the graph."""
    for name in wanted.keys() & given.keys():
        sizes, values = _as_tuple(wanted[name]), _as_tuple(given[name])
        if len(sizes) == 1 and len(values) != 1:
            pairs = [(sizes[0], values)]  # x.view(shape): one argument for all sizes
        else:
            pairs = list(zip(sizes, values, strict=False)) if len(sizes) == len(values) else []
        yield from ((s, v) for s, v in pairs if isinstance(s, fx.Node) and s.op == "placeholder")


def follows_from(value: Any, matched: Collection[fx.Node]) -> bool:
    """Return whether a size depends on a value that a match computes."""
    if isinstance(value, (tuple, list)):
        return any(follows_from(inner, matched) for inner in value)
    if not isinstance(value, fx.Node):
        return False
    if value in matched:
        return True
    return is_size(value) and any(follows_from(v, matched) for v in value.all_input_nodes)


def _as_tuple(sizes: Any) -> tuple[Any, ...]:
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
