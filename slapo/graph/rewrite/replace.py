"""Rewriting of matched subgraphs. Each rewrite costs as much as the subgraph is large.

All functions check everything before they change anything, and leave the graph compiled lazily or
at once, as the graph module's own ``recompile`` sees fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import getitem
from typing import Any

import torch.fx as fx
from torch import nn

from slapo.graph.fuse.extract import extract
from slapo.graph.match.dataflow import overwrites
from slapo.graph.rewrite.arguments import is_optional, plan_call
from slapo.graph.rewrite.bookkeeping import drop_unused, first_free_name, watch

__all__ = [
    "check_closed",
    "extract",
    "first_free_name",
    "replace_horizontal",
    "replace_node_by_function",
    "replace_vertical",
    "subgraph_inputs",
]


def subgraph_inputs(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """List the values that a subgraph takes from outside.

    Parameters
    ----------
    nodes : collection of torch.fx.Node
        The subgraph.

    Returns
    -------
    list of torch.fx.Node
        The inputs in order of first use.

    Examples
    --------
    >>> gm = fx.symbolic_trace(lambda x, y: (y * x).relu() + y)
    >>> subgraph_inputs([n for n in gm.graph.nodes if n.op.startswith("call")])
    [y, x]
    """
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in sorted(inside):
        for value in node.all_input_nodes:
            if value not in inside:
                inputs[value] = None
    return list(inputs)


def check_closed(nodes: Collection[fx.Node]) -> None:
    """Check that only the last value of a subgraph is used outside of it.

    Parameters
    ----------
    nodes : collection of torch.fx.Node
        The subgraph.

    Raises
    ------
    ValueError
        If another value is used outside; the message names both nodes.

    Examples
    --------
    >>> gm = fx.symbolic_trace(lambda x: x.exp().relu())
    >>> check_closed([n for n in gm.graph.nodes if n.op.startswith("call")])
    """
    inside = set(nodes)
    for node in sorted(inside)[:-1]:
        for user in node.users:
            if user not in inside:
                raise ValueError(
                    f"inner value {node.name!r} of the subgraph is also used outside, by "
                    f"{user.name!r}; include that use in the pattern, or leave {node.name!r} out"
                )


def replace_vertical(
    gm: fx.GraphModule,
    nodes: Collection[fx.Node],
    new: Callable[..., Any],
    name: str | None = None,
    concrete_args: Mapping[str, Any] | None = None,
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
    keep_modules : bool
        Keep submodules that are called no more.

    Returns
    -------
    torch.fx.Node
        The new call.

    Raises
    ------
    ValueError
        If the subgraph is not closed, or its inputs do not fit the parameters of `new`.

    Examples
    --------
    >>> import torch
    >>> gm = fx.symbolic_trace(lambda x, y: (x * y).sum())
    >>> calls = [n for n in gm.graph.nodes if n.op.startswith("call")]
    >>> replace_vertical(gm, calls, lambda a, b: torch.dot(a, b)).args
    (x, y)
    >>> gm(torch.ones(3), torch.ones(3))
    tensor(3.)
    """
    chain = _checked(gm, nodes)
    check_closed(chain)
    inputs = subgraph_inputs(chain)
    args, kwargs = plan_call(new, inputs, concrete_args or {})
    _check_not_overwritten(inputs, chain, chain[0], chain[-1])
    stem = _stem(gm, new, name)
    call = _insert_call(gm, chain[-1], new, stem, args, kwargs)
    _take_over(chain[-1], call)
    _erase(gm, chain, inputs, keep_modules)
    return call


def replace_horizontal(
    gm: fx.GraphModule,
    subgraphs: Sequence[Collection[fx.Node]],
    new: Callable[..., Any],
    name: str | None = None,
    concrete_args: Mapping[str, Any] | None = None,
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

    Returns
    -------
    torch.fx.Node
        The new call.

    Raises
    ------
    ValueError
        If a subgraph is not closed, subgraphs overlap, depend on one another or have different
        inputs, or the inputs do not fit the parameters of `new`.

    Examples
    --------
    >>> import torch
    >>> gm = fx.symbolic_trace(lambda x: torch.sin(x) + torch.cos(x))
    >>> sin, cos = [n for n in gm.graph.nodes if n.op == "call_function"][:2]
    >>> replace_horizontal(gm, [[sin], [cos]], lambda x: (x.sin(), x.cos())).args
    (x,)
    >>> gm(torch.zeros(()))
    tensor(1.)
    """
    chains = [_checked(gm, nodes) for nodes in subgraphs]
    for chain in chains:
        check_closed(chain)
    inputs = _common_inputs(chains)
    args, kwargs = plan_call(new, inputs, concrete_args or {})
    everything = sorted(node for chain in chains for node in chain)
    place = _place_before_uses(everything[0], inputs, [chain[-1] for chain in chains])
    _check_not_overwritten(inputs, everything, place, everything[-1])
    stem = _stem(gm, new, name)
    call = _insert_call(gm, place, new, stem, args, kwargs)
    with gm.graph.inserting_before(place):
        for index, chain in enumerate(chains):
            _take_over(chain[-1], gm.graph.call_function(getitem, (call, index)))
    _erase(gm, everything, inputs)
    return call


def replace_node_by_function(
    gm: fx.GraphModule,
    node: fx.Node,
    fn: Callable[..., Any],
    concrete_args: Mapping[str, Any] | None = None,
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
        What to call instead. A module becomes a submodule of `gm`.
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
    >>> import torch
    >>> gm = fx.symbolic_trace(lambda x, y: x.mul(y))
    >>> node = next(n for n in gm.graph.nodes if n.op == "call_method")
    >>> replace_node_by_function(gm, node, torch.add).args
    (x, y)
    """
    (old,) = _checked(gm, [node])
    kwargs = {**old.kwargs, **(concrete_args or {})}
    plan_call(fn, list(old.args), kwargs, exact=False)
    call = _insert_call(gm, old, fn, _stem(gm, fn, None), old.args, kwargs)
    _take_over(old, call)
    _erase(gm, [old], [])
    return call


def _checked(gm: fx.GraphModule, nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes in graph order after a check that they are operations of this graph."""
    unique = set(nodes)
    for node in unique:
        if not isinstance(node, fx.Node):
            raise TypeError(f"a subgraph is a list of graph nodes, got {node!r} in it")
        if node._erased or node.graph is not gm.graph:
            raise ValueError(
                f"node {node.name!r} is not (or no longer) part of this graph; "
                "call find() again after a rewrite"
            )
        if node.op in ("placeholder", "output"):
            raise ValueError(
                f"node {node.name!r} is the graph's {node.op}; only operations can be replaced"
            )
    if not unique:
        raise ValueError("the subgraph is empty; hand over what find() returned")
    return sorted(unique)


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


def _place_before_uses(
    start: fx.Node, inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.Node:
    """Find the node before which a call can stand: after its inputs, before all uses."""
    last_input = max(inputs, default=None)
    if last_input is None or last_input < start:
        return start
    for result in results:
        for user in result.users:
            if user <= last_input:
                raise ValueError(
                    f"result {result.name!r} is used by {user.name!r} before the input "
                    f"{last_input.name!r} is known; replace the subgraphs one by one"
                )
    return last_input.next


def _check_not_overwritten(
    inputs: Sequence[fx.Node], nodes: Collection[fx.Node], first: fx.Node, last: fx.Node
) -> None:
    """Refuse to move the reading of a value across an in-place change of it."""
    inside = set(nodes)
    for value in inputs:
        for user in value.users:
            if first < user < last and user not in inside and overwrites(user, value):
                raise ValueError(
                    f"{user.name!r} changes the input {value.name!r} in place in the midst of the "
                    "subgraph, so the subgraph cannot become one call; use the operation that "
                    "is not in place"
                )


def _stem(gm: fx.GraphModule, new: Callable[..., Any], name: str | None) -> str:
    """Choose and check the first part of a new submodule's name."""
    if not callable(new):
        raise TypeError(f"the replacement must be a module or a function, got {new!r}")
    if not isinstance(new, nn.Module):
        return ""
    stem = name or getattr(new, "original_name", None) or type(new).__name__
    first_free_name(gm, stem)
    return stem


def _insert_call(
    gm: fx.GraphModule,
    before: fx.Node,
    new: Callable[..., Any],
    stem: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> fx.Node:
    """Put the call of `new` into the graph, and `new` into `gm` if it is a module."""
    watch(gm)
    with gm.graph.inserting_before(before):
        if not isinstance(new, nn.Module):
            return gm.graph.call_function(new, args, kwargs)
        target = first_free_name(gm, stem)
        gm.add_module(target, new)
        return gm.graph.create_node("call_module", target, args, kwargs)


def _take_over(old: fx.Node, new: fx.Node) -> None:
    """Give the users of a node, and what is known of its value, to another."""
    old.replace_all_uses_with(new)
    new.meta = dict(old.meta)
    new.type = old.type


def _erase(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    keep_modules: bool = False,
) -> None:
    """Erase nodes that nothing uses any more, and the submodules that only they called."""
    targets = [str(node.target) for node in nodes if node.op == "call_module"]
    for node in reversed(nodes):
        gm.graph.erase_node(node)
    idle = [value for value in inputs if is_optional(value)]
    while idle:
        value = idle.pop()
        if not value.users and not value._erased and is_optional(value):
            idle.extend(value.all_input_nodes)
            gm.graph.erase_node(value)
    if not keep_modules:
        drop_unused(gm, targets)
    gm.recompile()


def _names(nodes: Sequence[fx.Node]) -> str:
    """Name nodes in a message."""
    return "[" + ", ".join(node.name for node in nodes) + "]"
