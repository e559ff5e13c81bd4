"""Rewriting of matched subgraphs. Each rewrite costs as much as the subgraph is large.

A rewrite is planned first, with all checks, for all graphs of the module that have the operations,
and then applied. The functions called ``replace_...`` do both; what their arguments mean stands
there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from slapo.graph.rewrite.arguments import (
    common_bindings,
    is_optional,
    plan_call,
    plan_same_call,
)
from slapo.graph.rewrite.plan import NewCall, Plan, apply, lay_out
from slapo.graph.rewrite.subgraph import in_order, subgraph_inputs
from slapo.graph.rewrite.twins import with_twins

Constants = Mapping[str, Any] | None


def plan_vertical(
    gm: fx.GraphModule,
    nodes: Collection[fx.Node],
    new: Callable[..., Any],
    name: str | None = None,
    concrete_args: Constants = None,
    bindings: Constants = None,
    keep_modules: bool = False,
) -> tuple[Plan, ...]:
    """Plan what :func:`replace_vertical` does.

    Returns
    -------
    tuple of Plan
        For `gm`, and for the further graphs that have the chain.
    """
    stem = _stem(new, name)
    inputs = subgraph_inputs(in_order(gm, nodes))
    args, kwargs = plan_call(new, inputs, concrete_args or {}, bindings)
    call = NewCall(new, stem, args, kwargs, keep_modules=keep_modules)
    return with_twins(lay_out(gm, [nodes], call))


def replace_vertical(
    gm: fx.GraphModule,
    nodes: Collection[fx.Node],
    new: Callable[..., Any],
    name: str | None = None,
    concrete_args: Constants = None,
    bindings: Constants = None,
    keep_modules: bool = False,
) -> fx.Node:
    """Replace a chain of operations by one call.

    ``b = f(x, w); c = g(b)  -->  c = new(x, w)``

    Submodules that were called by the chain and are needed no more are removed from `gm`, as
    :func:`.bookkeeping.drop_unused` describes; parameters and buffers that the chain read
    directly stay.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of the graph.
    nodes : collection of torch.fx.Node
        The chain. Only its last value may be used outside.
    new : torch.nn.Module or callable
        What to call instead. A module becomes a submodule of `gm`. It is given the inputs of the
        chain in order of first use. Sizes of tensors and training flags among them are left out
        if it has no parameters for them.
    name : str, optional
        The new submodule is called ``<name>_<k>``. Default: the name of its class.
    concrete_args : mapping, optional
        Arguments of `new` that are given as constants, by parameter name.
    bindings : mapping, optional
        What the parameters of the pattern stand for; where `new` has parameters of the same names,
        it is given the values by name, constants included.
    keep_modules : bool
        Keep submodules that are called no more.

    Returns
    -------
    torch.fx.Node
        The new call.

    Raises
    ------
    ValueError
        If the subgraph is not closed, its inputs do not fit the parameters of `new`, or an
        operation may not move to the place of the last one (see :func:`.may_move.may_move`).

    Examples
    --------
    >>> gm = fx.symbolic_trace(lambda x, y: (x * y).sum())
    >>> calls = [n for n in gm.graph.nodes if n.op.startswith("call")]
    >>> replace_vertical(gm, calls, lambda a, b: torch.dot(a, b)).args
    (x, y)
    >>> gm(torch.ones(3), torch.ones(3))
    tensor(3.)
    """
    return apply(plan_vertical(gm, nodes, new, name, concrete_args, bindings, keep_modules))


def plan_horizontal(
    gm: fx.GraphModule,
    subgraphs: Sequence[Collection[fx.Node]],
    new: Callable[..., Any],
    name: str | None = None,
    concrete_args: Constants = None,
    bindings: Sequence[Mapping[str, Any]] = (),
) -> tuple[Plan, ...]:
    """Plan what :func:`replace_horizontal` does.

    Returns
    -------
    tuple of Plan
        For `gm`, and for the further graphs that have the subgraphs.
    """
    stem = _stem(new, name)
    inputs = _common_inputs([in_order(gm, nodes) for nodes in subgraphs])
    constants = concrete_args or {}
    args, kwargs = plan_call(new, inputs, constants, common_bindings(new, bindings, constants))
    call = NewCall(new, stem, args, kwargs, side_by_side=True)
    return with_twins(lay_out(gm, subgraphs, call))


def replace_horizontal(
    gm: fx.GraphModule,
    subgraphs: Sequence[Collection[fx.Node]],
    new: Callable[..., Any],
    name: str | None = None,
    concrete_args: Constants = None,
    bindings: Sequence[Mapping[str, Any]] = (),
) -> fx.Node:
    """Replace subgraphs that work side by side on the same inputs by one call.

    ``a = f(x); b = g(x)  -->  t = new(x); a = t[0]; b = t[1]``

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of the graph.
    subgraphs : sequence of collections of torch.fx.Node
        The subgraphs, in the order of the results of `new`.
    new : torch.nn.Module or callable
        What to call instead; it returns one value for each subgraph, in a tuple or a tensor.
    name : str, optional
        The new submodule is called ``<name>_<k>``. Default: the name of its class.
    concrete_args : mapping, optional
        Arguments of `new` that are given as constants, by parameter name.
    bindings : sequence of mappings
        What the parameters of the pattern stand for in each subgraph.

    Returns
    -------
    torch.fx.Node
        The new call.

    Raises
    ------
    ValueError
        If a subgraph is not closed, subgraphs overlap, depend on one another or have different
        inputs, the inputs do not fit the parameters of `new`, or an operation may not move to the
        place of the call (see :func:`.may_move.may_move`).

    Examples
    --------
    >>> gm = fx.symbolic_trace(lambda x: torch.sin(x) + torch.cos(x))
    >>> sin, cos = [n for n in gm.graph.nodes if n.op == "call_function"][:2]
    >>> replace_horizontal(gm, [[sin], [cos]], lambda x: (x.sin(), x.cos())).args
    (x,)
    >>> gm(torch.zeros(()))
    tensor(1.)
    """
    return apply(plan_horizontal(gm, subgraphs, new, name, concrete_args, bindings))


def plan_node_by_function(
    gm: fx.GraphModule, node: fx.Node, fn: Callable[..., Any], concrete_args: Constants = None
) -> tuple[Plan, ...]:
    """Plan what :func:`replace_node_by_function` does.

    Returns
    -------
    tuple of Plan
        For `gm`, and for the further graphs that have the operation.
    """
    stem = _stem(fn, None)
    (old,) = in_order(gm, [node])
    args, kwargs = plan_same_call(old, _called(gm, old), fn, concrete_args or {})
    return with_twins(lay_out(gm, [[old]], NewCall(fn, stem, args, kwargs)))


def replace_node_by_function(
    gm: fx.GraphModule, node: fx.Node, fn: Callable[..., Any], concrete_args: Constants = None
) -> fx.Node:
    """Replace one node by the call of a function with the same arguments.

    ``b = f(x, 2, k=3)  -->  b = fn(x, 2, k=3)``

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of the graph.
    node : torch.fx.Node
        The node. The arguments of a method begin with the object.
    fn : callable
        What to call instead. A module becomes a submodule of `gm`. A keyword argument that it
        lacks is left out if it is the default of what the node has called.
    concrete_args : mapping, optional
        Constants to pass in addition, or in place of the node's keyword arguments.

    Returns
    -------
    torch.fx.Node
        The new call.

    Raises
    ------
    ValueError
        If the node is no operation, or `fn` does not take its arguments.

    Examples
    --------
    >>> gm = fx.symbolic_trace(lambda x, y: x.mul(y))
    >>> node = next(n for n in gm.graph.nodes if n.op == "call_method")
    >>> replace_node_by_function(gm, node, torch.add).args
    (x, y)
    """
    return apply(plan_node_by_function(gm, node, fn, concrete_args))


def _stem(new: Callable[..., Any], name: str | None) -> str:
    """Choose the first part of a new submodule's name."""
    return name or getattr(new, "original_name", None) or type(new).__name__


def _called(gm: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
    """Look up what a node calls."""
    target: Any = node.target
    if node.op == "call_module":
        return gm.get_submodule(target)
    return getattr(torch.Tensor, target, getattr) if node.op == "call_method" else target


def _common_inputs(chains: Sequence[list[fx.Node]]) -> list[fx.Node]:
    """Return the inputs of side-by-side subgraphs; refuse those that are not independent."""
    if not chains:
        raise ValueError("there is no subgraph to replace; hand over what find() returned")
    owner: dict[fx.Node, int] = {}
    for index, chain in enumerate(chains):
        for node in chain:
            if owner.setdefault(node, index) != index:
                raise ValueError(f"node {node.name!r} is part of several of the subgraphs")
    inputs = [subgraph_inputs(chain) for chain in chains]
    for index, values in enumerate(inputs):
        for value in values:
            if value in owner:
                raise ValueError(
                    f"subgraph {owner[value]} feeds subgraph {index} (by {value.name!r}), so they "
                    "cannot become one call; replace them one by one, or as one chain"
                )
        # The sizes and flags that a subgraph uses may differ: a call can do without them.
        differing = set(values) ^ set(inputs[0])
        if not all(map(is_optional, differing)):
            raise ValueError(
                f"the subgraphs have different inputs: {_names(inputs[0])} and {_names(values)}; "
                "one call can only replace subgraphs with the same inputs"
            )
    return list(dict.fromkeys(value for values in inputs for value in values))


def _names(nodes: Sequence[fx.Node]) -> str:
    """Name nodes in a message."""
    return "[" + ", ".join(node.name for node in nodes) + "]"
