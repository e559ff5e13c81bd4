"""The operations of a traced pattern, in the form that the search compares with a graph."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx
from torch import nn

from slapo.graph.match.canonical import (
    Call,
    bind_signature,
    call_of,
    module_key,
    positions_and_names,
)
from slapo.graph.match.pattern import (
    PATTERN_MODULE,
    PATTERN_OF_CHAIN,
    PATTERN_TENSOR,
    ModulePattern,
    call_module,
    compile_name,
)
from slapo.graph.match.values import same_value
from slapo.graph.trace.nodes import nodes_in

WILDCARD_OPS = ("placeholder", "get_attr")


@dataclass(frozen=True)
class Step:
    """An operation of a pattern: its node, and the operator with the arguments to compare."""

    node: fx.Node
    call: Call
    #: the path of the module, where the pattern calls one by name
    regex: re.Pattern[str] | None = None
    #: the submodule of the pattern that is called
    module: nn.Module | None = None
    #: arguments that are sizes
    sizes: Mapping[str, Any] = field(default_factory=dict)
    #: arguments that the trace spells out with their defaults, though the pattern may not
    implied: frozenset[str] = frozenset()
    #: whether constants may be any
    is_open: bool = False


def pattern_steps(graph: fx.Graph) -> dict[fx.Node, Step]:
    """List the operations of a pattern that its outputs depend on, whatever sizes do."""
    steps: dict[fx.Node, Step] = {}
    output = next(iter(reversed(graph.nodes)))
    pending = list(output.all_input_nodes)
    while pending:
        node = pending.pop()
        if node in steps or node.op in WILDCARD_OPS:
            continue
        steps[node] = step = _step(node)
        pending.extend(nodes_in(step.call.args))
    _check_connected(steps)
    return steps


def _step(node: fx.Node) -> Step:
    """Describe one operation of a pattern."""
    module = node.meta.get(PATTERN_MODULE)
    if node.target is call_module:
        return _named_step(node, str(node.args[0]), node.args[1:])
    if isinstance(module, ModulePattern):
        return _named_step(node, module.name_regex, node.args)
    call = call_of(node, lambda target: node.meta[PATTERN_MODULE])
    if call.args is None:
        raise ValueError(f"the pattern calls {node.target} with arguments that it does not take")
    call = replace(call, args=_with_tensors(call.args))
    return _function_step(node, call) if module is None else _module_step(node, module, call)


def _named_step(node: fx.Node, regex: str, args: tuple[Any, ...]) -> Step:
    """Describe the call of a module by name."""
    given = _with_tensors(positions_and_names(args, node.kwargs))
    return Step(node, Call(call_module, given), regex=compile_name(regex))


def _function_step(node: fx.Node, call: Call) -> Step:
    """Describe the call of a function or method."""
    given = call.args or {}
    if node.meta.get(PATTERN_OF_CHAIN) == "open":
        values = {name: value for name, value in given.items() if nodes_in(value)}
        return Step(node, replace(call, args=values), is_open=True)
    if call.op is None:
        return Step(node, call)
    sizes = {str(name): given[name] for name in call.op.sizes & given.keys()}
    by_default = {
        str(name)
        for name, value in given.items()
        if name in call.defaults and same_value(call.defaults[str(name)], value)
    }
    # Python functions are traced with all arguments: F.dropout(x) shows p=0.5, training=True.
    implied = by_default if inspect.isfunction(node.target) else ()
    free = call.op.free if PATTERN_OF_CHAIN in node.meta else call.op.free & by_default
    skipped = call.op.ignored | free | sizes.keys()
    stated = {name: value for name, value in given.items() if name not in skipped}
    return Step(node, replace(call, args=stated), sizes=sizes, implied=frozenset(implied))


def _module_step(node: fx.Node, module: nn.Module, call: Call) -> Step:
    """Describe the call of a submodule: by class if it has parameters, else by operator."""
    has_state = next(module.parameters(), None) is not None
    if has_state or call.op is None:
        args = bind_signature(module.forward, node.args, node.kwargs)
        given = None if args is None else _with_tensors(args)
        return Step(node, Call(module_key(type(module)), given), module=module)
    skipped = call.op.free | call.op.ignored
    given = {name: value for name, value in (call.args or {}).items() if name not in skipped}
    sizes = {str(name): given.pop(name) for name in call.op.sizes & given.keys()}
    return Step(node, replace(call, args=given), module=module, sizes=sizes)


def _with_tensors(args: Mapping[str | int, Any]) -> dict[str | int, Any]:
    """Put the tensors that a pattern holds in the place of the nodes that look them up."""

    def tensor(node: fx.Node) -> Any:
        return node.meta.get(PATTERN_TENSOR, node)

    return {name: fx.map_arg(value, tensor) for name, value in args.items()}


def _check_connected(steps: dict[fx.Node, Step]) -> None:
    """Refuse a pattern whose parts share no value: nothing would say which parts go together."""
    neighbours: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node, step in steps.items():
        for value in nodes_in(step.call.args):
            neighbours[node].add(value)
            neighbours[value].add(node)
    first = next(iter(steps))
    reached, pending = {first}, [first]
    while pending:
        new = neighbours[pending.pop()] - reached
        reached |= new
        pending.extend(new)
    lost = [str(node) for node in steps if node not in reached]
    if lost:
        raise ValueError(
            f"the pattern falls into parts that share no value: {first} and {', '.join(lost)}; "
            "connect them by a common input, or find them one by one"
        )
