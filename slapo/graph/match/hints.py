"""What may be in the way of a match, and what to try: hints for those who found nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch.fx as fx
from torch import nn

from slapo.graph.match.canonical import key_of
from slapo.graph.match.index import TracedGraph
from slapo.graph.match.steps import Step
from slapo.graph.trace.leaves import is_opaque, is_torch_leaf
from slapo.wrapper import innermost

_SHOWN = 4


def opaque_calls(graphs: Sequence[TracedGraph]) -> Iterator[str]:
    """List calls that hide the operations of a module."""
    closed: list[str] = []
    sealed: list[str] = []
    for traced, node in _module_calls(graphs):
        inner = _module(node, traced)
        if not isinstance(inner, fx.GraphModule) and not is_torch_leaf(inner):
            is_sealed = is_opaque(traced.module.get_submodule(str(node.target)))
            (sealed if is_sealed else closed).append(show(node, traced))
    if closed:
        yield (
            f"the operations within {listed(closed)} are not seen; .trace(flatten=True) before "
            "the search makes them part of the graph"
        )
    if sealed:
        yield f"{listed(sealed)} stay closed: they have hooks or wrappers, or traceable = False"


def other_spellings(missing: Step, graphs: Sequence[TracedGraph]) -> Iterator[str]:
    """Name operations that a missing one may be hidden in, or be called by."""
    linear = [
        show(node, traced)
        for traced, node in _module_calls(graphs)
        if isinstance(_module(node, traced), nn.Linear)
    ]
    if missing.call.key == "add" and linear:
        yield (
            f"the bias of {linear[0]} is added within it: .decompose() the layer before the "
            "trace, and the addition is an operation of its own"
        )
    if missing.call.key == "matmul" and linear:
        yield "nn.Linear is F.linear(x, weight, bias) or call_module(name, x) in a pattern"
    name = name_of(missing)
    keys = {key_of(node, gm.get_submodule) for _, gm, graph in graphs for node in graph.nodes}
    names = {name_of_key(key) for key in keys - {None}}
    near = difflib.get_close_matches(name, names - {name}, n=3, cutoff=0.6)
    if near:
        yield f"named alike are {listed(near)}"


def near_names(regex: re.Pattern[str], graphs: Sequence[TracedGraph]) -> Iterator[str]:
    """Say which names of called modules a regular expression nearly matches."""
    calls = [(traced.path, str(node.target)) for traced, node in _module_calls(graphs)]
    targets = list(dict.fromkeys(target for _, target in calls))
    within = [target for target in targets if regex.search(target)]
    full = [(path, target) for path, target in calls if regex.match(f"{path}.{target}")]
    if not targets:
        yield "no graph here calls a module"
    elif within:
        yield (
            f"{regex.pattern!r} is within {within[0]!r}, but names are matched from their start: "
            f"write {'.*' + regex.pattern!r}"
        )
    elif full:
        path, target = full[0]
        yield (
            f"it matches '{path}.{target}', but in the graph of {path!r} the name is {target!r}: "
            "write that, or trace the parent with .trace(flatten=True)"
        )
    else:
        near = difflib.get_close_matches(regex.pattern, targets, n=3, cutoff=0.4) or targets
        yield f"names of called modules are {listed([repr(name) for name in near])}"


def hidden_modules(graphs: Sequence[TracedGraph], regex: re.Pattern[str]) -> Iterator[str]:
    """Name a module whose path matches, but which no graph calls by it."""
    paths = (path for path, _ in graphs[0].module.named_modules() if path and regex.match(path))
    for path in list(paths)[:1]:
        yield (
            f"there is a module {path!r}, but no graph calls it by that name; with "
            ".trace(flatten=True) the graph has the calls within other modules"
        )


def _module_calls(graphs: Sequence[TracedGraph]) -> Iterator[tuple[TracedGraph, fx.Node]]:
    for traced in graphs:
        yield from ((traced, node) for node in traced.graph.find_nodes(op="call_module"))


def _module(node: fx.Node, traced: TracedGraph) -> nn.Module:
    return innermost(traced.module.get_submodule(str(node.target)))


# --- names ---


def show(node: fx.Node, traced: TracedGraph) -> str:
    """A node as users know it."""
    if node.op == "call_module":
        return f"{node.target} ({type(_module(node, traced)).__name__})"
    return f"{node.name} ({name_of_key(key_of(node, traced.module.get_submodule)) or node.op})"


def name_of(step: Step) -> str:
    """An operation of a pattern as it was written."""
    if step.regex is not None:
        return f"call_module({step.regex.pattern!r})"
    return name_of_key(step.call.key)


def name_of_key(key: Any) -> str:
    """The operator's own name, see :func:`.canonical.key_of`."""
    name = key[1] if isinstance(key, tuple) else key
    return str(getattr(name, "__name__", name or ""))


def listed(items: Sequence[str]) -> str:
    """The first of some names."""
    unique = list(dict.fromkeys(items))
    shown = ", ".join(unique[:_SHOWN])
    return f"{shown} and {len(unique) - _SHOWN} more" if len(unique) > _SHOWN else shown
