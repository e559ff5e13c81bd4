"""Which modules a trace enters and which stay opaque calls."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.module import TracedModule
from slapo.hooks import has_forward_hooks

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
    """True for modules that must stay one call of another's graph.

    Beside sealed modules, that is those with hooks: a graph of the forward does not show them.
    """
    return is_sealed(module) or has_forward_hooks(module)


def default_is_leaf(flatten: bool, leaf_modules: Collection[str] = ()) -> IsLeaf:
    """The rule of :meth:`Schedule.trace`.

    Parameters
    ----------
    flatten
        Enter every module that is not opaque; else enter only those marked
        ``inline_in_trace = True``.
    leaf_modules
        Class names or paths that stay opaque in any case.
    """
    names = frozenset(leaf_modules)

    def is_leaf(module: nn.Module, path: str) -> bool:
        if path in names or type(module).__name__ in names or is_opaque(module):
            return True
        if isinstance(module, TracedModule) and module.has_limits:
            return True  # its graph within another would serve all calls
        return not (flatten or getattr(module, "inline_in_trace", False))

    return is_leaf


def check_modes(root: nn.Module, entered: Collection[str]) -> None:
    """One graph follows one flag: that of its root.

    Parameters
    ----------
    root
        The traced module.
    entered
        Paths of the modules whose operations its graph holds.

    Raises
    ------
    TraceError
        If one of these is in training mode and the root is not, or the other way round.
    """
    differing = sorted(p for p in entered if root.get_submodule(p).training != root.training)
    if differing:
        raise TraceError(
            f"{differing[0]!r} would be part of the graph, and its training is "
            f"{not root.training} while that of the traced module is {root.training}; set the "
            "modes alike before the trace, or name it in leaf_modules"
        )


def depends_on_mode(graph: fx.Graph, training: bool | None) -> bool:
    """Whether a graph that holds in mode `training` (None: in both) asks for the mode."""
    return training is not None or bool(graph.find_nodes(op="get_attr", target="training"))
