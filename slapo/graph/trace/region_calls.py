"""Grad-mode regions in a graph: ``with torch.no_grad():`` as two calls.

The end of a region restores the mode that was on when the *graph* entered it, so a graph recorded
with gradients on does not switch them on inside a caller's ``no_grad``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from slapo.graph.trace.nodes import called_name

# By name, as graphs that were loaded from a file have them; with underscores torch's own.
_BEGIN = ("enter_grad_mode", "enter_autocast", "_enter_autocast", "_enter_inference_mode")
_END = ("leave_grad_mode", "leave_autocast", "_exit_autocast", "_exit_inference_mode")


def enter_grad_mode(enabled: bool) -> bool:
    """Switch gradients on or off; returns the mode until now.

    Examples
    --------
    >>> before = enter_grad_mode(False)
    >>> torch.is_grad_enabled()
    False
    >>> leave_grad_mode(before)
    """
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(enabled)
    return before


def leave_grad_mode(before: bool) -> None:
    """Back to the mode that :func:`enter_grad_mode` has returned."""
    torch._C._set_grad_enabled(before)


def enter_autocast(device_type: str, dtype: Any, enabled: bool, cache_enabled: bool) -> Any:
    """Enter an autocast region; returns what :func:`leave_autocast` takes."""
    region = torch.autocast(device_type, dtype, enabled, cache_enabled)
    region.__enter__()
    return region


def leave_autocast(region: Any) -> None:
    """Leave the region that :func:`enter_autocast` has entered."""
    region.__exit__(None, None, None)


def begins_region(node: fx.Node) -> bool:
    """Whether the node enters a block that switches gradients, autocast or inference mode."""
    return node.op == "call_function" and called_name(node) in _BEGIN


def ends_region(node: fx.Node) -> bool:
    """Whether the node leaves a block that :func:`begins_region` tells of."""
    return node.op == "call_function" and called_name(node) in _END


@dataclass
class Regions:
    """Turns the switches of dynamo's graphs into regions.

    Parameters
    ----------
    graph
        Where the nodes go. The capture began with gradients on.
    """

    graph: fx.Graph
    last: Any = None
    _enabled: bool = True
    _open: list[tuple[bool, fx.Node]] = field(default_factory=list)

    def copy(self, node: fx.Node, argument: Callable[[Any], Any]) -> bool:
        """Copy a node that begins or ends a region; False for all others."""
        if node.target is torch._C._set_grad_enabled:
            self.last = self._switch(bool(node.args[0]))
        elif node.target is torch.amp.autocast_mode._enter_autocast:
            self.last = self.graph.call_function(enter_autocast, argument(node.args))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            self.last = self.graph.call_function(leave_autocast, argument(node.args))
        else:
            return False
        self.last.meta["slapo_kind"] = "value"
        return True

    def _switch(self, enabled: bool) -> fx.Node:
        """A switch back to the mode from before the innermost region ends that region."""
        before, self._enabled = self._enabled, enabled
        if self._open and self._open[-1][0] == enabled:
            return self.graph.call_function(leave_grad_mode, (self._open.pop()[1],))
        node = self.graph.call_function(enter_grad_mode, (enabled,))
        self._open.append((before, node))
        return node
