"""Checks that operations may run at another place of the graph, or a second time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.fx as fx

from slapo.graph.match.dataflow import is_size
from slapo.graph.rewrite.effects import Effects, HasGraph, Root
from slapo.graph.trace.nodes import OpenRegions, switches_mode

_GENERATOR = "random numbers"
"""A draw is a write to this."""

_ORDER_OF_DRAWS = (
    "both draw random numbers, and each would get the other's; leave one of them out of the match, "
    "or match both"
)


def check_reorder(gm: HasGraph, chain: Collection[fx.Node], place: fx.Node) -> None:
    """Check that operations may run together right before `place`, or instead of it.

    ``b = f(x); other(y); c = g(b)  -->  other(y); c = new(x)`` moves ``f`` past ``other``.
    It must not enter or leave a region (``no_grad``, autocast). It must not pass a write to its
    inputs, a read of its writes, or, if it draws random values, another draw.
    """
    inside = set(chain)
    ends = sorted((*inside, place))
    # Only the nodes between are looked at, so that N rewrites of a long graph cost N times a
    # constant.
    span = [ends[0]]
    while span[-1] is not ends[-1]:
        span.append(span[-1].next)
    _check_regions(span, inside, place)
    _check_effects(Effects(gm), span, inside, place)


def check_recompute(gm: HasGraph, chain: Collection[fx.Node]) -> None:
    """Check that operations compute the same when the backward pass recomputes them.

    No input may be changed in place by the chain or after it. Module statistics are updated twice,
    as with ``torch.utils.checkpoint``.

    >>> gm = fx.symbolic_trace(lambda x: (x.exp(), x.add_(1))[0])
    >>> _, exp, add_, _ = gm.graph.nodes
    >>> check_recompute(gm, [exp])
    Traceback (most recent call last):
    ValueError: 'add_' changes 'x' in place, but the backward pass recomputes 'exp' from it; ...
    """
    effects = Effects(gm)
    inside, first = set(chain), min(chain)
    inputs = {value: node for node in inside for value in node.all_input_nodes if not is_size(node)}
    for value, reader in inputs.items():
        if value in inside:
            continue
        for writer in _writers(gm, effects, value):
            if writer in inside or writer > first:
                raise ValueError(
                    f"{writer.name!r} changes {value.name!r} in place, but the backward pass "
                    f"recomputes {reader.name!r} from it; use the out-of-place operation, or "
                    "checkpoint other operations"
                )


def outward_effects(gm: HasGraph, chain: Collection[fx.Node]) -> frozenset[str]:
    """Return the effects of one call instead of a chain: ``"draws"``, ``"writes"``."""
    effects = Effects(gm)
    draws = any(map(effects.draws, chain))
    writes = any(root not in chain for node in chain for root in effects.writes(node))
    return frozenset(name for name, has in (("draws", draws), ("writes", writes)) if has)


def _check_effects(
    effects: Effects, span: Sequence[fx.Node], inside: set[fx.Node], place: fx.Node
) -> None:
    """Refuse moves that swap the order of conflicting effects, before and after the place."""
    if inside.issuperset(span):
        return
    # Before the place, nodes of the chain move later, past those that stay; behind it, earlier. Two
    # nodes clash if one writes what the other uses. One walk suffices: collect what the part that
    # stands first uses and writes, and compare each node of the other part when it comes.
    at = span.index(place)
    for part, movers_stand_first in ((span[:at], True), (span[at:], False)):
        used, written = dict[Root, fx.Node](), dict[Root, fx.Node]()
        for node in part:
            reads, writes = effects.reads(node), effects.writes(node)
            if effects.draws(node):
                writes.add(_GENERATOR)
            if (node in inside) is movers_stand_first:
                used.update(dict.fromkeys(reads | writes, node))
                written.update(dict.fromkeys(writes, node))
                continue
            clashes = (writes & used.keys()) | (reads & written.keys())
            if not clashes:
                continue
            root = _GENERATOR if _GENERATOR in clashes else clashes.pop()
            other = used[root] if root in writes else written[root]
            writer, reader = (node, other) if root in writes else (other, node)
            reason = _ORDER_OF_DRAWS if root == _GENERATOR else _write(writer, reader)
            mover, stays = (other, node) if movers_stand_first else (node, other)
            raise ValueError(
                f"{mover.name!r} would move past {stays.name!r} when the subgraph becomes one call "
                f"at {place.name!r}, but {reason}"
            )


def _write(writer: fx.Node, other: fx.Node) -> str:
    return (
        f"{writer.name!r} changes a tensor in place that {other.name!r} uses; use the out-of-place "
        "operation, or match adjacent operations"
    )


def _check_regions(span: Sequence[fx.Node], inside: set[fx.Node], place: fx.Node) -> None:
    """Refuse a change of region, and a chain with only a part of a region."""
    if not any(map(switches_mode, span)):
        return
    before, after = dict[fx.Node, tuple[fx.Node, ...]](), dict[fx.Node, tuple[fx.Node, ...]]()
    regions, now = OpenRegions(), tuple[fx.Node, ...]()
    for node in place.graph.nodes:
        before[node] = now
        now = after[node] = regions.follow(node)
    for node in span:
        if node in inside:  # regions that it ends must have begun in the chain
            parts = set(before[node]) - set(after[node]) - inside
        else:
            parts = set() if _is_passive(node) else inside & set(before[node])
        _refuse_parts(parts, node)
    _refuse_parts(inside & set(after[span[-1]]), place)
    here = [region for region in before[place] if region not in inside]
    for node in sorted(inside):
        if _is_passive(node) or [r for r in before[node] if r not in inside] == here:
            continue
        first, last = sorted((span.index(node), span.index(place)))
        switch = next(n for n in span[first:last] if switches_mode(n) and n not in inside)
        raise ValueError(
            f"{node.name!r} would move to {place.name!r} when the subgraph becomes one call, "
            f"but {switch.name!r} between them begins or ends a no_grad, inference or autocast "
            "region; match operations of one region"
        )


def _refuse_parts(switches: set[fx.Node], seen_at: fx.Node) -> None:
    if switches:
        raise ValueError(
            f"the subgraph has only part of the no_grad, inference or autocast region that "
            f"{min(switches).name!r} begins, as seen at {seen_at.name!r}; match the whole region, "
            "or operations within it"
        )


def _is_passive(node: fx.Node) -> bool:
    """Return whether regions do not affect a node: get_attr and sizes."""
    return node.op == "get_attr" or is_size(node)


def _writers(gm: HasGraph, effects: Effects, value: fx.Node) -> list[fx.Node]:
    """Return the nodes that change a value under any name, found along its views."""
    memory = effects.roots([value])
    pending = [root for root in memory if isinstance(root, fx.Node)]
    if value.op == "get_attr":
        # Each lookup of an attribute is a node of its own, and all of them are the same tensor.
        pending += gm.graph.find_nodes(op="get_attr", target=value.target)
    seen, found = set(pending), []
    while pending:
        shared = pending.pop()
        for user in shared.users.keys() - seen:
            if memory & effects.writes(user):
                found.append(user)
            if shared in effects.viewed(user):
                seen.add(user)
                pending.append(user)
    return found
