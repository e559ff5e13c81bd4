"""Kinds of graph nodes: those that compute tensors, and those of plain values such as sizes."""

from __future__ import annotations

import builtins
import math
import operator
from typing import Any, Literal

import torch
from torch import fx

from slapo.graph.trace.nests import KIND
from slapo.graph.trace.nodes import switches_mode

#: ``"tensor"``: may be sent between stages. ``"value"``: sizes, dtypes, flags. ``"container"``: a
#: tuple, list, dict or output object of tensors that a module returns.
Kind = Literal["tensor", "value", "container"]

_VALUE_METHODS = frozenset(
    {
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "item",
        "tolist",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "get_device",
        "__len__",
    }
)
_VALUE_ATTRIBUTES = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "itemsize",
        "nbytes",
        "names",
        "grad_fn",
        "training",
    }
)
_TUPLE_METHODS = frozenset(
    {
        "split",
        "chunk",
        "unbind",
        "tensor_split",
        "split_with_sizes",
        "hsplit",
        "vsplit",
        "dsplit",
        "max",
        "min",
        "sort",
        "topk",
        "kthvalue",
        "mode",
        "median",
        "cummax",
        "cummin",
        "aminmax",
    }
)
_VALUE_FUNCTIONS = frozenset(
    {
        torch.Size,
        torch.device,
        torch.finfo,
        torch.get_default_dtype,
        torch.iinfo,
        torch.is_complex,
        torch.is_floating_point,
        torch.is_grad_enabled,
        torch.is_tensor,
        torch.numel,
        torch.sym_float,
        torch.sym_int,
        torch.sym_max,
        torch.sym_min,
    }
)
_PLAIN_MODULES = (operator, builtins, math)
_PLAIN = frozenset(
    function
    for module in _PLAIN_MODULES
    for function in vars(module).values()
    if callable(function)
)


def kinds_of(graph: fx.Graph) -> dict[fx.Node, Kind]:
    """Return the kind of every node; captured nodes record it, for others it is inferred."""
    kinds: dict[fx.Node, Kind] = {}
    for node in graph.nodes:
        known = None if node.op == "get_attr" else node.meta.get(KIND)
        kinds[node] = "value" if switches_mode(node) else known or _inferred(node, kinds)
    return kinds


def _inferred(node: fx.Node, kinds: dict[fx.Node, Kind]) -> Kind:
    if node.op == "placeholder":
        return "tensor"
    if node.op == "get_attr":  # looked up again in each stage that uses it
        return "value"
    if node.op == "call_module":
        return "container" if _is_taken_apart(node) else "tensor"
    if node.op == "call_method":
        return _kind_of_method(node)
    return _kind_of_function(node, kinds)


def _kind_of_method(node: fx.Node) -> Kind:
    if node.target in _VALUE_METHODS:
        return "value"
    return "container" if node.target in _TUPLE_METHODS and _is_taken_apart(node) else "tensor"


def _kind_of_function(node: fx.Node, kinds: dict[fx.Node, Kind]) -> Kind:
    function: Any = node.target
    if function in _VALUE_FUNCTIONS:
        return "value"
    if function is getattr:
        of_value = kinds.get(node.args[0]) == "value"  # type: ignore[arg-type]
        return "value" if of_value or node.args[1] in _VALUE_ATTRIBUTES else "tensor"
    if function in _PLAIN:
        # Operators on tensors compute tensors; len(tensor) is a size.
        has_tensor = any(kinds[n] != "value" for n in node.all_input_nodes)
        return "tensor" if has_tensor and function is not len else "value"
    if isinstance(function, type):
        return "container"
    return "container" if _is_taken_apart(node) else "tensor"


def _is_taken_apart(node: fx.Node) -> bool:
    """Return whether users index the node by a constant, as a tuple or an output object."""
    return any(is_projection(user) for user in node.users)


def is_projection(node: fx.Node) -> bool:
    """Return whether a node is ``value[1]``, ``value["name"]`` or ``value.name``."""
    if node.target is operator.getitem:
        return isinstance(node.args[1], (int, str))
    return node.target is getattr and node.args[1] not in _VALUE_ATTRIBUTES
