"""What ``find`` returned, by the names that its nodes have in the graph."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.fx.node import map_aggregate

from slapo.errors import SlapoError
from slapo.graph.match.bindings import Match
from slapo.graph.match.canonical import ModuleState
from slapo.graph.match.find import Located, Subgraph
from slapo.graph.trace.nodes import called_name
from slapo.history import describe, spelled
from slapo.node import Node
from slapo.record.callables import Unnamed
from slapo.record.kept import Decode, Part, encode, revive
from slapo.wrapper import innermost


@dataclass(frozen=True)
class NodeFacts:
    """By what a node is known again.

    Parameters
    ----------
    name, op
        Its own.
    target
        What it calls.
    arguments
        Text of the inputs, by their names, and of the constants.
    module
        Class and settings of the module that it calls.
    """

    name: str
    op: str
    target: str
    arguments: str
    module: str = ""

    @classmethod
    def of(cls, node: fx.Node, gm: fx.GraphModule) -> NodeFacts:
        """Those of a node."""
        target = str(node.target) if isinstance(node.target, str) else called_name(node)
        given = [_spelled_out(arg) for arg in node.args]
        given += (f"{name}={_spelled_out(arg)}" for name, arg in node.kwargs.items())
        module = _settings(gm.get_submodule(target)) if node.op == "call_module" else ""
        return cls(node.name, node.op, target, ", ".join(given), module)

    def __str__(self) -> str:
        return f"{self.target}({self.arguments})" + (f", of {self.module}" if self.module else "")


def _spelled_out(value: Any) -> str:
    """An argument of a node, with all that is in it."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_spelled_out, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_spelled_out(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_spelled_out((value.start, value.stop, value.step))}"
    return describe(value)


#: A number that is no part of another one or of a word.
_NUMBER = re.compile(r"(?<![\w.+-])\d+(?![\w.])")


def _settings(module: nn.Module) -> str:
    """Class and settings; without the sizes of weights, which may be those of another model."""
    bare = innermost(module)
    shown = "" if isinstance(bare, fx.GraphModule) else bare.extra_repr()
    weights = any(param is not None for param in bare._parameters.values())
    return f"{type(bare).__name__}({_NUMBER.sub('#', shown) if weights else shown})"


@dataclass(frozen=True)
class GraphPart(Part):
    """Nodes of one graph.

    Parameters
    ----------
    path
        The traced module, from the node that the primitive was called on.
    graphs
        What each of its graphs holds for. Their order says in which mode it was traced, and with
        that which operations of them are one and are rewritten together.
    index
        Which of the graphs.
    nodes
        The nodes.
    bindings
        What the arguments of the pattern stand for.
    """

    tag = "subgraph"
    path: str
    graphs: tuple[str, ...]
    index: int
    nodes: tuple[NodeFacts, ...]
    bindings: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The nodes' names."""
        names = [f"%{node.name}" for node in self.nodes]
        return f"[{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}]"

    def inner(self) -> Iterable[Any]:
        """What the arguments stand for."""
        return self.bindings.values()

    def encode(self) -> Any:
        """All, node by node."""
        nodes = [[n.name, n.op, n.target, n.arguments, n.module] for n in self.nodes]
        bindings = {name: encode(value) for name, value in self.bindings.items()}
        graphs = {"graphs": list(self.graphs), "index": self.index}
        return {"path": self.path, **graphs, "nodes": nodes, "bindings": bindings}

    @classmethod
    def decode(cls, data: Any, decode: Decode) -> GraphPart:
        """The same again."""
        nodes = tuple(NodeFacts(*facts) for facts in data["nodes"])
        bindings = {name: decode(value) for name, value in data["bindings"].items()}
        return cls(data["path"], tuple(data["graphs"]), data["index"], nodes, bindings)

    def revive(self, node: Node) -> Any:
        """Look the nodes up in the graph that stands there now.

        Raises
        ------
        SlapoError
            Naming the first that is not there, or is another operation.
        """
        gm = self._graph_at(node)
        present = {each.name: each for each in gm.graph.nodes}
        for facts in self.nodes:
            self._check(facts, present, gm, node)
        found = [present[facts.name] for facts in self.nodes]
        values = {name: _with_nodes(value, present, node) for name, value in self.bindings.items()}
        return Subgraph(self.path, Match(found, values))

    def _graph_at(self, node: Node) -> fx.GraphModule:
        owner = node[self.path] if self.path else node
        module: Any = innermost(owner.mod)
        if not isinstance(module, fx.GraphModule):
            raise SlapoError(
                f"{spelled(owner.path)} is not traced here, and its {self.text} were found in a "
                "graph; replay on the same model, by the whole record"
            )
        present = _kinds_of(module)
        if present != self.graphs:
            raise SlapoError(
                f"{spelled(owner.path)} has graphs for {list(present)}, and had graphs for "
                f"{list(self.graphs)} when {self.text} were found; replay on the same model, in "
                "the mode (model.train() or model.eval()) that it was traced in"
            )
        return _graphs_of(module)[self.index]

    def _check(
        self, facts: NodeFacts, present: dict[str, fx.Node], gm: fx.GraphModule, node: Node
    ) -> None:
        here = present.get(facts.name)
        now = NodeFacts.of(here, gm) if here is not None else None
        if now == facts:
            return
        where = spelled(f"{node.path}.{self.path}".strip("."))
        near = difflib.get_close_matches(facts.name, present, n=3) or list(present)[:3]
        what = f"is {now}" if now is not None else f"is missing; the nearest are {near}"
        raise SlapoError(
            f"the graph of {where} is not the one that was recorded: its node {facts.name!r} was "
            f"{facts} and {what}; replay on the same model, traced by the same versions, or write "
            "the record anew by the program that made it"
        )


@dataclass(frozen=True)
class GraphNode(GraphPart):
    """One node, as ``find_node`` returns it."""

    tag = "node"

    @property
    def text(self) -> str:
        """Its name."""
        return f"%{self.nodes[0].name}"

    def revive(self, node: Node) -> Located:
        """The pair of path and node."""
        (pair,) = super().revive(node)
        return pair


@dataclass(frozen=True)
class Bound(Part):
    """A node that an argument of a pattern stands for."""

    tag = "value"
    name: str

    @property
    def text(self) -> str:
        """Its name."""
        return f"%{self.name}"


@dataclass(frozen=True)
class BoundState(Part):
    """A parameter or the mode of a called module, that an argument of a pattern stands for."""

    tag = "state"
    state: ModuleState

    @property
    def text(self) -> str:
        """Module and name."""
        return f"{self.state.target}.{self.state.name}"

    def encode(self) -> Any:
        """Module and name."""
        return [self.state.target, self.state.name]

    @classmethod
    def decode(cls, data: Any, decode: Decode) -> BoundState:
        """Module and name."""
        return cls(ModuleState(*data))

    def revive(self, node: Node) -> ModuleState:
        """The same."""
        return self.state


def _with_nodes(value: Any, present: dict[str, fx.Node], node: Node) -> Any:
    """A bound value with the nodes of a graph in it."""
    if isinstance(value, Bound):
        if value.name in present:
            return present[value.name]
        raise SlapoError(f"node {value.name!r} is missing; replay on the same model")
    if isinstance(value, (list, tuple)):
        return type(value)(_with_nodes(item, present, node) for item in value)
    if isinstance(value, dict):
        return {key: _with_nodes(item, present, node) for key, item in value.items()}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(_with_nodes(part, present, node) for part in parts))
    return revive(value, node)


def is_pair(value: Any) -> bool:
    """Whether it is what ``find_node`` returns."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], fx.Node)


def keep_pair(value: Any, node: Node) -> Part:
    """One located node."""
    return _located(GraphNode, [value], {}, node)


def keep_subgraph(value: Subgraph, keep: Any, node: Node) -> Part:
    """A match."""
    bound = {name: map_aggregate(each, _by_name) for name, each in value.bindings.items()}
    bindings = {name: keep(each) for name, each in bound.items()}
    return _located(GraphPart, value, bindings, node)


def _by_name(value: Any) -> Any:
    """What only the graph has, by its name in that."""
    if isinstance(value, fx.Node):
        return Bound(value.name)
    return BoundState(value) if isinstance(value, ModuleState) else value


def _located(
    kind: type[GraphPart], pairs: list[Located], bindings: dict[str, Any], node: Node
) -> Part:
    path, first = pairs[0]
    module = innermost(node[path].mod) if isinstance(path, str) and path in node else None
    owners = enumerate(_graphs_of(module))
    index, gm = next(((k, gm) for k, gm in owners if gm.graph is first.graph), (0, None))
    if gm is None or any(n._erased for _, n in pairs):
        why = "nodes of another graph than stands there; pass what find() gives now"
        return Unnamed(describe(pairs), why)
    facts = tuple(NodeFacts.of(n, gm) for _, n in pairs)
    return kind(path, _kinds_of(module), index, facts, bindings)


def _graphs_of(module: Any) -> tuple[fx.GraphModule, ...]:
    """The owners of the graphs of a traced module; none of another."""
    own = (module,) if isinstance(module, fx.GraphModule) else ()
    return getattr(module, "graphs", own) if own else own


def _kinds_of(module: Any) -> tuple[str, ...]:
    """For each graph of a module, mode and constants of the calls that it is for."""
    graphs = _graphs_of(module)
    return tuple(_kind_of(each.contract) if len(graphs) > 1 else "" for each in graphs)


def _kind_of(contract: Any) -> str:
    mode = {True: "train", False: "eval", None: "any mode"}[contract.training]
    constants = sorted(f"{name}={describe(value)}" for name, value in contract.concrete.items())
    return ", ".join([mode, *constants])
