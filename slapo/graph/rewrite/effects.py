"""What the nodes of a graph do beside returning a value: writes, views, and random draws."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from slapo.graph.match.dataflow import is_size
from slapo.graph.match.subgraph_view import SubgraphView
from slapo.graph.rewrite.subgraph import HasGraph, attribute
from slapo.graph.trace.nodes import HeldModule
from slapo.graph.trace.operator_effects import (
    FUNCTIONS,
    MARKS,
    changes_sizes,
    draws_random_numbers,
    viewed_operands,
    written_operands,
)
from slapo.wrapper import innermost

Root = Hashable
"""Memory that values share: the node that made it, or ``("state", id of a tensor)``."""

_DRAWING = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class Effects:
    """The effects of the nodes of one graph: of a graph module, or of a view of a traced one.

    >>> gm = fx.symbolic_trace(lambda x, y: (x.view(-1).add_(1), torch.dropout(y, 0.1, True)))
    >>> x, y, view, write, dropout, _ = gm.graph.nodes
    >>> effects = Effects(gm)
    >>> effects.writes(write), effects.reads(view), effects.draws(dropout)
    ({x}, {x}, True)
    """

    def __init__(self, gm: HasGraph) -> None:
        self._gm = gm
        self._roots: dict[fx.Node, frozenset[Root]] = {}

    def writes(self, node: fx.Node) -> set[Root]:
        """What a node changes in place, the state of a module that it calls included."""
        written = self.roots(written_operands(node, self._gm.get_submodule))
        if written and changes_sizes(node):
            written |= {("sizes", root) for root in written}
        return written | _state(self._tensors(node)[1])

    def reads(self, node: fx.Node) -> set[Root]:
        """What a node looks at. A look at sizes sees no write but those that change them."""
        roots = self.roots(node.all_input_nodes)
        if is_size(node):
            return {("sizes", root) for root in roots}
        return roots | _state(self._tensors(node)[0])

    def draws(self, node: fx.Node) -> bool:
        """Whether a node draws random numbers, be it in training only."""
        if "draws" in node.meta.get(MARKS, ()):
            return True
        if _calls_module(node):
            return draws_in(self._module(node))
        if node.op not in FUNCTIONS:
            return False
        # Higher-order operators take functions that the module has.
        looked_up = (str(v.target) for v in node.all_input_nodes if v.op == "get_attr")
        functions = (attribute(self._gm, target) for target in looked_up)
        return draws_random_numbers(node) or any(
            draws_in(function) for function in functions if isinstance(function, nn.Module)
        )

    def roots(self, values: Iterable[fx.Node]) -> set[Root]:
        """The memory that values may share with others, found by going up along views."""
        asked = list(values)
        pending, new = list(asked), set[fx.Node]()
        while pending:
            value = pending.pop()
            if value not in self._roots and value not in new:
                new.add(value)
                pending.extend(self.viewed(value))
        for value in sorted(new):  # what is viewed stands before its views
            above = self.viewed(value)
            known = [self._roots[v] for v in above] or [frozenset({self._root(value)})]
            self._roots[value] = frozenset().union(*known)
        return set().union(*(self._roots[value] for value in asked))

    def viewed(self, node: fx.Node) -> list[fx.Node]:
        """The inputs that the value of a node may share memory with."""
        return viewed_operands(node, self._gm.get_submodule)

    def _tensors(self, node: fx.Node) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The state that a called module uses, and what of it the module may change."""
        if not _calls_module(node):
            return [], []
        module = self._module(node)
        if isinstance(module, SubgraphView):
            used, changed = Effects(module)._all_tensors()  # a view holds all and uses little
        else:
            changed = list(module.buffers())
            used = [*module.parameters(), *changed]
        rescales = getattr(module, "max_norm", None) is not None  # rows that it looks up
        return used, used if rescales or "writes" in node.meta.get(MARKS, ()) else changed

    def _all_tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The state that the whole graph uses, and what of it may change."""
        used, changed = list[torch.Tensor](), list[torch.Tensor]()
        for node in self._gm.graph.nodes:
            more_used, more_changed = self._tensors(node)
            value = attribute(self._gm, str(node.target)) if node.op == "get_attr" else None
            used += [*more_used, *([value] if isinstance(value, torch.Tensor) else [])]
            changed += more_changed
        return used, changed

    def _root(self, value: fx.Node) -> Root:
        tensor = attribute(self._gm, str(value.target)) if value.op == "get_attr" else None
        return ("state", id(tensor)) if isinstance(tensor, torch.Tensor) else value

    def _module(self, node: fx.Node) -> nn.Module:
        target: Any = node.target
        held = isinstance(target, HeldModule)
        return innermost(target.module if held else self._gm.get_submodule(target))


def _calls_module(node: fx.Node) -> bool:
    return node.op == "call_module" or isinstance(node.target, HeldModule)


def draws_in(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training, whatever its present mode.

    Dropout that a module calls as a function is known by an attribute for its probability, such
    as ``attention_dropout``.

    >>> draws_in(nn.Sequential(nn.Dropout(0.1))), draws_in(nn.Dropout(0.0))
    (True, False)
    """
    module = innermost(module)
    if isinstance(module, fx.GraphModule):  # its children count where they are called
        effects = Effects(module)
        return any(effects.draws(node) for node in module.graph.nodes)
    if isinstance(module, _DropoutNd):
        return module.p > 0
    rates = [value for name, value in vars(module).items() if "drop" in name]
    if isinstance(module, _DRAWING) or any(isinstance(r, float) and r > 0 for r in rates):
        return True
    return any(draws_in(child) for child in module.children())


def _state(tensors: Iterable[torch.Tensor]) -> set[Root]:
    return {("state", id(tensor)) for tensor in tensors}
