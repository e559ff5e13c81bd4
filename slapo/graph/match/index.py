"""A graph as the search sees it: its operations by name, and the tensors it looks up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from slapo.graph.match.canonical import (
    Call,
    ModuleState,
    bind_signature,
    call_of,
    key_of,
    module_key,
)
from slapo.graph.match.pattern import call_module
from slapo.graph.match.steps import Step
from slapo.graph.match.values import same_settings, same_value
from slapo.graph.trace.nodes import ModuleLookup


class TracedGraph(NamedTuple):
    """A graph of a traced module, and the module's path from where the search began."""

    path: str
    module: fx.GraphModule
    graph: fx.Graph


class GraphIndex:
    """The nodes of a graph by the operations of one pattern.

    Parameters
    ----------
    graph
        The graph to search.
    modules
        Gives the module for the target of a ``call_module`` node.
    steps
        The operations of the pattern.
    """

    def __init__(self, graph: fx.Graph, modules: ModuleLookup, steps: dict[fx.Node, Step]) -> None:
        self.modules = modules
        self._calls: dict[tuple[fx.Node, bool], Call] = {}
        self.nodes: dict[Hashable, list[fx.Node]] = {step.call.key: [] for step in steps.values()}
        by_class = any(isinstance(key, tuple) and key[0] == "module" for key in self.nodes)
        for node in graph.nodes:
            found = self.nodes.get(key_of(node, modules))
            if found is not None:
                found.append(node)
            if node.op == "call_module":
                self._add_module_call(node, by_class)

    def _add_module_call(self, node: fx.Node, by_class: bool) -> None:
        """List the call of a module under its other names."""
        if call_module in self.nodes:
            self.nodes[call_module].append(node)
        if by_class:
            key = module_key(type(self.modules(str(node.target))))
            found = self.nodes.get(key)
            if found is not None and (not found or found[-1] is not node):
                found.append(node)

    def candidates(self, step: Step) -> list[fx.Node]:
        """List the nodes that may be `step`, in graph order."""
        nodes = self.nodes[step.call.key]
        if step.regex is None:
            return nodes
        return [node for node in nodes if step.regex.match(str(node.target))]

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
            return node.op == "call_module" and bool(step.regex.match(str(node.target)))
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
        return (
            same_value(one, tensor)
            if isinstance(one, torch.Tensor)
            else (self._tensor(one) is tensor)
        )

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
