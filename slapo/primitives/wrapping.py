"""What the primitives that wrap or replace a module have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx, nn

from slapo.errors import SlapoError
from slapo.hooks import move_hooks
from slapo.op.wrapper import ModuleWrapper, innermost

if TYPE_CHECKING:
    from slapo.schedule import Schedule


def wrap(sch: Schedule, wrapper: ModuleWrapper) -> None:
    """Put `wrapper`, which holds the node's module, in its place; hooks run around the wrapper."""
    check_called(sch)
    move_hooks(sch.mod, wrapper)
    sch.set_module(wrapper)


def check_called(sch: Schedule) -> None:
    """Refuse to change a module that no traced ancestor calls any more.

    Raises
    ------
    SlapoError
        If the module was inlined into an ancestor's graph, where a change would have no effect.
    """
    path, node = sch.name, sch.parent
    while node is not None:
        module = innermost(node.mod)
        if isinstance(module, fx.GraphModule) and not _calls(module, path):
            raise SlapoError(
                f"{path!r} was inlined when {node.path or 'the root'!r} was traced, so its graph "
                "does not call the module any more; change the module before tracing, name it in "
                "leaf_modules, or use find() and the static form of the primitive"
            )
        if isinstance(module, fx.GraphModule):
            return  # graphs further up call this one, or refused when it was changed
        path, node = f"{node.name}.{path}", node.parent


def _calls(module: fx.GraphModule, path: str) -> bool:
    """True when the graph calls the module at `path` or one that contains it."""
    parts = path.split(".")
    prefixes = [".".join(parts[: k + 1]) for k in range(len(parts))]
    return any(
        next(iter(module.graph.find_nodes(op="call_module", target=prefix)), None) is not None
        for prefix in prefixes
    )


def check_module(value: object, what: str) -> nn.Module:
    """`value` if it is a module, else ``TypeError``."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{what} must be an nn.Module, got {type(value).__name__}: {value!r}")
    return value
