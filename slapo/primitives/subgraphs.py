"""Subgraphs as users hand them over: what ``find`` returned, checked and sorted out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from slapo.hooks import (
    get_hooks,
    has_backward_hooks,
    move_hooks,
    move_post_hooks,
    move_pre_hooks,
    move_reducers,
)
from slapo.node import Node
from slapo.wrapper import innermost


@dataclass(frozen=True)
class Subgraphs:
    """Matches within one traced module.

    Parameters
    ----------
    owner
        The schedule node of the traced module.
    gm
        Its graph module.
    chains
        Nodes of each match, in graph order.
    single_node
        True when the user gave one ``(parent, node)`` pair.
    """

    owner: Node
    gm: fx.GraphModule
    chains: list[list[fx.Node]]
    single_node: bool = False

    def modules(self, chain: Sequence[fx.Node]) -> list[nn.Module]:
        """The modules that a chain calls, in order."""
        return [self.gm.get_submodule(str(n.target)) for n in chain if n.op == "call_module"]


def parse(sch: Node, target_ops: Any) -> Subgraphs:
    """Sort out one pair, one subgraph, or a list of subgraphs.

    Raises
    ------
    TypeError
        If it is nothing that ``find`` or ``find_node`` returns.
    ValueError
        If it is empty, or reaches over several traced modules.
    """
    single = _is_pair(target_ops)
    groups = _groups(target_ops)
    parents = {parent for group in groups for parent, _ in group}
    if len(parents) > 1:
        raise ValueError(
            f"the subgraph lies in several traced modules, {sorted(parents)}; trace their common "
            "parent with flatten=True to rewrite across them"
        )
    (parent,) = parents
    owner = sch[parent] if parent else sch
    gm = innermost(owner.mod)
    if not isinstance(gm, fx.GraphModule):
        raise ValueError(f"{owner.path or 'the root'} is not traced any more; call find() again")
    chains = [sorted(dict.fromkeys(node for _, node in group)) for group in groups]
    for node in (node for chain in chains for node in chain):
        if node.graph is not gm.graph or node._erased:
            raise ValueError(
                f"node {node.name!r} is not in the graph (any more); call find() again after a "
                "rewrite or trace"
            )
    return Subgraphs(owner, gm, chains, single)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], fx.Node)


def _groups(target_ops: Any) -> list[list[tuple[str, fx.Node]]]:
    if _is_pair(target_ops):
        return [[target_ops]]
    if not isinstance(target_ops, (list, tuple)):
        raise TypeError(
            "target_ops must be what find() or find_node() returned, got "
            f"{type(target_ops).__name__}"
        )
    if not target_ops:
        raise ValueError("target_ops is empty: the pattern matched nothing")
    groups = [target_ops] if all(map(_is_pair, target_ops)) else list(target_ops)
    for group in groups:
        if not isinstance(group, (list, tuple)) or not group or not all(map(_is_pair, group)):
            raise TypeError(
                "target_ops must be a (parent_path, node) pair, a list of those, or a list of "
                f"such lists, got {target_ops!r}"
            )
    return [list(group) for group in groups]


def check_hooks(subgraphs: Subgraphs, keeps_hooks: bool) -> None:
    """Refuse a rewrite that would lose a hook.

    Raises
    ------
    RuntimeError
        Naming the hooks and the module that carries them.
    """
    for chain in subgraphs.chains:
        calls = [n for n in chain if n.op == "call_module"]
        for node in calls:
            module = subgraphs.gm.get_submodule(str(node.target))
            lost = _lost(module, node is chain[0], node is chain[-1], keeps_hooks)
            if len(subgraphs.chains) > 1:
                lost = _lost(module, False, False, True)
            if lost:
                raise RuntimeError(
                    f"hooks {lost} of {node.target!r} would be lost: only pre-forward hooks of "
                    "the first module of a chain and post-forward hooks of the last can move to a "
                    "module that takes its place; add hooks after the rewrite"
                )


def _lost(module: nn.Module, first: bool, last: bool, keeps_hooks: bool) -> list[str]:
    hooks = get_hooks(module)
    lost = []
    if module._forward_pre_hooks and not (first and keeps_hooks):
        lost += ["fwd_pre"] if hooks["fwd_pre"] else ["bwd_post"]
    if hooks["fwd_post"] and not (last and keeps_hooks):
        lost.append("fwd_post")
    if has_backward_hooks(module) and not (first and last and keeps_hooks):
        lost.append("bwd_post")
    return lost


def end_modules(subgraphs: Subgraphs) -> tuple[nn.Module | None, nn.Module | None]:
    """The modules at the first chain's ends, None where it begins or ends otherwise."""
    chain = subgraphs.chains[0]
    first, last = (
        subgraphs.gm.get_submodule(str(n.target)) if n.op == "call_module" else None
        for n in (chain[0], chain[-1])
    )
    return first, last


def move_end_hooks(ends: tuple[nn.Module | None, nn.Module | None], new: nn.Module) -> None:
    """Move the hooks that :func:`check_hooks` allowed."""
    first, last = ends
    if first is not None and first is last:
        move_hooks(first, new)
        move_reducers(first, new)
        return
    if first is not None:
        move_pre_hooks(first, new)
    if last is not None:
        move_post_hooks(last, new)
        move_reducers(last, new)
