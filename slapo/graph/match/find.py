"""Search for subgraphs and nodes in a traced module and the traced modules below it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from torch import fx, nn

from slapo.graph.match.diagnose import TracedGraph, why_no_call, why_no_node, why_no_subgraph
from slapo.graph.match.pattern import PATTERN_OF_CHAIN, call_module, compile_name, trace_pattern
from slapo.graph.match.search import Match, find_by_name, find_subgraphs
from slapo.graph.match.subgraph_view import SubgraphView
from slapo.graph.trace.module import rules_of
from slapo.graph.trace.nodes import ModuleLookup
from slapo.graph.trace.operator_effects import MARKS
from slapo.wrapper import innermost

T = TypeVar("T")
Question: TypeAlias = re.Pattern[str] | Callable[[fx.Node], bool]


# By identity: rules made from one `find` share its search, and one repetition serves all of them.
@dataclass(frozen=True, eq=False)
class Search:
    """A search in one traced module, which rewrites repeat in other captures."""

    #: traced pattern, or regular expression for the targets of module calls
    pattern: fx.Graph | re.Pattern[str]
    #: number of rewrites of the module at the time of the search
    rewrites: int = 0
    #: number of matches
    total: int = 0
    #: child that wraps the searched :class:`.SubgraphView`; empty for the module's own graph
    inside: str = ""
    #: True if matches may share operations
    overlapping: bool = False

    @classmethod
    def of(cls, module: fx.GraphModule, pattern: Any, total: int, **how: Any) -> Search:
        """Describe a search that was just made."""
        home: nn.Module = module
        inside = ""
        if isinstance(module, SubgraphView):
            home, inside = module.owner, module.name
        return cls(pattern, len(rules_of(home)), total, inside, **how)

    def run(self, graph: fx.Graph, modules: ModuleLookup) -> list[Match]:
        """Repeat the search in another graph."""
        if isinstance(self.pattern, fx.Graph):
            return find_subgraphs(graph, modules, self.pattern, self.overlapping)
        return find_by_name(graph, self.pattern)


class Origin(NamedTuple):
    """Origin of a match: the arguments of the search, and the position in its results."""

    verb: str
    pattern: Any
    position: int
    total: int
    steps: int


class Subgraph(list[tuple[str, fx.Node]]):
    """A match: a list of ``(parent_path, node)`` pairs in graph order."""

    #: set by ``Schedule.find``, for records
    origin: Origin | None = None

    def __init__(
        self, path: str, match: Match, search: Search | None = None, position: int = 0
    ) -> None:
        super().__init__((path, node) for node in match)
        self._match = match
        self.search, self.position = search, position

    @property
    def bindings(self) -> dict[str, Any]:
        """The value of each argument of the pattern; see :attr:`.search.Match.bindings`."""
        return self._match.bindings

    def is_whole(self) -> bool:
        """Return whether the list still has exactly the nodes that were found."""
        return [node for _, node in self] == list(self._match)


class Located(tuple[str, fx.Node]):
    """A node as a pair: the traced module's path, relative to the search, and the node."""

    origin: Origin | None = None


class Matches(list[T]):
    """Results of a search; if empty, `explain` is called once for the reason.

    >>> Matches([], lambda: "no call of a module matches 'fc'")
    [] (no call of a module matches 'fc')
    """

    def __init__(self, found: Iterable[T] = (), explain: Callable[[], str] = str) -> None:
        super().__init__(found)
        self._explain: Callable[[], str] | None = None if self else explain
        self._why = ""

    @property
    def why(self) -> str:
        """The reason why the search found nothing, with advice; empty if it found something."""
        self.settle()
        return self._why

    def settle(self) -> None:
        """Compute the reason now, before the graphs change."""
        if self._explain is not None:
            self._why = self._explain()
            self._explain = None  # the closure keeps the graphs alive

    if not TYPE_CHECKING:  # type checkers use list's own method

        def __getitem__(self, index: Any) -> Any:
            try:
                return super().__getitem__(index)
            except IndexError:
                if self:
                    raise
                raise IndexError(f"the search found nothing: {self.why}") from None

    def __repr__(self) -> str:
        return super().__repr__() if self or not self.why else f"[] ({self.why})"


def traced_modules(root: nn.Module) -> Iterator[TracedGraph]:
    """Yield the graphs of the traced modules at and below `root`, with module and path."""
    seen: set[int] = set()
    is_traced = isinstance(innermost(root), fx.GraphModule)
    for name, child in innermost(root).named_modules() if is_traced else ():
        inner = innermost(child)
        if isinstance(inner, fx.GraphModule) and id(inner) not in seen:
            seen.add(id(inner))
            yield TracedGraph(name, inner, inner.graph)


def read_pattern(pattern: str | Callable[..., Any] | nn.Module) -> re.Pattern[str] | fx.Graph:
    """Compile a regular expression or trace a pattern; raises TypeError or ValueError."""
    return compile_name(pattern) if isinstance(pattern, str) else trace_pattern(pattern)


def find_subgraphs_in(root: nn.Module, pattern: re.Pattern[str] | fx.Graph) -> Matches[Subgraph]:
    """Find matches of a :func:`read_pattern` result in every graph at or below `root`."""
    graphs = list(traced_modules(root))
    found = []
    for path, module, graph in graphs:
        matches = Search(pattern).run(graph, module.get_submodule)
        search = Search.of(module, pattern, len(matches))
        found += [Subgraph(path, match, search, k) for k, match in enumerate(matches)]
    if isinstance(pattern, fx.Graph):
        return Matches(found, lambda: why_no_subgraph(graphs, pattern))
    return Matches(found, lambda: why_no_call(graphs, pattern))


def search_for_chain(module: fx.GraphModule, chain: Sequence[fx.Node]) -> tuple[Search, int, Match]:
    """Return a search that finds hand-picked operations, the index of its match, and the match.

    Raises ValueError for operations that share no value, since no search finds them.
    """
    pattern = _pattern_of(chain)
    matches = find_subgraphs(module.graph, module.get_submodule, pattern, overlapping=True)
    for position, match in enumerate(matches):
        # A match may have more nodes than were picked: those that only compute sizes for it.
        if set(chain) <= set(match):
            return Search.of(module, pattern, len(matches), overlapping=True), position, match
    raise ValueError(
        f"no search can find {', '.join(node.name for node in chain)} in other captures of the "
        "module, which need the same rewrite; pass the result of find()"
    )


def _pattern_of(chain: Sequence[fx.Node]) -> fx.Graph:
    """Make a pattern of exactly these operations; their inputs are its arguments."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for value in dict.fromkeys(v for node in chain for v in node.all_input_nodes):
        if value not in chain:
            copies[value] = graph.placeholder(f"slapo_input_{len(copies)}")
    for node in chain:
        args: Any = fx.map_arg(node.args, copies.__getitem__)
        kwargs: Any = fx.map_arg(dict(node.kwargs), copies.__getitem__)
        if node.op == "call_module":
            # By path and not by class: another layer of the same class was not picked.
            exactly = f"{re.escape(str(node.target))}$"
            copies[node] = graph.call_function(call_module, (exactly, *args), kwargs)
        else:
            copies[node] = graph.create_node(node.op, node.target, args, kwargs)
            # The constants of a rewritten call may differ from graph to graph.
            copies[node].meta[PATTERN_OF_CHAIN] = "open" if MARKS in node.meta else "closed"
    # All are outputs, so that the pattern keeps nodes that no other picked node uses.
    graph.output(tuple(copies[node] for node in chain))
    return graph


def read_question(regex_or_predicate: str | Callable[[fx.Node], bool]) -> Question:
    """Compile a regular expression or return a function unchanged; TypeError for others."""
    if isinstance(regex_or_predicate, str):
        return compile_name(regex_or_predicate)
    return regex_or_predicate


def find_nodes(root: nn.Module, question: Question) -> Matches[Located]:
    """Find nodes that match a :func:`read_question` result in every graph at or below `root`."""
    if isinstance(question, re.Pattern):
        calls = find_subgraphs_in(root, question)
        return Matches((Located(pair) for call in calls for pair in call), lambda: calls.why)
    graphs = list(traced_modules(root))
    nodes = ((path, node) for path, _, graph in graphs for node in graph.nodes if question(node))
    return Matches(map(Located, nodes), lambda: why_no_node(graphs))
