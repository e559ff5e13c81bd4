"""Split of one graph into stages: where each node runs, and which tensors cross."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from slapo.errors import SlapoError
from slapo.graph.trace.nests import ONES
from slapo.graph.trace.nodes import ModuleLookup, OpenRegions, spare_self
from slapo.graph.trace.operator_effects import viewed_operands, written_operands
from slapo.pipeline.kinds import (
    Kind,
    is_projection,
    kinds_of,
)


@dataclass
class StageGraph:
    """Graph of one stage."""

    #: its placeholders are `received`; it returns the tuple of `sent`, or in the last stage the
    #: output of the model
    graph: fx.Graph
    #: names of the received and sent tensors, in the order of their first computation
    received: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    #: for each received tensor, the dimensions of size 1 for all inputs
    ones: tuple[tuple[bool, ...], ...] = ()


def pass_on(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that a stage only forwards: it gets an autograd node."""
    return tensor.view_as(tensor)


def own_copy(tensor: Tensor) -> Tensor:
    """Copy a received tensor that the stage writes to."""
    # A received tensor is a leaf for autograd, which refuses writes to leaves that require
    # gradients.
    return tensor.clone()


def split_graph(graph: fx.Graph, ends: list[fx.Node], modules: ModuleLookup) -> list[StageGraph]:
    """Split `graph` after each node of `ends`, given in order.

    `modules` returns the module that a node calls by its target.

    A tensor crosses a cut if it is computed before it and used after it. Other values (sizes,
    dtypes, parameters) are recomputed in every stage that uses them. A module's tuple output is
    unpacked in the stage of the module.
    """
    plan = _Plan.of(graph, ends, modules)
    return [_StageBuilder(plan, index).build() for index in range(plan.n_stages)]


@dataclass
class _Plan:
    """Stages of all nodes, and the tensors that cross."""

    graph: fx.Graph
    n_stages: int
    kinds: dict[fx.Node, Kind]
    #: node -> the stage that computes it; values are recomputed wherever they are used
    stage_of: dict[fx.Node, int]
    modules: ModuleLookup
    #: stage -> tensors of earlier stages that it or a later one uses
    received: list[list[fx.Node]] = field(default_factory=list)
    #: stage -> received tensors that it writes to
    written: list[set[fx.Node]] = field(default_factory=list)

    @classmethod
    def of(cls, graph: fx.Graph, ends: list[fx.Node], modules: ModuleLookup) -> _Plan:
        kinds = kinds_of(graph)
        plan = cls(graph, len(ends) + 1, kinds, _assign(graph, ends, kinds), modules)
        plan._check_stages(ends)
        plan.received = plan._crossing()
        plan.written = plan._find_writes()
        return plan

    def _check_stages(self, ends: list[fx.Node]) -> None:
        busy = {self.stage_of[n] for n in self.graph.nodes if self._is_work(n)}
        for index, end in enumerate(ends):
            if not any(stage > index for stage in busy):
                raise SlapoError(
                    f"nothing runs after {end.target!r}, so no stage can begin there; leave out "
                    "this cut"
                )
            if index > 0 and index not in busy:
                raise SlapoError(
                    f"nothing runs between the cuts after {ends[index - 1].target!r} and "
                    f"{end.target!r}; remove one of them"
                )

    def _is_work(self, node: fx.Node) -> bool:
        # A class creates the output object, which alone makes no stage.
        if node.op in ("placeholder", "output") or isinstance(node.target, type):
            return False
        return self.kinds[node] != "value"

    def needs(self, node: fx.Node) -> list[fx.Node]:
        """Tensors that a node reads, directly or through recomputed values."""
        found: dict[fx.Node, None] = {}
        waiting, seen = list(node.all_input_nodes), set()
        while waiting:
            item = waiting.pop()
            if item in seen:
                continue
            seen.add(item)
            if self.kinds[item] == "value":
                waiting += item.all_input_nodes
            else:
                found[item] = None
        return list(found)

    def _crossing(self) -> list[list[fx.Node]]:
        """Liveness: from the stage after a tensor's own to the last that needs it."""
        last: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            # Values have no stage: `needs` finds their tensors where they are used.
            if self.kinds[node] == "value" and node.op != "output":
                continue
            for tensor in self.needs(node):
                last[tensor] = max(last.get(tensor, 0), self.stage_of[node])
        received: list[list[fx.Node]] = [[] for _ in range(self.n_stages)]
        for node in self.graph.nodes:
            if self.kinds[node] != "value" and node in last:
                for stage in range(self.stage_of[node] + 1, last[node] + 1):
                    received[stage].append(node)
        # The model's inputs, in the order of its signature; those for later stages pass through all
        # before.
        received[0] = [n for n in self.graph.find_nodes(op="placeholder") if n in last]
        for node in {n: None for nodes in received for n in nodes}:
            if self.kinds[node] == "container":
                users = [u.name for u in node.users if self.stage_of[u] > self.stage_of[node]]
                raise SlapoError(
                    f"{node.name!r}, a tuple or output object, is used as a whole by {users} in "
                    "a later stage, but stages send only tensors; cut elsewhere, or make the "
                    "module return tensors"
                )
        return received

    def _find_writes(self) -> list[set[fx.Node]]:
        """Received tensors that a stage writes to, under any alias; it will write to a copy."""
        written: list[set[fx.Node]] = [set() for _ in range(self.n_stages)]
        for node in self.graph.nodes:
            for target in written_operands(node, self.modules):
                if target.op == "get_attr":
                    self._check_attribute(node, target)
                here = self.stage_of[node]
                if here > 0 and self.kinds[target] != "value":
                    received = self._received_relatives(target, here)
                    self._check_seen_once(node, target, received)
                    written[here].update(received)
        return written

    def _received_relatives(self, target: fx.Node, here: int) -> list[fx.Node]:
        """Tensors of earlier stages, used from here on, that may share memory with `target`."""
        found = []
        for node in self._relatives(target):
            early = node.op == "placeholder" or self.stage_of[node] < here
            if early and any(self.stage_of[user] >= here for user in node.users):
                found.append(node)
        return found

    def _relatives(self, node: fx.Node) -> list[fx.Node]:
        """The node and all nodes that may share memory with it."""
        found: dict[fx.Node, None] = {}
        waiting = [node]
        while waiting:
            item = waiting.pop()
            if item not in found:
                found[item] = None
                waiting += viewed_operands(item, self.modules)
                waiting += (u for u in item.users if item in viewed_operands(u, self.modules))
        return list(found)

    def _check_seen_once(self, node: fx.Node, target: fx.Node, received: list[fx.Node]) -> None:
        here = self.stage_of[node]
        users = [user for tensor in received for user in tensor.users]
        others = [u.name for u in users if u is not node and self.stage_of[u] >= here]
        if len(received) > 1 or (received and received[0] is target and others):
            raise SlapoError(
                f"{node.format_node()} writes to {target.name!r}, which an earlier stage "
                f"computes and {others} also read, under this or another name; cut elsewhere"
            )

    def _check_attribute(self, node: fx.Node, target: fx.Node) -> None:
        """Refuse a buffer that one stage writes and another uses: it would have two copies."""
        places = self.graph.find_nodes(op="get_attr", target=target.target)
        stages = sorted({self.stage_of[user] for place in places for user in place.users})
        if len(stages) > 1:
            raise SlapoError(
                f"{node.format_node()} writes to {target.target!r}, but stages {stages} each use "
                "their own copy; cut so that one stage has all of its uses"
            )


def _assign(
    graph: fx.Graph, ends: list[fx.Node], kinds: Mapping[fx.Node, Kind]
) -> dict[fx.Node, int]:
    stage_of: dict[fx.Node, int] = {}
    pending = set(ends)
    stage = 0
    regions = OpenRegions()
    inside: tuple[fx.Node, ...] = ()
    for node in graph.nodes:
        stage_of[node] = 0 if node.op == "placeholder" else stage
        # Only tensors cross: a tuple is taken apart where it was computed, even if the cut is in
        # between.
        source = node.args[0] if is_projection(node) else None
        if isinstance(source, fx.Node) and kinds[source] == "container":
            stage_of[node] = stage_of[source]
        inside = regions.follow(node)
        if node in pending:
            if inside:
                raise SlapoError(
                    f"a stage cannot end after {node.target!r}: it is inside a no_grad or "
                    f"autocast block ({inside[-1].name}); cut before or after the block"
                )
            pending.remove(node)
            stage += 1
    return stage_of


class _StageBuilder:
    """Copies the nodes of one stage."""

    def __init__(self, plan: _Plan, index: int) -> None:
        self.plan, self.index = plan, index
        self.graph = spare_self(fx.Graph())
        self.env: dict[fx.Node, fx.Node] = {}

    def build(self) -> StageGraph:
        plan, index = self.plan, self.index
        received = plan.received[index]
        # A tensor with a default is always passed: the caller has looked it up.
        for node in received:
            self.env[node] = self.graph.placeholder(node.name)
        for node in received:
            if node in plan.written[index]:
                self.env[node] = self._call(own_copy, node)
        output: fx.Node | None = None
        for node in plan.graph.nodes:
            if node.op == "output":
                output = node
            elif plan.stage_of[node] == index and self._is_run(node):
                self._copy(node)
        sent: list[fx.Node] = []
        if index + 1 < plan.n_stages:
            sent = plan.received[index + 1]
            self.graph.output(tuple(self._hand_on(node) for node in sent))
        else:
            assert output is not None, "every graph has an output"
            self.graph.output(self._mapped(output.args[0]))
        names = tuple(n.name for n in received), tuple(n.name for n in sent)
        return StageGraph(self.graph, *names, tuple(n.meta.get(ONES, ()) for n in received))

    def _is_run(self, node: fx.Node) -> bool:
        """Return whether the node keeps its position; values are copied on first use."""
        if node.op == "placeholder":
            return False
        return self.plan.kinds[node] != "value" or _is_statement(node)

    def _hand_on(self, node: fx.Node) -> fx.Node:
        received = self.plan.stage_of[node] < self.index or node.op == "placeholder"
        if received and node not in self.plan.written[self.index]:
            return self._call(pass_on, node)
        return self.env[node]

    def _call(self, function: Any, node: fx.Node) -> fx.Node:
        return self.graph.call_function(function, (self.env[node],))

    def _mapped(self, value: Any) -> Any:
        return fx.node.map_arg(value, self._local)

    def _local(self, node: fx.Node) -> fx.Node:
        """Return the node in this stage; values are recomputed on first use."""
        if node not in self.env:
            assert self.plan.kinds[node] == "value", "tensors were received or computed here"
            self._copy(node)
        return self.env[node]

    def _copy(self, node: fx.Node) -> None:
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        new = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        new.meta = dict(node.meta)
        self.env[node] = new


def _is_statement(node: fx.Node) -> bool:
    """Return whether a node exists for its effect: checks, mode switches, module calls."""
    return node.op == "call_module" or (not node.users and node.op == "call_function")
