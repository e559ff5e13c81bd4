"""Look for subgraphs and nodes in a traced module and in the traced modules below it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx, nn

from slapo.graph.match.pattern import trace_pattern
from slapo.graph.match.search import find_by_name, find_subgraphs
from slapo.wrapper import innermost

#: Path of the traced module that holds the node (relative to where the search began), and it.
Match = tuple[str, fx.Node]


def traced_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, fx.GraphModule]]:
    """Graph modules at `root` and below it, each with its path."""
    module = innermost(root)
    if not isinstance(module, fx.GraphModule):
        return
    yield path, module
    seen = {id(module)}
    for name, child in module.named_modules():
        inner = innermost(child)
        if name and isinstance(inner, fx.GraphModule) and id(inner) not in seen:
            seen.add(id(inner))
            yield f"{path}.{name}" if path else name, inner


def find_subgraphs_in(
    root: nn.Module, pattern: str | Callable[..., Any] | nn.Module
) -> list[list[Match]]:
    """Matches of `pattern` in every graph at or below `root`."""
    if isinstance(pattern, str):
        _check_regex(pattern)
        return [
            [(path, node) for node in nodes]
            for path, gm in traced_modules(root)
            for nodes in find_by_name(gm.graph, pattern)
        ]
    wanted = trace_pattern(pattern)
    return [
        [(path, node) for node in nodes]
        for path, gm in traced_modules(root)
        for nodes in find_subgraphs(gm.graph, gm.get_submodule, wanted)
    ]


def find_nodes(root: nn.Module, regex_or_predicate: str | Callable[[fx.Node], bool]) -> list[Match]:
    """Nodes that match in every graph at or below `root`."""
    accept = _predicate(regex_or_predicate)
    return [
        (path, node) for path, gm in traced_modules(root) for node in gm.graph.nodes if accept(node)
    ]


def _predicate(regex_or_predicate: str | Callable[[fx.Node], bool]) -> Callable[[fx.Node], bool]:
    if not isinstance(regex_or_predicate, str):
        return regex_or_predicate
    regex = _check_regex(regex_or_predicate)
    return lambda node: node.op == "call_module" and regex.match(str(node.target)) is not None


def _check_regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
