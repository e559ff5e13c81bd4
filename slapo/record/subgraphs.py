"""Matches of ``find``, recorded as the search and the index in its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import fx

from slapo.errors import SlapoError
from slapo.graph.match.find import Located, Subgraph
from slapo.history import describe, spelled
from slapo.node import Node
from slapo.record.parts import Part, Unnamed, decode, encode, revive
from slapo.wrapper import innermost

_BY_HAND = (
    "nodes that were picked by hand, which no search can find again; pass the result of find() or "
    "find_node(), with an importable pattern"
)
_results: ContextVar[dict[Any, Any] | None] = ContextVar("slapo_replayed_searches", default=None)


@contextmanager
def searches_kept() -> Iterator[None]:
    """Keep search results for later steps of a replay."""
    token = _results.set({})
    try:
        yield
    finally:
        _results.reset(token)


@dataclass(frozen=True)
class Found(Part):
    """A match of ``find``, or a node of ``find_node``.

    `verb` is the method that searched and `pattern` its encoded argument. `index` and `total` are
    the position in the results and their number. `ago` counts the primitives between the search and
    the use of the match.
    """

    tag = "found"
    verb: str
    pattern: Any
    index: int
    total: int
    ago: int

    @property
    def text(self) -> str:
        return f"{self.verb}({describe(self.pattern)})[{self.index}]"

    def inner(self) -> Iterable[Any]:
        return (self.pattern,)

    def encode(self) -> Any:
        numbers = {"index": self.index, "total": self.total, "ago": self.ago}
        return {"verb": self.verb, "pattern": encode(self.pattern), **numbers}

    @classmethod
    def decode(cls, data: Any) -> Found:
        numbers = (data["index"], data["total"], data["ago"])
        if data["verb"] not in ("find", "find_node"):
            raise ValueError(f"{data['verb']!r} is not a search")
        return cls(data["verb"], decode(data["pattern"]), *numbers)

    def search(self, node: Node, step: int) -> None:
        """Search now, for a later step of the replay."""
        results = _results.get()
        assert results is not None, "only within searches_kept()"
        key = (node.path, self.verb, repr(self.pattern), step)
        if key not in results:
            results[key] = self._search(node)
        # Parts that share a search are found by their own id, which revive() looks up.
        results[id(self)] = results[key]

    def revive(self, node: Node) -> Any:
        """Return the match, from this search or an earlier one."""
        found = (_results.get() or {}).pop(id(self), None)
        if found is None:
            found = self._search(node)
        # An index into other results would rewrite other operations without an error.
        if len(found) != self.total:
            raise SlapoError(
                f"{spelled(node.path)}.{self.verb}({describe(self.pattern)}) finds {len(found)} "
                f"matches here, but found {self.total} when the record was made; replay on the "
                "same model, traced in the same way, or make the record again"
            )
        return found[self.index]

    def _search(self, node: Node) -> Any:
        if not isinstance(innermost(node.mod), fx.GraphModule):
            raise SlapoError(
                f"{spelled(node.path)} is not traced here, but {self.text} was found in a graph; "
                "replay the whole record, on the same model"
            )
        return getattr(node, self.verb)(revive(self.pattern, node))


def keep_found(value: Any, keep: Callable[[Any], Any], node: Node) -> Part:
    """Encode a match or a located node."""
    origin = getattr(value, "origin", None)
    if origin is None or (isinstance(value, Subgraph) and not value.is_whole()):
        return Unnamed(describe(value), _BY_HAND)
    pattern = keep(origin.pattern)
    if isinstance(pattern, Unnamed):
        return Unnamed(describe(value), f"a match of a pattern that is {pattern.why}")
    # Relative, as a replay may apply only a slice of the record.
    ago = len(node.state.history) - origin.steps
    return Found(origin.verb, pattern, origin.position, origin.total, ago)


def is_found(value: Any) -> bool:
    """Return whether it is a match, a located node, or a structure of these."""
    if isinstance(value, (Subgraph, Located)) or is_pair(value):
        return True
    return (
        isinstance(value, list)
        and bool(value)
        and all(map(is_pair, value))
        and not any(isinstance(each, Located) for each in value)
    )


def is_pair(value: Any) -> bool:
    """Return whether it is a ``(parent path, node)`` pair."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], fx.Node)
