"""Which modules a trace enters, and which stay opaque calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo.graph.trace.hf import collects
from slapo.hooks import MODE_ATTRIBUTE

#: ``is_leaf(module, path)``: True for modules that become one call.
IsLeaf = Callable[[nn.Module, str], bool]

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def is_torch_leaf(module: nn.Module) -> bool:
    """True for layers of ``torch.nn`` itself, containers excepted, and for compiled modules."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if type(module) is nn.Module:
        return False  # a bare one is there to hold others
    home = type(module).__module__
    return home.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, CONTAINERS)


def is_sealed(module: nn.Module) -> bool:
    """True for modules that never become graphs: torch's own, and those that say so."""
    return is_torch_leaf(module) or not getattr(module, "traceable", True)


def is_opaque(module: nn.Module) -> bool:
    """True for modules that must stay one call of another's graph."""
    return is_sealed(module) or has_foreign_hooks(module)


def sync_hooks(root: nn.Module) -> list[Any]:
    """The hooks of syncs on the modules below `root`; a graph shows their ``_slapo_carry``."""
    found = {
        id(hook): hook
        for module in root.modules()
        if module is not root
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if hasattr(hook, MODE_ATTRIBUTE)
    }
    return list(found.values())


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether calling a module runs hooks that a graph of its forward would not show.

    Slapo's own syncs become operations of the graph, and Transformers' collecting hooks only look.
    """
    before = _foreign(module._forward_pre_hooks.values())
    return before or _foreign(module._forward_hooks.values()) or _has_backward_hooks(module)


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _foreign(hooks: Iterable[Callable[..., Any]]) -> bool:
    return any(not hasattr(hook, MODE_ATTRIBUTE) and not collects(hook) for hook in hooks)


@dataclass(frozen=True)
class Depth:
    """How far a trace enters the modules below: the ``is_leaf`` of a capture.

    Parameters
    ----------
    flatten
        Enter every module that is not opaque; else only those marked ``inline_in_trace = True``.
    leaf_modules
        Class names or paths that stay opaque in any case.
    """

    flatten: bool = False
    leaf_modules: frozenset[str] = frozenset()

    def __call__(self, module: nn.Module, path: str) -> bool:
        """Whether the module at `path` stays one call."""
        if path in self.leaf_modules or type(module).__name__ in self.leaf_modules:
            return True
        if is_opaque(module) or "forward" in vars(module):
            return True
        trace = vars(module).get("_trace")
        if trace is not None and trace.is_rewritten:
            return True  # entered, its own forward would take the place of its graph
        return not (self.flatten or getattr(module, "inline_in_trace", False))
