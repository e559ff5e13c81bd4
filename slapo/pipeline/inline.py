"""Containers that are graphs, joined to one graph whose targets are paths from the root."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from slapo.errors import SlapoError
from slapo.graph.trace.contract import (
    CallContract,
    Guard,
    bind_arguments,
    check_arguments,
    parameter_kinds,
    same_value,
)
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.names import spare_self
from slapo.wrapper import innermost

#: Attribute under which a container's limits are found; see :class:`ContainerLimits`.
LIMITS = "_slapo_limits"


@dataclass(frozen=True)
class ContainerLimits:
    """What the graph of a container demands of the tensors that reach it."""

    label: str
    guards: tuple[Guard, ...]

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuse values that the container's graph does not hold for."""
        check_arguments(CallContract(size_guards=self.guards), values, self.label)


def check_limits(limits: ContainerLimits, values: Mapping[str, Any]) -> None:
    """The node that stands in a joined graph for the checks of an inlined container."""
    limits.check(values)


@dataclass
class JoinedGraph:
    """One graph for the root and the containers below it.

    Parameters
    ----------
    graph
        Targets are paths from the root.
    contracts
        Path of each container that was joined, the root included -> its contract.
    limits
        Path of a container -> what must be checked where it began.
    calls
        Path of a container -> for each call of it, the nodes that stand in its place.
    """

    graph: fx.Graph
    contracts: dict[str, CallContract] = field(default_factory=dict)
    limits: dict[str, ContainerLimits] = field(default_factory=dict)
    calls: dict[str, list[list[fx.Node]]] = field(default_factory=dict)

    def ends_of(self, path: str) -> list[fx.Node]:
        """The last node of each call of the module at `path`."""
        direct = list(self.graph.find_nodes(op="call_module", target=path))
        inlined = [[n for n in nodes if not n._erased] for nodes in self.calls.get(path, ())]
        return direct + [nodes[-1] for nodes in inlined if nodes]


def join_containers(root: TracedModule, containers: Collection[str]) -> JoinedGraph:
    """Join the graph of `root` with those of the containers at the given paths.

    Constructors of outputs that are taken apart again (``BaseModelOutput(...).last_hidden_state``)
    disappear, so no such object stands between two layers.

    Parameters
    ----------
    root
        The traced model; it is not changed.
    containers
        Paths of the :class:`TracedModule` s to inline, each with those above it.

    Raises
    ------
    SlapoError
        If a container is called with another constant than it was traced with.
    """
    joiner = _Joiner(root, frozenset(containers))
    joiner.run()
    _drop_unused_constructors(joiner.joined.graph)
    return joiner.joined


class _Joiner:
    def __init__(self, root: TracedModule, containers: frozenset[str]) -> None:
        self.root, self.containers = root, containers
        self.joined = JoinedGraph(spare_self(fx.Graph()))
        #: constructor call -> its fields
        self.fields: dict[fx.Node, dict[str, Any]] = {}

    def run(self) -> None:
        graph = self.joined.graph
        env: dict[fx.Node, Any] = {}
        for node in self.root.graph.find_nodes(op="placeholder"):
            env[node] = graph.node_copy(node)
        self.joined.contracts[""] = self.root.contract
        graph.output(self._copy(self.root, "", env))

    def _copy(self, module: TracedModule, path: str, env: dict[fx.Node, Any]) -> Any:
        """Append the nodes of a graph; returns what it returns."""
        for node in module.graph.nodes:
            args, kwargs = _mapped(node.args, env), _mapped(node.kwargs, env)
            if node.op == "output":
                return args[0]
            if node.op != "placeholder":
                env[node] = self._copy_node(node, path, args, kwargs)
        raise AssertionError("every graph has an output")

    def _copy_node(self, node: fx.Node, path: str, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if node.op in ("call_module", "get_attr"):
            target = f"{path}.{target}" if path else target
        if node.op == "call_module" and target in self.containers:
            return self._inline(target, args, kwargs)
        if target in (operator.getitem, getattr):
            known = self._look_up(target, *args)
            if known is not _UNKNOWN:
                return known
        graph = self.joined.graph
        new = graph.create_node(node.op, target, args, kwargs, node.name, node.type)
        new.meta = dict(node.meta)
        if node.op == "call_function" and inspect.isclass(target):
            found = _fields_of(target, args, kwargs)
            if found is not None:
                self.fields[new] = found
        return new

    def _look_up(self, how: Any, value: Any, key: Any) -> Any:
        """What a projection of something that was just put together gives."""
        if isinstance(value, fx.Node):
            fields = self.fields.get(value)
            if fields is None:
                return _UNKNOWN
            if how is getattr or isinstance(key, str):
                return fields.get(key, _UNKNOWN)
            return list(fields.values())[key] if _is_output(value.target) else _UNKNOWN
        if how is operator.getitem and isinstance(value, (tuple, list, dict)):
            return value[key] if not isinstance(key, fx.Node) else _UNKNOWN
        return _UNKNOWN

    def _inline(self, path: str, args: Any, kwargs: Any) -> Any:
        module = innermost(self.root.get_submodule(path))
        assert isinstance(module, TracedModule), "the caller names traced containers only"
        bound = bind_arguments(parameter_kinds(module.graph), args, kwargs)
        label = f"traced {module.origin.__name__} at {path!r}"
        _check_constants(module.contract, bound, label)
        self._add_limits(path, module.contract, bound, label)
        self.joined.contracts[path] = module.contract
        env: dict[fx.Node, Any] = {}
        for node in module.graph.find_nodes(op="placeholder"):
            default = node.args[0] if node.args else inspect.Parameter.empty
            env[node] = bound.get(str(node.target).lstrip("*"), default)
            if env[node] is inspect.Parameter.empty and node.users:
                raise SlapoError(f"{label} is called without its argument {node.target!r}")
        before = self.joined.graph._root.prev
        result = self._copy(module, path, env)
        self.joined.calls.setdefault(path, []).append(_nodes_after(before, self.joined.graph))
        return result

    def _add_limits(
        self, path: str, contract: CallContract, bound: Mapping[str, Any], label: str
    ) -> None:
        """A check where the container begins, for what the graph above does not ensure itself.

        The tensor ranks and dtypes that it met are those that the graph above computes; only of
        the pipeline's own inputs may they be different in another call.
        """
        kept, named = [], set()
        for guard in contract.size_guards:
            names = _tensors_named(guard)
            values = [bound.get(name) for name in names]
            from_outside = all(isinstance(v, fx.Node) and v.op == "placeholder" for v in values)
            if names and (from_outside or getattr(guard, "relation", True) is not True):
                kept.append(guard)
                named |= names
        if kept:
            limits = ContainerLimits(label, tuple(kept))
            self.joined.limits[path] = limits
            graph = self.joined.graph
            holder = graph.create_node("get_attr", f"{path}.{LIMITS}")
            given = {name: bound[name] for name in sorted(named)}
            graph.call_function(check_limits, (holder, given))


def _nodes_after(node: fx.Node, graph: fx.Graph) -> list[fx.Node]:
    """The nodes appended since `node` was the last."""
    found = []
    last = graph._root
    while last.prev is not node:
        last = last.prev
        found.append(last)
    return found[::-1]


_UNKNOWN = object()


def _mapped(value: Any, env: Mapping[fx.Node, Any]) -> Any:
    return fx.node.map_arg(value, lambda node: env[node])


def _check_constants(contract: CallContract, bound: Mapping[str, Any], label: str) -> None:
    for name, traced in contract.concrete.items():
        if name in bound and not same_value(bound[name], traced):
            raise SlapoError(
                f"{label}: argument {name!r} is {bound[name]!r} in the graph above, but the "
                f"container was traced with {traced!r}; trace both by one trace_until"
            )
    for name in contract.never_none:
        if bound.get(name) is None:
            raise SlapoError(
                f"{label}: argument {name!r} is None in the graph above, but the container was "
                "traced for a tensor there; trace both by one trace_until"
            )


def _is_output(cls: Any) -> bool:
    """Transformers' kind of output: a dataclass that is also a dict of the fields that are set."""
    return dataclasses.is_dataclass(cls) and issubclass(cls, OrderedDict)  # type: ignore[arg-type]


def _fields_of(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Field -> argument of a dataclass constructor that only stores them; else None."""
    if not dataclasses.is_dataclass(cls):
        return None
    if not _is_output(cls) and hasattr(cls, "__post_init__"):
        return None
    names = [f.name for f in dataclasses.fields(cls) if f.init]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # An output leaves out what is None, and may take a single tuple apart: leave that to it.
    ordered = {name: given[name] for name in names if given.get(name) is not None}
    return (
        None if len(ordered) == 1 and isinstance(next(iter(ordered.values())), tuple) else ordered
    )


def _tensors_named(guard: Guard) -> set[str]:
    """Parameters that a guard of a recorded graph is about."""
    found: set[str] = set()
    waiting = [getattr(guard, "relation", None), guard]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting += item
        else:
            found.update(map(str, getattr(item, "path", ())[:1]))
    return found


def _drop_unused_constructors(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        is_constructor = node.op == "call_function" and dataclasses.is_dataclass(node.target)
        if is_constructor and not node.users:
            graph.erase_node(node)
