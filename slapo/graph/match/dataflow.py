"""Questions about values in a graph: who may see a write, and which nodes only serve others."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch.fx as fx

from slapo.graph.match.canonical import Call, written_operand
from slapo.graph.trace.modes import select_by_mode

_VIEW_METHODS = frozenset(
    {
        *("chunk", "detach", "diagonal", "expand", "flatten", "narrow", "permute", "reshape"),
        *("select", "split", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze"),
        *("view", "view_as"),
    }
)
_SIZE_ARITHMETIC = frozenset(
    {
        getattr,
        operator.add,
        operator.floordiv,
        operator.getitem,
        operator.mod,
        operator.mul,
        operator.neg,
        operator.sub,
    }
)
_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in (
        *("setitem", "iadd", "iand", "ifloordiv", "imatmul", "imod", "imul", "ior"),
        *("ipow", "isub", "itruediv", "ixor"),
    )
)


def writes_in_private(call: Call) -> bool:
    """Tell whether an in-place call overwrites a value that nothing else can see.

    Then it computes the same as its counterpart that is not in place. Values from outside of the
    graph (inputs, parameters) are always seen; a view is as private as the value it views.

    Parameters
    ----------
    call : Call
        An in-place call.

    Returns
    -------
    bool
        False also if it is not known.
    """
    value = written_operand(call)
    while isinstance(value, fx.Node) and len(value.users) == 1:
        if value.op in ("placeholder", "get_attr"):
            return False
        if not _may_be_view(value):
            return True
        value = value.args[0] if value.args else None
    return False


def size_helpers(matched: Collection[fx.Node], inputs: Collection[fx.Node]) -> set[fx.Node]:
    """Find the nodes that compute sizes for a match and for nothing else.

    Parameters
    ----------
    matched : collection of torch.fx.Node
        The nodes of the match.
    inputs : collection of torch.fx.Node
        Values that stay outside in any case.

    Returns
    -------
    set of torch.fx.Node
        Nodes outside of `matched` all of whose users are matched or helpers themselves.
    """
    helpers: set[fx.Node] = set()
    pending = [value for node in matched for value in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node in helpers or node in matched or node in inputs:
            continue
        used_inside = all(user in matched or user in helpers for user in node.users)
        if used_inside and is_size(node):
            helpers.add(node)
            pending.extend(node.all_input_nodes)
    return helpers


def _may_be_view(node: fx.Node) -> bool:
    """Tell whether the value of a node may share memory with its first argument."""
    if node.op == "call_method":
        return str(node.target) in _VIEW_METHODS
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and (name in _VIEW_METHODS or name in ("getitem", "getattr"))


def is_size(node: fx.Node) -> bool:
    """Tell whether a node gives sizes: ``x.size()``, ``x.shape``, or arithmetic on these.

    Parameters
    ----------
    node : torch.fx.Node
        Any node.

    Returns
    -------
    bool
        True for numbers, and tuples of numbers, that depend on nothing but shapes.
    """
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    if node.op != "call_function" or node.target not in _SIZE_ARITHMETIC:
        return False
    if node.target is getattr:
        return node.args[1:] in (("shape",), ("ndim",))
    values = node.all_input_nodes
    return bool(values) and all(is_size(value) for value in values)


def tells_mode(node: fx.Node) -> bool:
    """Tell whether a node only says whether the module is in training mode, or depends on that.

    Parameters
    ----------
    node : torch.fx.Node
        Any node.

    Returns
    -------
    bool
        True for a look-up of ``training`` and for a constant chosen by it.
    """
    if node.op == "call_function" and node.target is select_by_mode:
        return True
    return node.op == "get_attr" and str(node.target).split(".")[-1] == "training"


def overwrites(node: fx.Node, value: fx.Node) -> bool:
    """Tell whether a node changes a value in place.

    Parameters
    ----------
    node : torch.fx.Node
        A user of `value`.
    value : torch.fx.Node
        The value.

    Returns
    -------
    bool
        True for ``value.add_(...)``, ``value += ...``, ``value[...] = ...`` and ``out=value``.
    """
    if node.kwargs.get("out") is value:
        return True
    if not node.args or node.args[0] is not value:
        return False
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op not in ("call_method", "call_function"):
        return False
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or node.target in _IN_PLACE or node.kwargs.get("inplace") is True
