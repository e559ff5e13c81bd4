"""Compare two graphs of one module node by node: train against eval, tensor against None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from slapo.graph.trace.nodes import CONTAINERS, inner_pairs

#: Key in ``node.meta``: nodes of several graphs of a module with equal numbers are one operation.
TWIN = "slapo_twin"

#: Called on each pair of unequal constants; False stops the comparison.
OnDifference = Callable[[fx.Node, Any, Any], bool]


def aligned(left: fx.Graph, right: fx.Graph, on_difference: OnDifference) -> bool:
    """True when both graphs have the same nodes, up to constants that `on_difference` accepts.

    `right` may lack a placeholder's uses where `on_difference` accepts the pair
    (placeholder node, constant).
    """
    if len(left.nodes) != len(right.nodes):
        return False
    partner: dict[fx.Node, fx.Node] = {}
    for a, b in zip(left.nodes, right.nodes, strict=True):
        if a.op != b.op or not _same_target(a.target, b.target):
            return False
        partner[a] = b
        # Defaults of placeholders are not part of the computation.
        if a.op == "placeholder":
            continue
        if not _same_args((a.args, a.kwargs), (b.args, b.kwargs), partner, a, on_difference):
            return False
    return True


def _same_target(a: Any, b: Any) -> bool:
    return a is b or a == b


def _same_args(
    a: Any, b: Any, partner: dict[fx.Node, fx.Node], user: fx.Node, on_difference: OnDifference
) -> bool:
    if isinstance(a, fx.Node):
        if isinstance(b, fx.Node):
            return partner.get(a) is b
        return on_difference(user, a, b)
    if isinstance(a, CONTAINERS) and isinstance(b, CONTAINERS):
        pairs = inner_pairs(a, b)
        return pairs is not None and all(
            _same_args(x, y, partner, user, on_difference) for x, y in pairs
        )
    if type(a) is type(b) and (a is b or a == b):
        return True
    return on_difference(user, a, b)


def same_without(left: fx.Graph, right: fx.Graph, parameter: str) -> bool:
    """True when `right`, traced with `parameter` = None, is `left` with None put in its place."""

    def is_parameter(_user: fx.Node, a: Any, b: Any) -> bool:
        return (
            isinstance(a, fx.Node) and a.op == "placeholder" and a.target == parameter and b is None
        )

    return aligned(left, right, is_parameter)


def select_by_mode(training: bool, in_train: Any, in_eval: Any) -> Any:
    """The constant a module uses in its present mode."""
    return in_train if training else in_eval


def merge_modes(graph: fx.Graph, other: fx.Graph, training: bool) -> bool:
    """Make `graph`, traced in one mode, hold in both; False when the two differ in shape.

    Constants that differ between the modes become look-ups of the module's ``training`` flag, so
    ``F.dropout(x, 0.1, self.training)`` follows ``.train()`` and ``.eval()`` as the original does.

    Parameters
    ----------
    graph
        The graph to complete; changed only when the merge succeeds.
    other
        The same module traced in the other mode.
    training
        The mode that `graph` was traced in.
    """
    differing: set[fx.Node] = set()

    def note(user: fx.Node, a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node) or isinstance(b, fx.Node):
            return False
        differing.add(user)
        return True

    if not aligned(graph, other, note):
        return False
    if differing:
        _look_up_modes(graph, other, training, differing)
    return True


def _look_up_modes(
    graph: fx.Graph, other: fx.Graph, training: bool, differing: set[fx.Node]
) -> None:
    pairs = list(zip(graph.nodes, other.nodes, strict=True))
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        flag = graph.create_node("get_attr", "training")
        flag.meta["slapo_kind"] = "value"

    def look_up(user: fx.Node, here: Any, there: Any) -> fx.Node:
        in_train, in_eval = (here, there) if training else (there, here)
        if in_train is True and in_eval is False:
            return flag
        with graph.inserting_before(user):
            node = graph.call_function(select_by_mode, (flag, in_train, in_eval))
        node.meta["slapo_kind"] = "value"
        return node

    for node, partner in pairs:
        if node in differing:
            node.args = _merge(look_up, node, node.args, partner.args)
            node.kwargs = _merge(look_up, node, node.kwargs, partner.kwargs)


def _merge(look_up: Callable[..., fx.Node], user: fx.Node, a: Any, b: Any) -> Any:
    """`a` with every constant that differs from its partner in `b` made a look-up."""
    if isinstance(a, fx.Node):
        return a
    if isinstance(a, (tuple, list)):
        items = [_merge(look_up, user, x, y) for x, y in zip(a, b, strict=True)]
        return type(a)(*items) if hasattr(a, "_fields") else type(a)(items)
    if isinstance(a, dict):
        return {k: _merge(look_up, user, v, b[k]) for k, v in a.items()}
    if type(a) is type(b) and (a is b or a == b):
        return a
    return look_up(user, a, b)


@contextmanager
def other_mode(module: nn.Module) -> Iterator[None]:
    """The module as ``.train()`` or ``.eval()``, whichever it is not; all is put back."""
    mode = module.training
    flags = [(m, m.training) for m in module.modules()]
    module.train(not mode)
    try:
        yield
    finally:
        module.train(mode)  # it may do more than set flags
        for m, flag in flags:
            m.training = flag
