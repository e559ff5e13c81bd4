"""Visibility of writes, and nodes that only compute sizes."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch.fx as fx

from slapo.graph.trace.nodes import ModuleLookup
from slapo.graph.trace.operator_effects import viewed_operands

_SIZE_ARITHMETIC = frozenset(
    (
        *(getattr, operator.add, operator.floordiv, operator.getitem),
        *(operator.mod, operator.mul, operator.neg, operator.sub),
    )
)


def is_private(value: Any, modules: ModuleLookup) -> bool:
    """Return whether only its single user can see a value, and so a write to it.

    Inputs and parameters are always visible; a view is as private as the viewed value.
    """
    return (
        isinstance(value, fx.Node)
        and value.op not in ("placeholder", "get_attr")
        and len(value.users) == 1
        and all(is_private(viewed, modules) for viewed in viewed_operands(value, modules))
    )


def size_helpers(matched: Collection[fx.Node], inputs: Collection[fx.Node]) -> set[fx.Node]:
    """Return nodes that only compute sizes for a match; `inputs` stay outside."""
    helpers: set[fx.Node] = set()
    pending = [value for node in matched for value in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node in helpers or node in matched or node in inputs:
            continue
        # A node that fails here is tried again when another of its users becomes a helper.
        used_inside = all(user in matched or user in helpers for user in node.users)
        if used_inside and is_size(node):
            helpers.add(node)
            pending.extend(node.all_input_nodes)
    return helpers


def is_size(node: Any) -> bool:
    """Return whether a value is ``x.size()``, ``x.shape``, or arithmetic on these."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    if node.op != "call_function" or node.target not in _SIZE_ARITHMETIC:
        return False
    if node.target is getattr:
        return node.args[1:] in (("shape",), ("ndim",))
    values = node.all_input_nodes
    return bool(values) and all(is_size(value) for value in values)
