"""Traces of a module and, optionally, of the modules that it calls, without changing them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.hf import caches_off
from slapo.graph.trace.leaves import (
    TRANSFORMERS,
    Depth,
    IsLeaf,
    attributes_kept,
    generators_kept,
    is_sealed,
    syncs_replaced,
)
from slapo.graph.trace.module import (
    Shared,
    Trace,
    Traced,
    captured,
    check_traceable,
    origin_of,
    trace_of,
)
from slapo.graph.trace.nests import OWNER
from slapo.graph.trace.nodes import add_placeholder, nodes_in, spare_self
from slapo.graph.trace.views import as_before
from slapo.wrapper import innermost

if TYPE_CHECKING:
    from slapo.graph.trace.examples import Inputs

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass
class TraceResult:
    """Traces by path from the traced module, and the reasons why other modules stay opaque."""

    traces: dict[str, Trace] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


#: Traces a child at a path, given its calls in the graph above.
_TraceChild = Callable[[nn.Module, str, list[fx.Node]], Trace]


def trace_by_preview(
    module: nn.Module,
    recursive: bool,
    depth: Depth,
    concrete_args: Mapping[str, Any],
    shared: Shared,
) -> TraceResult:
    """Trace with proxies; with `recursive` also the called modules that can be traced."""

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
    """Capture the module, and with `recursive` the modules it calls, on the inputs they get."""
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
    """Return the arguments that the first call passes as constants."""
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*calls[0].args, **calls[0].kwargs)
    except TypeError as error:
        raise TraceError(f"the call {calls[0].format_node()} does not fit: {error}") from None
    bound.apply_defaults()
    return {k: v for k, v in bound.arguments.items() if not nodes_in(v)}


# --- proxies --------------------------------------------------------------------------------------
def preview(
    module: nn.Module, is_leaf: IsLeaf, concrete_args: Mapping[str, Any] | None = None
) -> tuple[fx.Graph, frozenset[str]]:
    """Trace a module with torch.fx proxies; return the graph and the paths of entered modules.

    It is for inspection without example inputs. It never runs, as rewritten modules run captures.
    So a wrong proxy can mislead a search but not change a result. Parameters with a default other
    than None, and those in `concrete_args`, are constants.

    >>> graph, _ = preview(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), lambda module, path: True)
    >>> [node.target for node in graph.nodes]
    ['input', '0', '1', 'output']
    """
    tracer = _Tracer(is_leaf, constants_of(module, concrete_args or {}))

    def as_node(collective: Any) -> Any:
        return lambda value: tracer.create_proxy("call_function", collective, (value,), {})

    with attributes_kept(module), generators_kept(), syncs_replaced(module, as_node):
        try:
            graph = tracer.trace(module)
        except TraceError:
            raise
        except fx.proxy.TraceError as error:
            raise TraceError("a branch or loop depends on a tensor or its size") from error
        except Exception as error:  # from any code that proxies run
            first = next(iter(str(error).strip().splitlines()), "")
            raise TraceError(f"{type(error).__name__}: {first}") from error
    for node in graph.nodes:
        stack = node.meta.pop("nn_module_stack", None) or {}
        paths = [str(path) for path, _ in stack.values()]
        # The stack of a module's call ends with that module itself; its caller stands before it.
        node.meta[OWNER] = paths[-1 - (node.op == "call_module")] if len(paths) > 1 else ""
    return graph, frozenset(tracer.entered)


def constants_of(module: nn.Module, concrete_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that a preview treats as constants, with their values."""
    parameters = inspect.signature(module.forward).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.kind not in _VARIADIC}
    fixed = {k: v for k, v in defaults.items() if v is not None and v is not inspect._empty}
    return {**fixed, **concrete_args}


class _Tracer(fx.Tracer):
    def __init__(self, is_leaf: IsLeaf, constants: dict[str, Any]) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self._is_leaf, self._constants = is_leaf, constants
        self.entered: set[str] = set()
        self._names: dict[int, str] = {}
        self._below: set[nn.Module] = set()

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        if self._is_leaf(module, path) or isinstance(module, TRANSFORMERS):
            return True
        self.entered.add(path)
        return False

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run modules that the forward itself makes, as they are not children."""
        if m not in self._below:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return a node for a parameter or buffer; fx would search the full model for its name."""
        name = self._names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Return placeholders with the names and defaults of the forward's parameters."""
        spare_self(self.graph)
        self._below = set(self.root.modules())
        held = [*self.root.named_parameters(), *self.root.named_buffers()]
        # Reversed, so that a tied tensor goes by its first name.
        self._names = {id(tensor): name for name, tensor in reversed(held)}
        values: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.root.forward).parameters.items():
            proxy = self.proxy(add_placeholder(self.graph, parameter))
            if parameter.kind in _VARIADIC:
                continue
            # A parameter that is constant keeps its placeholder, so that calls of the graph fit the
            # signature.
            values[name] = self._constants.get(name, proxy)

        def run(*_: Any) -> Any:
            return self.root.forward(**values)

        return run, []


def named_constants(module: nn.Module, concrete_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the constants for parameters of a forward, as scripts write them.

    Entries for ``*args`` and ``**kwargs``, and empty defaults read from a signature, are dropped.

    >>> import inspect
    >>> class Loose(nn.Module):
    ...     def forward(self, x, scale=2, **kwargs):
    ...         return x * scale
    >>> parameters = inspect.signature(Loose().forward).parameters.values()
    >>> named_constants(Loose(), {p.name: p.default for p in parameters})
    {'scale': 2}
    """
    parameters = inspect.signature(module.forward).parameters
    given = {k: v for k, v in (concrete_args or {}).items() if v is not inspect.Parameter.empty}
    is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in given if name not in parameters]
    if unknown and not is_open:
        raise ValueError(
            f"concrete_args names {unknown}, which {type(module).__name__}.forward does not take; "
            f"its parameters are {', '.join(parameters)}"
        )
    return {
        name: value
        for name, value in given.items()
        if name not in parameters or parameters[name].kind not in _VARIADIC
    }


# --- containers ----------------------------------------------------------------------------------
@dataclass
class Joined:
    """One graph of a root and the containers below it; targets are paths from the root."""

    graph: fx.Graph
    #: conditions on input sizes; None for a preview
    sizes: list[str] | None = None
    #: arguments that a preview treats as constants
    fixed: dict[str, Any] = field(default_factory=dict)
    #: the capture that it comes from; None for a preview
    capture: Any = None
    #: containers, inputs and modes that it was made for
    key: Any = None


def join(
    root: nn.Module,
    containers: Collection[str],
    inputs: Inputs | None,
    concrete_args: Mapping[str, Any] | None = None,
) -> Joined:
    """Return the graph of `root` with the containers entered, for its current mode.

    With `inputs` it is captured for any batch size, else traced with proxies.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    >>> [str(node.target) for node in join(net, ["", "0"], None).graph.nodes]
    ['input', '0.0', '0.1', '1', 'output']
    """

    def is_leaf(_: nn.Module, path: str) -> bool:
        return path not in containers

    key = (frozenset(containers), id(inputs), [module.training for module in root.modules()])
    trace = trace_of(root) if isinstance(root, Traced) else None
    with as_before(root), caches_off(root):
        if trace is not None and (known := trace.take_joined(key, root)) is not None:
            return known
        check_traceable(root)
        if inputs is None:
            fixed = constants_of(root, concrete_args or {})
            return Joined(preview(root, is_leaf, fixed)[0], fixed=fixed)
        from slapo.graph.trace.capture import capture  # imports torch._dynamo, which takes a second

        found = capture(root, *inputs, is_leaf, any_batch=True)
    return Joined(found.graph, found.sizes, capture=found, key=key)


def serves_mode(root: nn.Module, joined: Joined) -> bool:
    """Return whether a joined graph is also valid for the current mode of `root`."""
    with as_before(root), caches_off(root):
        return joined.capture is not None and joined.capture.holds_in_mode(root)


def trace_containers(
    root: nn.Module,
    containers: Collection[str],
    inputs: Inputs | None,
    concrete_args: Mapping[str, Any],
    shared: Shared,
) -> TraceResult:
    """Trace the containers as one graph; their own graphs are made on first use."""
    joined = join(root, containers, inputs, concrete_args)
    called = [str(node.target) for node in joined.graph.find_nodes(op="call_module")]
    result = TraceResult()
    for path in containers:
        module = innermost(root.get_submodule(path)) if path else root
        if path and not any(target.startswith(f"{path}.") for target in called):
            raise TraceError(f"{path!r} cannot be a graph: no module above it calls it")
        if type(module).forward is nn.Module.forward:
            continue  # a mere namespace, such as a list of layers
        constants = {} if path else dict(concrete_args)
        start = f"{path}." if path else ""
        below = frozenset(t.removeprefix(start) for t in called if t.startswith(start))
        inner = frozenset(c.removeprefix(start) for c in containers if c.startswith(start))
        result.traces[path] = Trace(
            origin_of(module),
            Depth(),
            partial(_own_graph, root, module, inputs, constants, shared),
            inputs=inputs,
            constants=constants,
            called=below | inner,
            shared=shared,
        )
    if "" in result.traces:
        result.traces[""].joined = joined
    return result


def _own_graph(
    root: nn.Module,
    module: nn.Module,
    inputs: Inputs | None,
    constants: dict[str, Any],
    shared: Shared,
) -> fx.Graph:
    with as_before(root):
        if inputs is None:
            return preview(module, Depth(), constants)[0]
        if module is not root:
            from slapo.graph.trace.examples import inputs_within

            inputs = inputs_within(root, inputs, module)
        return captured(module, *inputs, Depth(), shared).graph


def containers_down_to(paths: Collection[str], exists: Callable[[str], bool]) -> list[str]:
    """Return every path from the root to `paths`, both included, top first."""
    found: dict[str, None] = {"": None}
    for path in paths:
        names = path.split(".") if path else []
        prefixes = (".".join(names[:length]) for length in range(1, len(names) + 1))
        found |= dict.fromkeys(prefix for prefix in prefixes if exists(prefix))
    return sorted(found, key=lambda p: p.count(".") + bool(p))
