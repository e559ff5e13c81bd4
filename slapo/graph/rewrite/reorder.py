"""Checks that operations may run at another place of the graph, or a second time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.fx as fx

from slapo.graph.match.dataflow import is_size
from slapo.graph.rewrite.effects import Effects, Root
from slapo.graph.rewrite.subgraph import HasGraph
from slapo.graph.trace.nodes import called_name

# By name, as graphs loaded from a file have them.
_GRAD_MODE = frozenset({"_set_grad_enabled", "set_grad_enabled"})

_ORDER_OF_DRAWS = (
    "both draw random numbers, and each would get those of the other; leave one of them out of the "
    "match, or match both"
)

Region = tuple[fx.Node, ...]


def check_reorder(gm: HasGraph, chain: Collection[fx.Node], place: fx.Node) -> None:
    """Check that operations may run together right before `place`, or instead of it.

    ``b = f(x); other(y); c = g(b)  -->  other(y); c = new(x)`` moves ``f`` past ``other``. It must
    not get into or out of a region (``no_grad``, autocast), past a write to what it reads or a
    look at what it writes, or, if it draws random numbers, past another draw. The ``ValueError``
    names both nodes, the reason and the remedy.

    >>> gm = fx.symbolic_trace(lambda x: (x.exp(), x.add_(1))[0].relu())
    >>> _, exp, add_, relu, _ = gm.graph.nodes
    >>> check_reorder(gm, [exp, relu], relu)
    Traceback (most recent call last):
    ValueError: 'exp' would move past 'add_' when the subgraph becomes one call at 'relu', but ...
    """
    inside = set(chain)
    ends = sorted((*inside, place))
    span = [ends[0]]
    while span[-1] is not ends[-1]:
        span.append(span[-1].next)
    _check_regions(span, inside, place)
    _check_effects(Effects(gm), span, inside, place)


def check_recompute(gm: HasGraph, chain: Collection[fx.Node]) -> None:
    """Check that operations compute the same when the backward pass runs them a second time.

    Random numbers are drawn again as before. Statistics that a module updates are updated twice,
    as under ``torch.utils.checkpoint``. A chain of which an input is changed in place, by the chain
    or after it, is a ``ValueError``.

    >>> gm = fx.symbolic_trace(lambda x: (x.exp(), x.add_(1))[0])
    >>> _, exp, add_, _ = gm.graph.nodes
    >>> check_recompute(gm, [exp])
    Traceback (most recent call last):
    ValueError: 'add_' changes 'x' in place, which the backward pass would compute 'exp' from ...
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
                    f"{writer.name!r} changes {value.name!r} in place, which the backward pass "
                    f"would compute {reader.name!r} from once more; use the operation that is not "
                    "in place, or checkpoint other operations"
                )


def outward_effects(gm: HasGraph, chain: Collection[fx.Node]) -> frozenset[str]:
    """Effects of one call instead of a chain, for rewrites to come: ``"draws"``, ``"writes"``."""
    effects = Effects(gm)
    found = set()
    if any(effects.draws(node) for node in chain):
        found.add("draws")
    if any(root not in chain for node in chain for root in effects.writes(node)):
        found.add("writes")
    return frozenset(found)


class _Passed:
    """Operations on one side of those that move, by what they touch."""

    def __init__(self, effects: Effects, with_memory: bool) -> None:
        self._effects = effects
        self._with_memory = with_memory
        self._uses: dict[Root, fx.Node] = {}
        self._writes: dict[Root, fx.Node] = {}
        self._draws: fx.Node | None = None

    def add(self, node: fx.Node) -> None:
        """Take a node in."""
        if self._with_memory:
            written = self._effects.writes(node)
            self._uses.update(dict.fromkeys(self._effects.reads(node) | written, node))
            self._writes.update(dict.fromkeys(written, node))
        if self._effects.draws(node):
            self._draws = node

    def conflict(self, node: fx.Node) -> tuple[fx.Node, str] | None:
        """Find an operation that must keep its place before or after `node`, and the reason."""
        if self._draws is not None and self._effects.draws(node):
            return self._draws, _ORDER_OF_DRAWS
        if not self._with_memory:
            return None
        for root in self._effects.writes(node):
            if root in self._uses:
                other = self._uses[root]
                return other, _write(node, other)
        for root in self._effects.reads(node):
            if root in self._writes:
                other = self._writes[root]
                return other, _write(other, node)
        return None


def _check_effects(
    effects: Effects, span: Sequence[fx.Node], inside: set[fx.Node], place: fx.Node
) -> None:
    """Walk to the place and from it on; in between, movers and others exchange their order."""
    if all(node in inside for node in span):
        return
    at = span.index(place)
    with_memory = any(effects.writes(node) for node in span)
    movers = _Passed(effects, with_memory)
    for node in span[:at]:
        if node in inside:
            movers.add(node)
        elif found := movers.conflict(node):
            raise ValueError(_refusal(found[0], node, place, found[1]))
    others = _Passed(effects, with_memory)
    for node in span[at:]:
        if node not in inside:
            others.add(node)
        elif found := others.conflict(node):
            raise ValueError(_refusal(node, found[0], place, found[1]))


def _refusal(mover: fx.Node, passed: fx.Node, place: fx.Node, reason: str) -> str:
    return (
        f"{mover.name!r} would move past {passed.name!r} when the subgraph becomes one call at "
        f"{place.name!r}, but {reason}"
    )


def _write(writer: fx.Node, other: fx.Node) -> str:
    return (
        f"{writer.name!r} changes in place what {other.name!r} uses; use the operation that is not "
        "in place, or match operations that stand side by side"
    )


def _check_regions(span: Sequence[fx.Node], inside: set[fx.Node], place: fx.Node) -> None:
    """Refuse a change of region, and regions that lie in the chain in part."""
    own = [node for node in span if node in inside and _is_switch(node)]
    opened: set[fx.Node] = set()
    for node in span:
        if node in own:
            _follow_own(node, opened)
        elif opened and node not in inside and not _is_passive(node):
            _refuse_part(min(opened), node)
    if opened:
        _refuse_part(min(opened), place)
    regions = _regions(span, inside)
    for node in sorted(inside):
        if regions[node] != regions[place] and not _is_passive(node):
            between = _between(span, node, place)
            switch = next(n for n in between if _is_switch(n) and n not in inside)
            raise ValueError(
                f"{node.name!r} would move to {place.name!r} when the subgraph becomes one call, "
                f"but {switch.name!r} between them begins or ends a no_grad, inference or autocast "
                "region; match operations of one region"
            )


def _follow_own(node: fx.Node, opened: set[fx.Node]) -> None:
    """Follow the regions that the chain itself begins and ends."""
    if _begins(node):
        opened.add(node)
        return
    begun = [other for other in opened if _closes(node, other)]
    if not begun:
        _refuse_part(node, node)
    opened.discard(max(begun))


def _refuse_part(switch: fx.Node, other: fx.Node) -> None:
    raise ValueError(
        f"the subgraph has {switch.name!r}, which begins or ends a no_grad, inference or autocast "
        f"region, but not the whole region, seen at {other.name!r}; match all of the region or "
        "operations within it"
    )


def _regions(span: Sequence[fx.Node], inside: set[fx.Node]) -> dict[fx.Node, Region]:
    """Tell for each node the regions of others that it stands in, as far as the span shows."""
    regions: dict[fx.Node, Region] = {}
    here: Region = ()
    for node in span:
        regions[node] = here
        if node not in inside:
            here = _after(node, here)
    return regions


def _after(node: fx.Node, here: Region) -> Region:
    """The regions after a node; one that is only left within the span counts as another one."""
    if here and _ends(node) and _closes(node, here[-1]):
        return here[:-1]
    return (*here, node) if _is_switch(node) else here


def _begins(node: fx.Node) -> bool:
    name = called_name(node)
    return name.startswith("_enter_") or (name in _GRAD_MODE and node.args[0] is False)


def _ends(node: fx.Node) -> bool:
    name = called_name(node)
    return name.startswith("_exit_") or (name in _GRAD_MODE and node.args[0] is not False)


def _closes(end: fx.Node, begin: fx.Node) -> bool:
    names = (called_name(end), called_name(begin))
    return end.args[:1] == (begin,) or (_GRAD_MODE.issuperset(names) and _begins(begin))


def _is_switch(node: fx.Node) -> bool:
    return node.op == "call_function" and (_begins(node) or _ends(node))


def _is_passive(node: fx.Node) -> bool:
    """Tell whether no region matters to a node: it looks something up, or asks for a size."""
    return node.op == "get_attr" or is_size(node)


def _between(span: Sequence[fx.Node], one: fx.Node, other: fx.Node) -> list[fx.Node]:
    first, last = sorted((span.index(one), span.index(other)))
    return list(span[first:last])


def _writers(gm: HasGraph, effects: Effects, value: fx.Node) -> list[fx.Node]:
    """List the nodes that change a value, by whatever name, found along its views."""
    memory = effects.roots([value])
    pending = [root for root in memory if isinstance(root, fx.Node)]
    if value.op == "get_attr":
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
