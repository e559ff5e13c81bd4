"""What a node of a graph names and holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch._ops import OpOverload

#: Gives the module for the target of a ``call_module`` node, as ``gm.get_submodule`` does.
ModuleLookup = Callable[[str], nn.Module]

CONTAINERS = (tuple, list, dict, slice)
"""Values that are compared part by part."""

Pair = tuple[Any, Any]


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


def inner_pairs(one: Any, other: Any) -> list[Pair] | None:
    """The parts of a container, each with that of another; None if they are not alike."""
    if isinstance(one, (tuple, list)):
        same = isinstance(other, (tuple, list)) and len(one) == len(other)
        return list(zip(one, other, strict=True)) if same else None
    if isinstance(one, dict):
        same = isinstance(other, dict) and one.keys() == other.keys()
        return [(one[key], other[key]) for key in one] if same else None
    if not isinstance(other, slice):
        return None
    return [(getattr(one, k), getattr(other, k)) for k in ("start", "stop", "step")]
