"""Shared code of the primitives that wrap, replace or shard a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from slapo.errors import SlapoError
from slapo.graph.match.subgraph_view import views_of
from slapo.history import describe
from slapo.hooks import move_hooks
from slapo.node import Node
from slapo.sharding.state import layout_of
from slapo.snapshot import restored_on_error
from slapo.wrapper import ModuleWrapper, innermost, is_adapted


def wrap(sch: Node, wrapper: ModuleWrapper) -> None:
    """Replace the node's module by `wrapper`, which holds it; hooks run around the wrapper."""
    check_runs(sch)
    check_called(sch)
    bare = innermost(sch.mod)
    # A wrapper forwards unknown attributes to its module, but finds its own `mod` first.
    if "mod" in bare._modules or "mod" in bare._parameters or "mod" in bare.__dict__:
        raise ValueError(
            f"{type(bare).__name__} has an attribute 'mod', which the wrapper's own 'mod' would "
            "hide from readers outside; rename it, or apply this to a module inside or around it"
        )
    # Hooks stay outside, so a recomputation does not run the module's own collectives again.
    move_hooks(sch.mod, wrapper)
    sch.set_module(wrapper)


def check_not_wrapped(sch: Node, cls: type[ModuleWrapper]) -> None:
    """Raise if the module has a wrapper of this class already."""
    module = sch.mod
    while isinstance(module, ModuleWrapper):
        if isinstance(module, cls):
            raise ValueError(f"it is in a {cls.__name__} already; leave the second call out")
        module = module.mod


def check_runs(sch: Node) -> None:
    """Raise for a container: it is never called, so its forward cannot be wrapped."""
    module = innermost(sch.mod)
    if isinstance(module, torch.jit.ScriptModule):
        return  # its class does not show its forward
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        raise ValueError(
            f"{type(module).__name__} has no forward, so nothing would happen; name one of its "
            f"children: {list(sch.child)[:4]}"
        )


def check_called(sch: Node, tensor: str | None = None) -> None:
    """Raise if the graph of a traced ancestor no longer calls the module."""
    path = sch.name
    for node in sch.ancestors():
        module = innermost(node.mod)
        if isinstance(module, fx.GraphModule):
            read = tensor is not None and _has(module, "get_attr", f"{path}.{tensor}")
            if read or _calls(module, path):
                return  # graphs further up call this one, or a check has raised
            raise SlapoError(
                f"{path!r} was inlined when {node.path or 'the root'} was traced, so its graph "
                "no longer calls the module; change the module before tracing, name it in "
                "leaf_modules, or use find() and the static form of the primitive"
            )
        path = f"{node.name}.{path}"


def _calls(module: fx.GraphModule, path: str) -> bool:
    """Return True if the graph calls the module at `path` or one that contains it."""
    parts = path.split(".")
    prefixes = [".".join(parts[: k + 1]) for k in range(len(parts))]
    if any(_has(module, "call_module", prefix) for prefix in prefixes):
        return True
    return any(_calls(view, path) for view in views_of(module))


def _has(module: fx.GraphModule, op: str, target: str) -> bool:
    return next(iter(module.graph.find_nodes(op=op, target=target)), None) is not None


def check_own_tensor(sch: Node, name: str) -> None:
    """Raise for the name of a submodule's tensor, and name the module to use."""
    path, _, leaf = name.rpartition(".")
    if path and path in sch:
        full = f"{sch.path}.{path}" if sch.path else path
        raise ValueError(
            f"{name!r} is a tensor of the module at {full!r}; name the module in the path: "
            f'sch["{full}"], and the tensor by {leaf!r}'
        )


def check_module(
    value: object, what: str, remedy: str = "pass an instance of a module class"
) -> nn.Module:
    """Return `value` if it is a module, else raise ``TypeError``."""
    if isinstance(value, Node):
        remedy = "pass its module, .mod"
    if isinstance(value, type) and issubclass(value, nn.Module):
        remedy = f"pass an instance of it, such as {value.__name__}(...)"
    if not isinstance(value, nn.Module):
        raise TypeError(f"{what} must be an nn.Module, got {describe(value)}; {remedy}")
    return value


# --- low-rank adapters: see slapo/sharding/adapters.py -------------------------------------------
def base_of(sch: Node) -> Node:
    """The layer inside adapters, or the node itself without adapters."""
    return sch["base_layer"] if is_adapted(innermost(sch.mod)) else sch


def with_adapters(sch: Node, primitive: Callable[[Any], Any]) -> Node:
    """Apply a primitive to the layer inside adapters; they follow it."""
    from slapo.sharding import adapters  # late: for adapted layers only

    module = innermost(sch.mod)
    adapters.check_adapters(module, sch.path)
    with restored_on_error(sch):
        primitive(base_of(sch))
        adapters.follow_layer(module)
    return sch


def reduces_within(sch: Node) -> bool:
    """Return True if the layer inside adapters outputs a partial sum; the adapters then do too."""
    output = layout_of(innermost(base_of(sch).mod)).output
    return base_of(sch) is not sch and output is not None and output.kind == "partial"
