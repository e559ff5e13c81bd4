"""Operations of a traced pattern, prepared for comparison with a graph."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx
from torch import nn

from slapo.graph.match.canonical import Call, bind_signature, call_of, positions_and_names
from slapo.graph.match.operators import FREE, IGNORED, SIZES
from slapo.graph.match.pattern import (
    PATTERN_MODULE,
    PATTERN_OF_CHAIN,
    PATTERN_TENSOR,
    WILDCARD_OPS,
    ModulePattern,
    call_module,
    compile_name,
)
from slapo.graph.match.values import same_value
from slapo.graph.trace.nodes import nodes_in


@dataclass(frozen=True)
class Step:
    """An operation of a pattern: its node, and the operator with the arguments to compare."""

    node: fx.Node
    call: Call
    #: the path expression, if the pattern calls a module by name
    regex: re.Pattern[str] | None = None
    #: the submodule of the pattern that is called
    module: nn.Module | None = None
    #: arguments that are sizes
    sizes: Mapping[str, Any] = field(default_factory=dict)
    #: arguments that a trace states with their defaults, though the pattern may not
    implied: frozenset[str] = frozenset()
    #: True if any constants match
    is_open: bool = False

    @property
    def operands(self) -> list[fx.Node]:
        """The pattern nodes among the arguments."""
        return nodes_in(self.call.args)


def pattern_steps(graph: fx.Graph) -> dict[fx.Node, Step]:
    """Return the operations that a pattern's outputs depend on, without those of sizes."""
    steps: dict[fx.Node, Step] = {}
    # From the outputs upward, through operands only: nodes that compute sizes are not required in a
    # graph.
    pending = list(graph.output_node().all_input_nodes)
    while pending:
        node = pending.pop()
        if node in steps or node.op in WILDCARD_OPS:
            continue
        steps[node] = _step(node)
        pending.extend(steps[node].operands)
    _check_connected(steps)
    return steps


def _step(node: fx.Node) -> Step:
    """Convert one node of a pattern to a step."""
    module = node.meta.get(PATTERN_MODULE)
    regex, args = None, node.args
    if node.target is call_module:
        regex, args = str(args[0]), args[1:]
    elif isinstance(module, ModulePattern):
        regex = module.name_regex
    if regex is not None:
        given = _with_tensors(positions_and_names(args, node.kwargs))
        return Step(node, Call(call_module, given), regex=compile_name(regex))
    call = call_of(node, lambda target: node.meta[PATTERN_MODULE])
    if call.args is None:
        raise ValueError(f"the pattern calls {node.target} with arguments that it does not take")
    # A layer with parameters stands for its class; one without is an operator, in any spelling.
    if module is not None and (call.op is None or next(module.parameters(), None) is not None):
        bound = bind_signature(module.forward, node.args, node.kwargs)
        return Step(node, Call(type(module), bound and _with_tensors(bound)), module=module)
    return _operator_step(node, replace(call, args=_with_tensors(call.args)), module)


def _operator_step(node: fx.Node, call: Call, module: nn.Module | None) -> Step:
    """Convert the call of a function, a method or a stateless module to a step."""
    given = call.args or {}
    if node.meta.get(PATTERN_OF_CHAIN) == "open":
        values = {name: value for name, value in given.items() if nodes_in(value)}
        return Step(node, replace(call, args=values), is_open=True)
    if call.op is None:
        return Step(node, call)
    sizes = {str(name): given[name] for name in SIZES & given.keys()}
    by_default = {str(k) for k, value in given.items() if same_value(call.default(k), value)}
    # Python functions are traced with all arguments: F.dropout(x) shows p=0.5, training=True.
    implied = frozenset(by_default) if inspect.isfunction(node.target) else frozenset()
    # A function that states ``p=0.1`` means it. A module of the pattern, and operations picked by
    # hand, have some probability and mode because they must.
    is_exact = module is None and PATTERN_OF_CHAIN not in node.meta
    skipped = IGNORED | sizes.keys() | (FREE & by_default if is_exact else FREE)
    stated = {name: value for name, value in given.items() if name not in skipped}
    return Step(node, replace(call, args=stated), None, module, sizes, implied)


def _with_tensors(args: Mapping[str | int, Any]) -> dict[str | int, Any]:
    """Replace get_attr nodes by the tensors that a pattern holds."""
    return {
        name: fx.map_arg(value, lambda node: node.meta.get(PATTERN_TENSOR, node))
        for name, value in args.items()
    }


def _check_connected(steps: dict[fx.Node, Step]) -> None:
    """Refuse a pattern of unconnected parts, as any combination of them would match."""
    parts: list[set[fx.Node]] = []
    for node, step in steps.items():
        part = {node, *step.operands}
        part.update(*(other for other in parts if other & part))
        parts = [other for other in parts if not other & part] + [part]
    first = next(iter(steps))
    whole = next(part for part in parts if first in part)
    lost = [str(node) for node in steps if node not in whole]
    if lost:
        raise ValueError(
            f"the pattern falls into parts that share no value: {first} and {', '.join(lost)}; "
            "connect them by a common input, or find them one by one"
        )
