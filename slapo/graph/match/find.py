"""Look for subgraphs and nodes in a traced module and in the traced modules below it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch import fx, nn

from slapo.graph.match.bindings import Match
from slapo.graph.match.explain import why_no_call, why_no_node, why_no_subgraph
from slapo.graph.match.index import TracedGraph
from slapo.graph.match.pattern import compile_name, trace_pattern
from slapo.graph.match.search import find_by_name, find_subgraphs
from slapo.graph.trace.modes import TWIN
from slapo.wrapper import innermost

#: Path of the traced module that holds the node (relative to where the search began), and it.
Located = tuple[str, fx.Node]

T = TypeVar("T")


class Subgraph(list[Located]):
    """A match: a list of ``(parent_path, node)`` pairs in graph order.

    Parameters
    ----------
    path
        Path of the traced module.
    match
        The nodes in its graph.
    """

    def __init__(self, path: str, match: Match) -> None:
        super().__init__((path, node) for node in match)
        self._match = match

    @property
    def bindings(self) -> dict[str, Any]:
        """What each argument of the pattern stands for, see :attr:`.bindings.Match.bindings`."""
        return self._match.bindings


class Matches(list[T]):
    """What a search found. Where that is nothing, it tells why.

    Parameters
    ----------
    found
        Subgraphs or nodes.
    explain
        Gives the reason; called when it is asked for, at most once.

    Examples
    --------
    >>> Matches([], lambda: "no call of a module matches 'fc'")
    [] (no call of a module matches 'fc')
    """

    def __init__(self, found: Iterable[T] = (), explain: Callable[[], str] = str) -> None:
        super().__init__(found)
        self._explain: Callable[[], str] | None = None if self else explain
        self._why = ""

    @property
    def why(self) -> str:
        """Why the search found nothing, and what to try; empty if it found something."""
        self.settle()
        return self._why

    def settle(self) -> None:
        """Work the reason out now, if it has not been: the graphs may be about to change."""
        if self._explain is not None:
            self._why = self._explain()
            self._explain = None  # it holds on to the graphs

    if not TYPE_CHECKING:  # to which it is that of any list

        def __getitem__(self, index: Any) -> Any:
            try:
                return super().__getitem__(index)
            except IndexError:
                if self:
                    raise
                raise IndexError(f"the search found nothing: {self.why}") from None

    def __repr__(self) -> str:
        return super().__repr__() if self or not self.why else f"[] ({self.why})"


def traced_modules(root: nn.Module, path: str = "") -> Iterator[TracedGraph]:
    """Graphs of the traced modules at `root` and below it, each with module and path.

    The one place that knows which graphs a module has; everything else asks here. A module has
    several where kinds of calls take different paths, with a mask and without one.
    """
    module = innermost(root)
    if not isinstance(module, fx.GraphModule):
        return
    yield from _graphs_of(path, module)
    seen = {id(module)}
    for name, child in module.named_modules():
        inner = innermost(child)
        if name and isinstance(inner, fx.GraphModule) and id(inner) not in seen:
            seen.add(id(inner))
            yield from _graphs_of(f"{path}.{name}" if path else name, inner)


def _graphs_of(path: str, module: fx.GraphModule) -> Iterator[TracedGraph]:
    for owner in getattr(module, "graphs", (module,)):
        yield TracedGraph(path, module, owner.graph)


class _News:
    """Tells which matches are new: an operation that several graphs share is found once."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def __call__(self, path: str, nodes: Iterable[fx.Node]) -> bool:
        key = (path, *(node.meta.get(TWIN, id(node)) for node in nodes))
        is_new = key not in self._known
        self._known.add(key)
        return is_new


def read_pattern(pattern: str | Callable[..., Any] | nn.Module) -> re.Pattern[str] | fx.Graph:
    """Compile a regular expression, or trace a pattern.

    Raises
    ------
    TypeError, ValueError
        If it is no pattern.
    """
    return compile_name(pattern) if isinstance(pattern, str) else trace_pattern(pattern)


def find_subgraphs_in(root: nn.Module, pattern: re.Pattern[str] | fx.Graph) -> Matches[Subgraph]:
    """Matches of what :func:`read_pattern` gave in every graph at or below `root`."""
    graphs = list(traced_modules(root))
    is_new = _News()
    if isinstance(pattern, fx.Graph):
        found = [
            Subgraph(path, match)
            for path, gm, graph in graphs
            for match in find_subgraphs(graph, gm.get_submodule, pattern)
            if is_new(path, match)
        ]
        return Matches(found, lambda: why_no_subgraph(graphs, pattern))
    found = [
        Subgraph(path, match)
        for path, _, graph in graphs
        for match in find_by_name(graph, pattern)
        if is_new(path, match)
    ]
    return Matches(found, lambda: why_no_call(graphs, pattern))


def read_question(
    regex_or_predicate: str | Callable[[fx.Node], bool],
) -> re.Pattern[str] | Callable[[fx.Node], bool]:
    """Compile a regular expression; a function is what it is.

    Raises
    ------
    TypeError, ValueError
        If it is neither.
    """
    if isinstance(regex_or_predicate, str):
        return compile_name(regex_or_predicate)
    if not callable(regex_or_predicate):
        raise TypeError(
            "find_node takes a regular expression or a function of a node, "
            f"got {regex_or_predicate!r}"
        )
    return regex_or_predicate


def find_nodes(
    root: nn.Module, question: re.Pattern[str] | Callable[[fx.Node], bool]
) -> Matches[Located]:
    """Nodes that answer to what :func:`read_question` gave, in every graph at or below `root`."""
    graphs = list(traced_modules(root))
    if isinstance(question, re.Pattern):
        calls = find_subgraphs_in(root, question)
        return Matches((pair for call in calls for pair in call), lambda: calls.why)
    is_new = _News()
    found = [
        (path, node)
        for path, _, graph in graphs
        for node in graph.nodes
        if question(node) and is_new(path, (node,))
    ]
    return Matches(found, lambda: why_no_node(graphs))
