"""A graph as the search sees it: its operations by name, and their calls beside the pattern's.

Sizes, as ``view``, ``expand`` and norms take them, are spelled differently by each tracer:
``x.size(0)``, ``x.shape[0]``, ``-1``, the number itself. Only literal sizes are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from slapo.graph.match.canonical import (
    Call,
    ModuleState,
    bind_signature,
    call_of,
    called_path,
    key_of,
    module_key,
    positions_and_names,
)
from slapo.graph.match.dataflow import is_size
from slapo.graph.match.pattern import call_module
from slapo.graph.match.pattern_ops import Step
from slapo.graph.match.values import same_settings, same_value
from slapo.graph.trace.nodes import ModuleLookup, Pair

MISSING = object()
"""The value of an argument that a call neither states nor has a default for."""


class GraphIndex:
    """The nodes of a graph by the operations of one pattern."""

    def __init__(self, graph: fx.Graph, modules: ModuleLookup, steps: dict[fx.Node, Step]) -> None:
        self.modules = modules
        self._calls: dict[tuple[fx.Node, bool], Call] = {}
        self.nodes: dict[Hashable, list[fx.Node]] = {step.call.key: [] for step in steps.values()}
        by_class = any(isinstance(key, tuple) and key[0] == "module" for key in self.nodes)
        for node in graph.nodes:
            found = self.nodes.get(key_of(node, modules))
            if found is not None:
                found.append(node)
            if call_module in self.nodes and called_path(node) is not None:
                self.nodes[call_module].append(node)
            if by_class and node.op == "call_module":
                self._add_by_class(node)

    def _add_by_class(self, node: fx.Node) -> None:
        """List the call of a module that spells an operator under its class too."""
        found = self.nodes.get(module_key(type(self.modules(str(node.target)))))
        if found is not None and (not found or found[-1] is not node):
            found.append(node)

    def candidates(self, step: Step) -> list[fx.Node]:
        """List the nodes that may be `step`, in graph order."""
        nodes = self.nodes[step.call.key]
        if step.regex is None:
            return nodes
        return [node for node in nodes if step.regex.match(called_path(node) or "")]

    def rarest(self, steps: dict[fx.Node, Step]) -> tuple[fx.Node, Sequence[fx.Node]]:
        """Choose the operation that the graph has least often; stop at one that it lacks."""
        best: tuple[fx.Node, Sequence[fx.Node]] | None = None
        for node, step in steps.items():
            candidates = self.candidates(step)
            if best is None or len(candidates) < len(best[1]):
                best = (node, candidates)
            if not candidates:
                break
        assert best is not None, "a pattern has an operation"
        return best

    def fits(self, step: Step, node: fx.Node) -> bool:
        """Tell whether `node` is the same operation as `step`, arguments aside."""
        if step.regex is not None:
            path = called_path(node)
            return path is not None and bool(step.regex.match(path))
        if step.call.op is None and isinstance(step.call.key, tuple) and node.op == "call_module":
            module = self.modules(str(node.target))
            same = module_key(type(module)) == step.call.key
            return same and step.module is not None and same_settings(step.module, module)
        return key_of(node, self.modules) == step.call.key

    def call(self, step: Step, node: fx.Node) -> Call:
        """Describe the call of `node` in the terms of `step`."""
        as_module = step.call.op is None and node.op == "call_module"
        key = (node, as_module)
        if key not in self._calls:
            self._calls[key] = self._module_call(node) if as_module else call_of(node, self.modules)
        return self._calls[key]

    def _module_call(self, node: fx.Node) -> Call:
        """Describe the call of a module by the parameters of its ``forward``."""
        forward = self.modules(str(node.target)).forward
        return Call(None, bind_signature(forward, node.args, node.kwargs))

    def same(self, one: Any, other: Any) -> bool:
        """Tell whether two values are the same, or look the same tensor up.

        `one` may be a tensor that the pattern holds: then the graph must look an equal one up.
        """
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
    if step.regex is not None:
        yield from _named_pairs(step, node, call)
        return
    stated, given, op = step.call.args, call.args, call.op
    if stated is None or given is None:
        return
    if is_free_form(step, node):
        stated = {name: value for name, value in stated.items() if name not in step.implied}
    elif not step.is_open and not _rest_agrees(step, call):
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


def sizes_agree(wanted: Any, value: Any) -> bool:
    """Tell whether sizes may be the same: False if both are literal in full and differ."""
    wanted, value = _as_tuple(wanted), _as_tuple(value)
    return not (_is_literal(wanted) and _is_literal(value)) or same_value(wanted, value)


def size_arguments(wanted: Mapping[str, Any], given: Mapping[str | int, Any]) -> Iterator[Pair]:
    """Yield the arguments of a pattern that stand for sizes, each with what it stands for."""
    for name in wanted.keys() & given.keys():
        sizes, values = _as_tuple(wanted[name]), _as_tuple(given[name])
        if len(sizes) == 1 and len(values) != 1:
            pairs = [(sizes[0], values)]  # x.view(shape): one argument for all
        else:
            pairs = list(zip(sizes, values, strict=False)) if len(sizes) == len(values) else []
        yield from ((s, v) for s, v in pairs if isinstance(s, fx.Node) and s.op == "placeholder")


def may_be_same_size(one: Any, other: Any) -> bool:
    """Tell whether two values may be equal: sizes that a graph computes may be equal to any."""
    return is_size(one) or is_size(other) or same_value(one, other)


def follows_from(value: Any, matched: Collection[fx.Node]) -> bool:
    """Tell whether a size depends on a value that a match computes."""
    if isinstance(value, (tuple, list)):
        return any(follows_from(inner, matched) for inner in value)
    if not isinstance(value, fx.Node):
        return False
    if value in matched:
        return True
    return is_size(value) and any(follows_from(v, matched) for v in value.all_input_nodes)


def _as_tuple(sizes: Any) -> tuple[Any, ...]:
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)


def _is_literal(sizes: tuple[Any, ...]) -> bool:
    return all(isinstance(size, int) for size in sizes)
