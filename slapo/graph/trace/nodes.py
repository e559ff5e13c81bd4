"""What a node of a graph names and holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch._ops import OpOverload

#: Gives the module for the target of a ``call_module`` node, as ``gm.get_submodule`` does.
ModuleLookup = Callable[[str], nn.Module]


def called_name(node: fx.Node) -> str:
    """Name of the function or method that a node calls, empty if it has none.

    Examples
    --------
    >>> import torch
    >>> called_name(fx.Graph().call_function(torch.ops.aten.add_.Tensor))
    'add_'
    """
    target: Any = node.target
    if isinstance(target, str):
        return target if node.op == "call_method" else ""
    if isinstance(target, OpOverload):
        return target._schema.name.split("::")[-1]
    return str(getattr(target, "__name__", ""))


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in nested containers, in order.

    Examples
    --------
    >>> x = fx.Graph().placeholder("x")
    >>> nodes_in([1, {"k": (x, slice(x))}])
    [x, x]
    """
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)
    return nodes


def attribute(root: nn.Module, target: str) -> Any:
    """What a path, as a ``get_attr`` node has it, leads to."""
    owner, _, name = target.rpartition(".")
    return getattr(root.get_submodule(owner), name)
