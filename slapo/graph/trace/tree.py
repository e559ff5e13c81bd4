"""Trace a module and, if wanted, the modules it calls; nothing is changed here."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.leaves import default_is_leaf, is_sealed
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.nodes import nodes_in
from slapo.graph.trace.symbolic import trace_symbolically
from slapo.wrapper import innermost


@dataclass
class TraceResult:
    """Traced forms by path from the traced module, outermost first, and what stayed as it was.

    Parameters
    ----------
    traced
        ``""`` for the module itself, then paths of children.
    skipped
        Path -> why a child stays opaque.
    """

    traced: dict[str, TracedModule] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


#: Traces a child that stands at a path, from the calls of it in the graph above.
TraceChild = Callable[[nn.Module, str, list[fx.Node]], TracedModule]


def trace_symbolic_tree(
    module: nn.Module,
    recursive: bool,
    flatten: bool,
    leaf_modules: Collection[str],
    concrete_args: Mapping[str, Any] | None,
) -> TraceResult:
    """Trace with proxies: the module, and with `recursive` the modules it calls.

    Raises
    ------
    TraceError
        If the module itself cannot be traced. Children that cannot stay opaque.
    """
    is_leaf = default_is_leaf(flatten, leaf_modules)
    result = TraceResult({"": trace_symbolically(module, is_leaf, concrete_args)})

    def trace_child(child: nn.Module, path: str, calls: list[fx.Node]) -> TracedModule:
        return trace_symbolically(child, is_leaf, constants_of_calls(child, calls))

    if recursive and not flatten:
        descend(result, module, "", result.traced[""], leaf_modules, trace_child)
    return result


def descend(
    result: TraceResult,
    module: nn.Module,
    path: str,
    above: TracedModule,
    leaf_modules: Collection[str],
    trace_child: TraceChild,
) -> None:
    """Trace the modules that a traced module calls, each as a graph of its own, and so on."""
    for target, calls in calls_by_target(above.graph).items():
        child = innermost(module.get_submodule(target))
        full = f"{path}.{target}" if path else target
        if not may_enter(child, full, leaf_modules):
            continue
        try:
            traced = trace_child(child, full, calls)
        except TraceError as error:
            result.skipped[full] = str(error)
            continue
        result.traced[full] = traced
        drop_demanding(result, full, child, calls, above)
        descend(result, child, full, traced, leaf_modules, trace_child)


def may_enter(module: nn.Module, path: str, leaf_modules: Collection[str]) -> bool:
    """Whether a recursive trace turns `module` into a graph of its own."""
    name = type(module).__name__
    return not (
        path in leaf_modules
        or name in leaf_modules
        or is_sealed(module)
        or isinstance(module, fx.GraphModule)
    )


def drop_demanding(
    result: TraceResult, path: str, child: nn.Module, calls: list[fx.Node], caller: TracedModule
) -> None:
    """Leave a child opaque that, as a graph, would demand what its caller can do without.

    Tracing a layer with a mask would otherwise make it refuse calls without, though its own graph
    hands the mask on and holds for both. The child's own children may still become graphs.

    Parameters
    ----------
    result
        Has the child's graph at `path`; it is moved to what is skipped.
    child
        The original module.
    calls
        The calls of the child in the graph of `caller`.
    caller
        The traced form of the module above, be it used or left opaque itself.
    """
    signature = inspect.signature(child.forward)
    demanded = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is None
        and all(name in graph.contract.never_none for graph in result.traced[path].graphs)
    ]
    is_graph = any(traced is caller for traced in result.traced.values())
    for call in calls if demanded else ():
        given = _bind(signature, call).arguments
        for name in demanded:
            if name not in given or _may_be_none(given[name], caller, is_graph):
                del result.traced[path]
                result.skipped[path] = (
                    f"its forward takes another path when {name!r} is None, and its caller allows "
                    "both; to make it a graph for one of them, trace it by itself"
                )
                return


def _may_be_none(value: Any, caller: TracedModule, is_graph: bool) -> bool:
    """Whether an argument can be None in some call of `caller`.

    A graph refuses the calls that it does not hold for. As a module it takes them all, and what it
    computes from an optional input may then be None.
    """
    if not isinstance(value, fx.Node):
        return value is None
    refused = caller.contract.never_none if is_graph else ()
    seen, waiting = {value}, [value]
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            if node.args and node.args[0] is None and node.target not in refused:
                return True
        # Modules and look-ups may hand None on; an operator that got None would have failed.
        elif not is_graph or node.op == "call_module" or node.target is operator.getitem:
            waiting += [given for given in node.all_input_nodes if given not in seen]
            seen.update(node.all_input_nodes)
    return False


def calls_by_target(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The calls of each child in a graph."""
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_module"):
        calls.setdefault(str(node.target), []).append(node)
    return calls


def constants_of_calls(module: nn.Module, calls: list[fx.Node]) -> dict[str, Any]:
    """Arguments that every call of `module` gives as the same constant.

    Raises
    ------
    TraceError
        If calls differ in a constant, so that one graph cannot serve them all.
    """
    signature = inspect.signature(module.forward)
    found: list[dict[str, Any]] = []
    for call in calls:
        bound = _bind(signature, call)
        bound.apply_defaults()
        found.append({k: v for k, v in bound.arguments.items() if not nodes_in(v)})
    if any(set(other) != set(found[0]) or not _equal(other, found[0]) for other in found[1:]):
        raise TraceError("it is called several times with different constants")
    return {k: v for k, v in found[0].items() if k in signature.parameters}


def _bind(signature: inspect.Signature, call: fx.Node) -> inspect.BoundArguments:
    try:
        return signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise TraceError(f"the call {call.format_node()} does not fit: {error}") from None


def _equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(left[k] is right[k] or bool(left[k] == right[k]) for k in left)


def containers_down_to(paths: Collection[str], exists: Callable[[str], bool]) -> list[str]:
    """Every path on the way from the root to `paths`, the root and `paths` included, top first."""
    found: dict[str, None] = {"": None}
    for path in paths:
        parts = path.split(".") if path else []
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            if exists(prefix):
                found[prefix] = None
    return sorted(found, key=lambda p: p.count(".") + bool(p))
