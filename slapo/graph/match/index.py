"""A graph as the search sees it: its operations by name, and their calls beside the pattern's.

Sizes, as ``view``, ``expand`` and norms take them, are spelled differently by each tracer:
``x.size(0)``, ``x.shape[0]``, ``-1``, the number itself. Only literal sizes are compared.
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
    """The nodes of a graph by the operations of one pattern."""

    def __init__(self, graph: fx.Graph, modules: ModuleLookup, steps: dict[fx.Node, Step]) -> None:
        self.modules = modules
        self._calls: dict[tuple[fx.Node, bool], Call] = {}
        by_key: dict[Key, list[fx.Node]] = {step.call.key: [] for step in steps.values()}
        for node in graph.nodes:
            for key in self._keys(node) & by_key.keys():
                by_key[key].append(node)
        #: for each operation of the pattern the nodes that it may be, in graph order
        self.candidates: dict[fx.Node, list[fx.Node]] = {}
        for wanted, step in steps.items():
            nodes = by_key[step.call.key]
            if step.regex is not None:
                nodes = [node for node in nodes if step.regex.match(called_path(node) or "")]
            self.candidates[wanted] = nodes
        self._fitting = {wanted: set(nodes) for wanted, nodes in self.candidates.items()}

    def _keys(self, node: fx.Node) -> set[Key]:
        """The operator of a node, and the other ways that a pattern names the call of a module."""
        keys = {key_of(node, self.modules)}
        if called_path(node) is not None:
            keys.add(call_module)
        if node.op == "call_module":
            keys.add(type(self.modules(str(node.target))))
        return keys

    def rarest(self) -> tuple[fx.Node, list[fx.Node]]:
        """Choose the operation that the graph has least often."""
        return min(self.candidates.items(), key=lambda pair: len(pair[1]))

    def fits(self, step: Step, node: fx.Node) -> bool:
        """Return whether `node` is the same operation as `step`, arguments aside."""
        if node not in self._fitting[step.node]:
            return False
        if step.module is None or step.call.op is not None:
            return True
        return same_settings(step.module, self.modules(str(node.target)))

    def call(self, step: Step, node: fx.Node) -> Call:
        """Describe the call of `node` in the terms of `step`."""
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
        """Return whether two values are the same, or look the same or an equal tensor up."""
        if same_value(one, other):
            return True
        tensor = self._tensor(other)
        if tensor is None:
            return False
        is_held = isinstance(one, torch.Tensor)
        return same_value(one, tensor) if is_held else self._tensor(one) is tensor

    def _tensor(self, value: Any) -> torch.Tensor | None:
        """The tensor that a graph looks up, by a node or as the weight of a module it calls."""
        if isinstance(value, ModuleState):
            owner, name = value.target, value.name
        elif isinstance(value, fx.Node) and value.op == "get_attr":
            owner, _, name = str(value.target).rpartition(".")
        else:
            return None
        found = getattr(self.modules(owner), name, None)
        return found if isinstance(found, torch.Tensor) else None


def argument_pairs(step: Step, node: fx.Node, call: Call) -> Iterator[list[Pair]]:
    """Yield lists of pairs: a value of the pattern and one of the graph, constants first."""
    pairs = compared_arguments(step, node, call)
    if pairs is None:
        return
    yield _constants_first(pairs.values())
    swap = call.op.swap if call.op and step.regex is None else None
    # Operands may change places, but not when one is scaled by ``alpha``.
    is_scaled = not same_value(call.value("alpha"), call.default("alpha"))
    if swap and pairs.keys() >= set(swap) and not is_scaled:
        (one, first), (other, second) = (pairs[name] for name in swap)
        pairs = {**pairs, swap[0]: (one, second), swap[1]: (other, first)}
        yield _constants_first(pairs.values())


def _constants_first(pairs: Iterable[Pair]) -> list[Pair]:
    """Order pairs so that a constant that differs ends the search before it begins."""
    return sorted(pairs, key=lambda pair: isinstance(pair[0], fx.Node))


def compared_arguments(step: Step, node: fx.Node, call: Call) -> dict[str | int, Pair] | None:
    """Pairs of arguments of a pattern and a graph that must agree; None if none can.

    Where a functional call of the pattern meets a module, what the call leaves out and sizes are
    parameters and attributes of the module's own: any do.
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
    """Compare the arguments that a pattern states for a module that it names."""
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
    """Yield the arguments of a pattern that stand for sizes, each with what it stands for."""
    for name in wanted.keys() & given.keys():
        sizes, values = _as_tuple(wanted[name]), _as_tuple(given[name])
        if len(sizes) == 1 and len(values) != 1:
            pairs = [(sizes[0], values)]  # x.view(shape): one argument for all
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
