"""Side effects of graph nodes: writes, views, and random draws."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from slapo.graph.match.dataflow import is_size
from slapo.graph.match.subgraph_view import SubgraphView
from slapo.graph.trace.nodes import HeldModule, attribute
from slapo.graph.trace.operator_effects import (
    FUNCTIONS,
    MARKS,
    changes_sizes,
    draws_random_numbers,
    viewed_operands,
    written_operands,
)
from slapo.graph.trace.views import View
from slapo.wrapper import innermost

HasGraph: TypeAlias = fx.GraphModule | View
"""A graph with the modules that it calls."""

Root: TypeAlias = Hashable
"""Memory that values share: the node that made it, or ``("state", id of a tensor)``."""

_DRAWING = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class Effects:
    """Effects of the nodes of one graph, of a graph module or of a traced module's view."""

    def __init__(self, gm: HasGraph) -> None:
        self._gm = gm
        self._roots: dict[fx.Node, frozenset[Root]] = {}

    def writes(self, node: fx.Node) -> set[Root]:
        """Return the values that a node changes in place, including state of a called module."""
        written = self.roots(written_operands(node, self._gm.get_submodule))
        # Sizes are memory of their own: a size query may pass a write to values, and not a resize.
        if written and changes_sizes(node):
            written |= {("sizes", root) for root in written}
        return written | self._state_of(node)[1]

    def reads(self, node: fx.Node) -> set[Root]:
        """Return the values that a node reads; a size query reads only the sizes."""
        roots = self.roots(node.all_input_nodes)
        if is_size(node):
            return {("sizes", root) for root in roots}
        return roots | self._state_of(node)[0]

    def draws(self, node: fx.Node) -> bool:
        """Return whether a node draws random values, even if only in training."""
        if "draws" in node.meta.get(MARKS, ()):
            return True
        if (module := called_module(self._gm, node)) is not None:
            return draws_in(module)
        if node.op not in FUNCTIONS:
            return False
        # Higher-order operators take functions that are modules of the graph.
        values = map(self._looked_up, node.all_input_nodes)
        functions = (value for value in values if isinstance(value, nn.Module))
        return draws_random_numbers(node) or any(map(draws_in, functions))

    def roots(self, values: Iterable[fx.Node]) -> set[Root]:
        """Return the memory that values may share, found by following views upward."""
        # Iterative, because chains of views in a long graph would exceed Python's recursion limit.
        asked = list(values)
        pending, above = list(asked), dict[fx.Node, list[fx.Node]]()
        while pending:
            value = pending.pop()
            if value not in self._roots and value not in above:
                above[value] = self.viewed(value)
                pending.extend(above[value])
        for value in sorted(above):  # viewed values precede their views
            known = [self._roots[v] for v in above[value]] or [frozenset({self._root(value)})]
            self._roots[value] = frozenset().union(*known)
        return set().union(*(self._roots[value] for value in asked))

    def viewed(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs that a node's value may share memory with."""
        return viewed_operands(node, self._gm.get_submodule)

    def _state_of(self, node: fx.Node) -> tuple[set[Root], set[Root]]:
        """Return the state that a called module uses, and the part that it may change."""
        module = called_module(self._gm, node)
        if module is None:
            return set(), set()
        if isinstance(module, SubgraphView):
            # a view holds the owner's full state but uses little of it
            used, changed = Effects(module)._all_state()
        else:
            # Any buffer may be a statistic that the forward updates; parameters change in the
            # optimizer only.
            changed = _state(module.buffers())
            used = changed | _state(module.parameters())
        rescales = getattr(module, "max_norm", None) is not None  # embedding rows that it looks up
        return used, used if rescales or "writes" in node.meta.get(MARKS, ()) else changed

    def _all_state(self) -> tuple[set[Root], set[Root]]:
        """Return the state that the full graph uses, and the part that may change."""
        nodes = self._gm.graph.nodes
        looked_up = (self._looked_up(node) for node in nodes)
        used = _state(value for value in looked_up if isinstance(value, torch.Tensor))
        pairs = [self._state_of(node) for node in nodes]
        return used.union(*(each for each, _ in pairs)), set().union(*(each for _, each in pairs))

    def _root(self, value: fx.Node) -> Root:
        tensor = self._looked_up(value)
        return ("state", id(tensor)) if isinstance(tensor, torch.Tensor) else value

    def _looked_up(self, node: fx.Node) -> Any:
        found: Any = self._gm  # a view looks up modules as a module does
        return attribute(found, str(node.target)) if node.op == "get_attr" else None


def called_module(gm: HasGraph, node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls, without its wrappers, or None."""
    target: Any = node.target
    if isinstance(target, HeldModule):
        return innermost(target.module)
    return innermost(gm.get_submodule(target)) if node.op == "call_module" else None


def draws_in(module: nn.Module) -> bool:
    """Return whether a module draws random values in training, whatever its current mode."""
    module = innermost(module)
    if isinstance(module, fx.GraphModule):  # its children count where the graph calls them
        effects = Effects(module)
        return any(effects.draws(node) for node in module.graph.nodes)
    if isinstance(module, _DropoutNd):
        return module.p > 0
    # Functional dropout with a rate such as ``attention_dropout``.
    rates = [value for name, value in vars(module).items() if "drop" in name]
    if isinstance(module, _DRAWING) or any(isinstance(r, float) and r > 0 for r in rates):
        return True
    return any(draws_in(child) for child in module.children())


def _state(tensors: Iterable[torch.Tensor]) -> set[Root]:
    return {("state", id(tensor)) for tensor in tensors}
