"""Subgraphs passed by users: results of ``find``, validated and sorted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from slapo.graph.match.find import Subgraph
from slapo.graph.match.subgraph_view import views_of
from slapo.graph.rewrite.plan import Plan
from slapo.graph.rewrite.rules import Pick, home_of
from slapo.history import describe, spelled
from slapo.hooks import (
    get_hooks,
    has_backward_hooks,
    has_forward_hooks,
    move_hooks,
    move_input_hooks,
    move_output_hooks,
    move_reducers,
)
from slapo.node import Node
from slapo.record.subgraphs import is_pair
from slapo.wrapper import innermost


@dataclass(frozen=True)
class Subgraphs:
    """Matches within one traced module."""

    #: the schedule node of the traced module
    owner: Node
    #: its graph module
    gm: fx.GraphModule
    #: nodes of each match, in graph order
    chains: list[list[fx.Node]]
    #: true when the user gave one ``(parent, node)`` pair
    single_node: bool = False
    #: for each match, the values of the pattern's arguments
    bindings: list[Mapping[str, Any]] = field(default_factory=list)
    #: for each match, the search and its index in the results; None for nodes picked by hand
    picks: list[Pick | None] = field(default_factory=list)

    def modules(self, chain: Sequence[fx.Node]) -> list[nn.Module]:
        """Modules that a chain calls, in order."""
        return [self.gm.get_submodule(str(n.target)) for n in chain if n.op == "call_module"]


def parse(sch: Node, target_ops: Any, argument: str = "target_ops") -> Subgraphs:
    """Parse a pair, a subgraph, or a list of subgraphs; `argument` is the name in messages."""
    single = is_pair(target_ops)
    groups = _groups(sch, target_ops, argument)
    parents = {parent for group in groups for parent, _ in group}
    if len(parents) > 1:
        raise ValueError(
            f"{argument} is in several traced modules, {sorted(parents)}; trace their common "
            "parent with flatten=True to rewrite across them"
        )
    (parent,) = parents
    owner = sch[parent] if parent else sch
    gm = innermost(owner.mod)
    # fx nodes are ordered by their place in the graph, whatever the order of the match.
    chains = [sorted(dict.fromkeys(node for _, node in group)) for group in groups]
    if not isinstance(gm, fx.GraphModule) or any(
        node.graph is not gm.graph or node._erased for chain in chains for node in chain
    ):
        raise ValueError(
            f"{argument} is not in the graph of {owner.where} (anymore); call find() again on "
            f"{spelled(sch.path)}, after each rewrite or trace"
        )
    picks = [_pick(group) for group in groups]
    bindings = [group.bindings if pick else {} for group, pick in zip(groups, picks, strict=True)]
    return Subgraphs(owner, gm, chains, single, bindings, picks)


def _pick(group: Any) -> Pick | None:
    """Return the search that found a match; None if the user assembled the nodes."""
    if isinstance(group, Subgraph) and group.search is not None and group.is_whole():
        return group.search, group.position
    return None


def parse_one(sch: Node, subgraph: Any) -> Subgraphs:
    """Parse the argument of a primitive that rewrites one subgraph at a time."""
    subgraphs = parse(sch, subgraph, "subgraph")
    if len(subgraphs.chains) != 1:
        raise ValueError(f"pass one subgraph at a time, got {len(subgraphs.chains)}")
    return subgraphs


def _groups(sch: Node, target_ops: Any, argument: str) -> list[Any]:
    if is_pair(target_ops):
        return [[target_ops]]
    if isinstance(target_ops, (list, tuple)):
        if not target_ops:
            why = getattr(target_ops, "why", "")  # reason reported by find(), if any
            raise ValueError(
                f"{argument} is empty: the pattern matched nothing{why and f'; {why}'}"
            )
        groups = [target_ops] if all(map(is_pair, target_ops)) else list(target_ops)
        if all(isinstance(group, (list, tuple)) and all(map(is_pair, group)) for group in groups):
            return groups
    raise TypeError(
        f"{argument} must be a result of find() or find_node(), got "
        f"{type(target_ops).__name__}; pass {_as_search(sch, target_ops)}"
    )


def _as_search(sch: Node, given: Any) -> str:
    """Suggest a search for an argument that is not a match."""
    if isinstance(given, str) and given in sch:
        return f"sch.find({given!r}), or call the primitive on {spelled(sch[given].path)}"
    is_pattern = isinstance(given, str) or callable(given)
    return f"sch.find({describe(given) if is_pattern else '...'})"


def check_hooks(subgraphs: Subgraphs, keeps_hooks: bool, scripted: bool = False) -> None:
    """Raise if the rewrite would lose a hook, or move one to a script that cannot hold it."""
    side_by_side = len(subgraphs.chains) > 1
    for chain in subgraphs.chains:
        for node in (n for n in chain if n.op == "call_module"):
            module = subgraphs.gm.get_submodule(str(node.target))
            keeps = keeps_hooks and not side_by_side
            lost = _lost(module, keeps and node is chain[0], keeps and node is chain[-1])
            if scripted and has_backward_hooks(module):
                lost = ["bwd_post"]
            if lost:
                raise RuntimeError(
                    f"hooks {lost} of {node.target!r} would be lost: only pre-forward and backward "
                    "hooks of the first module of a chain and post-forward hooks of the last can "
                    "move to the module that replaces it, and no backward hooks to a ScriptModule; "
                    "add hooks after the rewrite"
                )


def _lost(module: nn.Module, is_first: bool, is_last: bool) -> list[str]:
    hooks = get_hooks(module)
    lost = []
    # A bwd_post sync is a pre-forward hook too; hooks["fwd_pre"] lists only the others.
    if module._forward_pre_hooks and not is_first:
        lost += ["fwd_pre"] if hooks["fwd_pre"] else ["bwd_post"]
    if hooks["fwd_post"] and not is_last:
        lost.append("fwd_post")
    if module._backward_hooks and not is_first:
        lost.append("bwd_post")
    if module._backward_pre_hooks and not is_last:
        lost.append("bwd_pre")
    return lost


def check_hooks_of_other_calls(subgraphs: Subgraphs, plan: Plan) -> None:
    """Raise if a module with hooks is also called outside the replaced operations."""
    going = set(plan.nodes)
    for target in {str(node.target) for node in going if node.op == "call_module"}:
        if not has_forward_hooks(subgraphs.gm.get_submodule(target)):
            continue
        home = home_of(subgraphs.gm)
        # Checkpointed operations have a graph of their own, which may call the module too.
        graphs = [home.graph, *(view.graph for view in views_of(home))]
        for call in (n for g in graphs for n in g.find_nodes(op="call_module", target=target)):
            if call not in going:
                raise RuntimeError(
                    f"hooks of {target!r} would be lost for its other call {call.name!r}, which "
                    "is not replaced; match that call too, or add hooks after the rewrite"
                )


def end_modules(subgraphs: Subgraphs) -> tuple[nn.Module | None, nn.Module | None]:
    """Modules at both ends of the first chain; None where an end is not a module call."""
    chain = subgraphs.chains[0]
    first, last = (
        subgraphs.gm.get_submodule(str(n.target)) if n.op == "call_module" else None
        for n in (chain[0], chain[-1])
    )
    return first, last


def move_end_hooks(ends: tuple[nn.Module | None, nn.Module | None], new: nn.Module) -> None:
    """Move the hooks that :func:`check_hooks` accepted.

    The first module's backward hooks act on the gradient of its input, now the new module's input.
    Hooks before the backward pass act on the gradient of the output.
    """
    first, last = ends
    if first is not None and first is last:
        move_hooks(first, new)
        move_reducers(first, new)
        return
    if first is not None:
        move_input_hooks(first, new)
    if last is not None:
        move_output_hooks(last, new)
        move_reducers(last, new)
