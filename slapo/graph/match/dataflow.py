"""Questions about values in a graph: who may see a write, and which nodes only serve others."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch.fx as fx

from slapo.graph.trace.modes import select_by_mode
from slapo.graph.trace.nodes import ModuleLookup
from slapo.graph.trace.operator_effects import viewed_operands

_SIZE_ARITHMETIC = frozenset(
    {
        getattr,
        operator.add,
        operator.floordiv,
        operator.getitem,
        operator.mod,
        operator.mul,
        operator.neg,
        operator.sub,
    }
)


def is_private(value: Any, modules: ModuleLookup) -> bool:
    """Tell whether nothing but its one user can see a value, and so a write to it.

    Values from outside of the graph (inputs, parameters) are always seen; a view is as private as
    the value it views.

    Parameters
    ----------
    value : Any
        What an in-place call writes to.
    modules : callable
        Gives the module for the target of a ``call_module`` node.

    Returns
    -------
    bool
        False also if it is not known.
    """
    pending = [value]
    while pending:
        value = pending.pop()
        if not isinstance(value, fx.Node) or value.op in ("placeholder", "get_attr"):
            return False
        if len(value.users) != 1:
            return False
        pending.extend(viewed_operands(value, modules))
    return True


def size_helpers(matched: Collection[fx.Node], inputs: Collection[fx.Node]) -> set[fx.Node]:
    """Find the nodes that compute sizes for a match and for nothing else.

    Parameters
    ----------
    matched : collection of torch.fx.Node
        The nodes of the match.
    inputs : collection of torch.fx.Node
        Values that stay outside in any case.

    Returns
    -------
    set of torch.fx.Node
        Nodes outside of `matched` all of whose users are matched or helpers themselves.
    """
    helpers: set[fx.Node] = set()
    pending = [value for node in matched for value in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node in helpers or node in matched or node in inputs:
            continue
        used_inside = all(user in matched or user in helpers for user in node.users)
        if used_inside and is_size(node):
            helpers.add(node)
            pending.extend(node.all_input_nodes)
    return helpers


def is_size(node: fx.Node) -> bool:
    """Tell whether a node gives sizes: ``x.size()``, ``x.shape``, or arithmetic on these.

    Parameters
    ----------
    node : torch.fx.Node
        Any node.

    Returns
    -------
    bool
        True for numbers, and tuples of numbers, that depend on nothing but shapes.
    """
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    if node.op != "call_function" or node.target not in _SIZE_ARITHMETIC:
        return False
    if node.target is getattr:
        return node.args[1:] in (("shape",), ("ndim",))
    values = node.all_input_nodes
    return bool(values) and all(is_size(value) for value in values)


def tells_mode(node: fx.Node) -> bool:
    """Tell whether a node only says whether the module is in training mode, or depends on that.

    Parameters
    ----------
    node : torch.fx.Node
        Any node.

    Returns
    -------
    bool
        True for a look-up of ``training`` and for a constant chosen by it.
    """
    if node.op == "call_function" and node.target is select_by_mode:
        return True
    return node.op == "get_attr" and str(node.target).split(".")[-1] == "training"
