"""Rewrites of one graph in one line, as tests write them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx, nn

from slapo.graph.fuse.fusion import Fuse
from slapo.graph.rewrite.rules import Replace, carry_out


def replace_vertical(
    gm: fx.GraphModule,
    nodes: Collection[fx.Node],
    new: Any,
    name: str | None = None,
    concrete_args: Mapping[str, Any] | None = None,
    bindings: Mapping[str, Any] | None = None,
) -> fx.Node:
    rule = Replace(gm, [nodes], new, name, concrete_args, bindings=[bindings or {}])
    return carry_out(gm, rule)


def replace_horizontal(
    gm: fx.GraphModule,
    subgraphs: Sequence[Collection[fx.Node]],
    new: Any,
    name: str | None = None,
    concrete_args: Mapping[str, Any] | None = None,
) -> fx.Node:
    return carry_out(gm, Replace(gm, subgraphs, new, name, concrete_args))


def replace_node(
    gm: fx.GraphModule, node: fx.Node, fn: Any, concrete_args: Mapping[str, Any] | None = None
) -> fx.Node:
    return carry_out(gm, Replace(gm, [[node]], fn, None, concrete_args, same_call=True))


def fusion_of(gm: fx.GraphModule, nodes: Any, **how: Any) -> nn.Module:
    """The module that a fusion makes; the graph stays as it is."""
    made = Fuse(gm, nodes, **how).made
    assert made is not None
    return made


def fuse(gm: fx.GraphModule, nodes: Any, **how: Any) -> nn.Module:
    """The module that has taken the place of operations."""
    rule = Fuse(gm, nodes, **how)
    made = rule.made
    carry_out(gm, rule)
    assert made is not None
    return made
