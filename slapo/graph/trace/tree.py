"""Trace a module and, if wanted, the modules that it calls; nothing is changed here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.leaves import Depth, is_sealed
from slapo.graph.trace.module import (
    Shared,
    Trace,
    captured,
    check_traceable,
    origin_of,
)
from slapo.graph.trace.nodes import nodes_in
from slapo.graph.trace.preview import constants_of, preview
from slapo.graph.trace.views import as_before
from slapo.wrapper import innermost

if TYPE_CHECKING:
    from slapo.graph.trace.examples import Inputs


@dataclass
class TraceResult:
    """Traces by path from the traced module, and why other modules stay opaque.

    Parameters
    ----------
    traces
        ``""`` for the module itself, then paths of children.
    skipped
        Path -> reason.
    """

    traces: dict[str, Trace] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


#: Traces a child at a path, from the calls of it in the graph above.
_TraceChild = Callable[[nn.Module, str, list[fx.Node]], Trace]


def trace_by_preview(
    module: nn.Module,
    recursive: bool,
    depth: Depth,
    concrete_args: Mapping[str, Any],
    shared: Shared,
) -> TraceResult:
    """Trace with proxies: the module, and with `recursive` the modules that it calls.

    Raises
    ------
    TraceError
        If the module itself cannot be traced. Children that cannot stay opaque.
    """

    def trace(part: nn.Module, path: str, calls: list[fx.Node]) -> Trace:
        constants = _constants_of(part, calls) if calls else concrete_args
        with as_before(part):
            graph, entered = preview(part, depth, constants)
        given = dict(concrete_args) if part is module else {}
        return Trace(origin_of(part), depth, graph, entered, constants=given, shared=shared)

    return _descend(module, recursive and not depth.flatten, depth, trace)


def trace_by_capture(
    module: nn.Module, inputs: Inputs, recursive: bool, depth: Depth, shared: Shared
) -> TraceResult:
    """Capture the module, and with `recursive` the modules it calls, on the inputs it gave them.

    Raises
    ------
    TraceError
        If the module itself cannot be captured. Children that cannot stay opaque.
    """
    found: dict[str, Inputs] = {"": inputs}

    def trace(part: nn.Module, path: str, calls: list[fx.Node]) -> Trace:
        with as_before(part):
            first = captured(part, *found[path], depth, shared)
        for target, given in first.inputs.items():
            found.setdefault(f"{path}.{target}" if path else target, given)
        outer = inputs if part is module else None
        return Trace(
            origin_of(part), depth, first.graph, first.entered, first, inputs=outer, shared=shared
        )

    return _descend(module, recursive and not depth.flatten, depth, trace)


def _descend(
    module: nn.Module, recursive: bool, depth: Depth, trace_child: _TraceChild
) -> TraceResult:
    check_traceable(module)
    result = TraceResult({"": trace_child(module, "", [])})
    waiting = [("", module)] if recursive else []
    while waiting:
        path, above = waiting.pop()
        for target, calls in _calls_by_target(result.traces[path].shown).items():
            child = innermost(above.get_submodule(target))
            full = f"{path}.{target}" if path else target
            if not _may_enter(child, full, depth):
                continue
            try:
                check_traceable(child)
                result.traces[full] = trace_child(child, full, calls)
            except TraceError as error:
                result.skipped[full] = str(error)
                continue
            waiting.append((full, child))
    return result


def _may_enter(module: nn.Module, path: str, depth: Depth) -> bool:
    names = {path, type(module).__name__}
    sealed = is_sealed(module) or isinstance(module, fx.GraphModule)
    return not sealed and not names & depth.leaf_modules


def _calls_by_target(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_module"):
        calls.setdefault(str(node.target), []).append(node)
    return calls


def _constants_of(module: nn.Module, calls: list[fx.Node]) -> dict[str, Any]:
    """Arguments that the first call gives as constants."""
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*calls[0].args, **calls[0].kwargs)
    except TypeError as error:
        raise TraceError(f"the call {calls[0].format_node()} does not fit: {error}") from None
    bound.apply_defaults()
    return {k: v for k, v in bound.arguments.items() if not nodes_in(v)}


# --- containers ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Containers:
    """The depth of a joined graph: some containers are entered, all else is called."""

    paths: frozenset[str]

    def __call__(self, module: nn.Module, path: str) -> bool:
        """Whether the module at `path` stays one call."""
        return path not in self.paths


@dataclass
class Joined:
    """One graph of a root and of the containers below it; targets are paths from the root.

    Parameters
    ----------
    graph
        The graph.
    sizes
        Conditions on the sizes of its inputs; None for a preview.
    fixed
        Arguments that a preview has as constants.
    """

    graph: fx.Graph
    sizes: list[str] | None = None
    fixed: dict[str, Any] = field(default_factory=dict)


def join(
    root: nn.Module,
    containers: Collection[str],
    inputs: Inputs | None,
    concrete_args: Mapping[str, Any] | None = None,
) -> Joined:
    """The graph of `root` with the containers entered, for the mode that it is in.

    With `inputs` it is captured, for a batch of any size; without, it is traced with proxies.

    Raises
    ------
    TraceError
        If the root and its containers do not fit into a graph.

    Examples
    --------
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    >>> [str(node.target) for node in join(net, ["", "0"], None).graph.nodes]
    ['input', '0.0', '0.1', '1', 'output']
    """
    depth = Containers(frozenset(containers))
    with as_before(root):
        check_traceable(root)
        if inputs is None:
            fixed = constants_of(root, concrete_args or {})
            return Joined(preview(root, depth, fixed)[0], fixed=fixed)
        from slapo.graph.trace.capture import capture  # brings torch._dynamo: a second

        found = capture(root, *inputs, depth, any_batch=True)
    return Joined(found.graph, found.sizes)


def trace_containers(
    root: nn.Module,
    containers: Collection[str],
    inputs: Inputs | None,
    concrete_args: Mapping[str, Any],
    shared: Shared,
) -> TraceResult:
    """Trace the containers; their own graphs are made when somebody looks at them.

    Raises
    ------
    TraceError
        If the root and its containers do not fit into one graph.
    """
    graph = join(root, containers, inputs, concrete_args).graph
    called = [str(node.target) for node in graph.find_nodes(op="call_module")]
    result = TraceResult()
    for path in containers:
        module = innermost(root.get_submodule(path)) if path else root
        if path and not any(target.startswith(f"{path}.") for target in called):
            raise TraceError(f"{path!r} cannot be a graph: no module above it calls it")
        if type(module).forward is nn.Module.forward:
            continue  # a mere namespace, such as a list of layers
        show = _Show(root, module, inputs, dict(concrete_args) if not path else {}, shared)
        start = f"{path}." if path else ""
        below = frozenset(t.removeprefix(start) for t in called if t.startswith(start))
        inner = frozenset(c.removeprefix(start) for c in containers if c.startswith(start))
        result.traces[path] = Trace(
            origin_of(module),
            Depth(),
            show,
            inputs=inputs,
            constants=show.constants,
            called=below | inner,
            shared=shared,
        )
    return result


@dataclass
class _Show:
    """Makes the graph of a container when it is asked for."""

    root: nn.Module
    module: nn.Module
    inputs: Inputs | None
    constants: dict[str, Any]
    shared: Shared

    def __call__(self) -> fx.Graph:
        with as_before(self.root):
            if self.inputs is None:
                return preview(self.module, Depth(), self.constants)[0]
            from slapo.graph.trace.examples import inputs_within

            inputs = self.inputs
            if self.module is not self.root:
                inputs = inputs_within(self.root, inputs, self.module)
            return captured(self.module, *inputs, Depth(), self.shared).graph


def containers_down_to(paths: Collection[str], exists: Callable[[str], bool]) -> list[str]:
    """Every path on the way from the root to `paths`, the root and `paths` included, top first."""
    found: dict[str, None] = {"": None}
    for path in paths:
        names = path.split(".") if path else []
        prefixes = (".".join(names[:length]) for length in range(1, len(names) + 1))
        found |= dict.fromkeys(prefix for prefix in prefixes if exists(prefix))
    return sorted(found, key=lambda p: p.count(".") + bool(p))
