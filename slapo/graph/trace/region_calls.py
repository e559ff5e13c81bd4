"""Regions of ``no_grad``, ``autocast`` and inference mode in a graph."""

from __future__ import annotations

from torch import fx

from slapo.graph.trace.nodes import called_name


def begins_region(node: fx.Node) -> bool:
    """Whether the node enters a region that switches gradients, autocast or inference mode."""
    name = called_name(node) if node.op == "call_function" else ""
    return name.startswith("_enter_") or (name == "_set_grad_enabled" and node.args[0] is False)


def ends_region(node: fx.Node) -> bool:
    """Whether the node leaves such a region."""
    name = called_name(node) if node.op == "call_function" else ""
    return name.startswith("_exit_") or (name == "_set_grad_enabled" and node.args[0] is True)
