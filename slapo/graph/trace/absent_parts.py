"""Parts of what a leaf returns may be None, which Python asks without asking the proxy.

``w is None`` is settled by the proxy that `w` is: never. So the forward is run again with None in
the place of such a part. If it does the same then, or fails because it needs the part, it does not
matter whether the part is None; if it does something else, it asks.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Set
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, fx

from slapo.graph.trace.nodes import called_name

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_PARTS = (operator.getitem, getattr)


class Place(NamedTuple):
    """Where a forward takes a part."""

    filename: str
    line: int
    offset: int
    key: Any


@dataclass
class Part:
    """A part that was taken in a run: where, and its proxy."""

    place: Place
    is_absent: bool = False
    proxy: Any = None

    @property
    def node(self) -> fx.Node | None:
        """Its node, which an attribute has as soon as anything is done with it."""
        known = {} if self.proxy is None else vars(self.proxy)
        return known.get("_node") or known.get("node")

    @property
    def is_used(self) -> bool:
        """Whether anything of the graph is computed from it."""
        return self.node is not None and bool(self.node.users)


class Parts:
    """The parts that one run takes, in order.

    Parameters
    ----------
    absent
        The numbers of those that are None in this run.
    """

    def __init__(self, absent: frozenset[int] = frozenset()) -> None:
        self.absent = absent
        self.taken: list[Part] = []

    def take(self, key: Any, frame: FrameType) -> Part:
        """Note a part."""
        place = Place(frame.f_code.co_filename, frame.f_lineno, frame.f_lasti, key)
        part = Part(place, is_absent=len(self.taken) in self.absent)
        self.taken.append(part)
        return part

    def unused(self) -> frozenset[int]:
        """Those that nothing is computed from: all can be absent at once."""
        return frozenset(i for i, part in enumerate(self.taken) if not part.is_used)

    def used_at_each_place(self) -> list[int]:
        """Of the others the first that each place of the code has taken."""
        first: dict[Place, int] = {}
        for number, part in enumerate(self.taken):
            if part.is_used:
                first.setdefault(part.place, number)
        return list(first.values())

    def nodes(self, numbers: frozenset[int]) -> set[fx.Node]:
        """The nodes of some parts."""
        return {n for i in numbers if (n := self.taken[i].node) is not None}


def may_have_none(node: fx.Node, key: Any) -> bool:
    """Whether an item or attribute of the value of a node may be None."""
    if isinstance(key, str) and hasattr(Tensor, key):
        return key == "grad"
    if not isinstance(key, (int, str)):
        return False  # a slice of a tensor
    owner: Any = node
    while isinstance(owner, fx.Node) and owner.op == "call_function" and owner.target in _PARTS:
        if hasattr(Tensor, str(owner.args[1])):
            return False  # an item of a shape
        owner = owner.args[0]
    return isinstance(owner, fx.Node) and owner.op == "call_module"


def first_difference(
    first: fx.Graph, second: fx.Graph, absent: Set[fx.Node] = frozenset()
) -> tuple[str, str] | None:
    """Where two runs differ, the second of which has None for some values of the first."""
    same: dict[fx.Node, fx.Node] = {}
    for one, other in zip((n for n in first.nodes if n not in absent), second.nodes, strict=False):
        mapped = fx.node.map_arg((one.args, dict(one.kwargs)), same.get)
        if _spelled(one, mapped) != _spelled(other, (other.args, dict(other.kwargs))):
            return _spelled(one, mapped), _spelled(other, (other.args, dict(other.kwargs)))
        same[one] = other
    return None


def _spelled(node: fx.Node, arguments: Any) -> str:
    """A node in words; objects may lie elsewhere in another run."""
    args, kwargs = arguments
    return _ADDRESS.sub("", f"{called_name(node) or node.target}{args}{kwargs or ''}")
