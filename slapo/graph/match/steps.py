"""The operations of a traced pattern, in the form that the search compares with a graph."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from slapo.graph.match.pattern import PATTERN_MODULE, ModulePattern, call_module

WILDCARD_OPS = ("placeholder", "get_attr")


@dataclass(frozen=True)
class Step:
    """An operation of a pattern."""

    node: fx.Node
    call: Call
    regex: re.Pattern[str] | None = None
    module: nn.Module | None = None


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
    if node.target is call_module:
        args = positions_and_names(node.args[1:], node.kwargs)
        return Step(node, Call(call_module, args), regex=re.compile(str(node.args[0])))
    module = node.meta.get(PATTERN_MODULE)
    if isinstance(module, ModulePattern):
        args = positions_and_names(node.args, node.kwargs)
        return Step(node, Call(call_module, args), regex=re.compile(module.name_regex))
    call = call_of(node, lambda target: node.meta[PATTERN_MODULE])
    if call.args is None:
        raise ValueError(f"the pattern calls {node.target} with arguments that it does not take")
    if module is None:
        return Step(node, replace(call, args=_stated(call)))
    return _module_step(node, module, call)


def _module_step(node: fx.Node, module: nn.Module, call: Call) -> Step:
    """Describe the call of a submodule: by class if it has parameters, else by operator."""
    assert call.args is not None
    has_state = next(module.parameters(), None) is not None
    if has_state or call.op is None:
        args = bind_signature(module.forward, node.args, node.kwargs)
        return Step(node, Call(module_key(type(module)), args), module=module)
    skipped = call.op.free | call.op.ignored
    stated = {name: value for name, value in call.args.items() if name not in skipped}
    return Step(node, replace(call, args=stated))


def _stated(call: Call) -> dict[str | int, Any]:
    """Leave out what is not compared.

    The trace of ``F.dropout(x)`` spells ``p=0.5, training=True`` out, so a free argument counts as
    stated only where it differs from its default.
    """
    assert call.args is not None
    if call.op is None:
        return dict(call.args)
    return {
        name: value
        for name, value in call.args.items()
        if name not in call.op.ignored
        and not (name in call.op.free and _is_default(value, call.defaults.get(str(name))))
    }


def _is_default(value: Any, default: Any) -> bool:
    """Tell whether a constant is the default."""
    return not isinstance(value, fx.Node) and bool(value == default)


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


def nodes_in(value: Any) -> Iterator[fx.Node]:
    """Yield the nodes in nested containers."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, dict) or hasattr(value, "items"):
        for inner in value.values():
            yield from nodes_in(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from nodes_in(inner)
    elif isinstance(value, slice):
        yield from nodes_in((value.start, value.stop, value.step))
