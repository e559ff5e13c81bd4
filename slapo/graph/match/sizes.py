"""Sizes, as ``view``, ``expand`` and norms take them.

Each tracer spells them in its own way: ``x.size(0)``, ``x.shape[0]``, ``-1``, the number itself. So
only literal sizes are compared, and all others may be any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch.fx as fx

from slapo.graph.match.dataflow import is_size
from slapo.graph.match.values import is_choice, same_value
from slapo.graph.trace.nodes import Pair


def sizes_agree(wanted: Any, value: Any) -> bool:
    """Tell whether sizes may be the same: False if both are literal in full and differ."""
    wanted, value = _as_tuple(wanted), _as_tuple(value)
    return not (_is_literal(wanted) and _is_literal(value)) or same_value(wanted, value)


def size_arguments(wanted: Mapping[str, Any], given: Mapping[str | int, Any]) -> Iterator[Pair]:
    """Yield the arguments of a pattern that stand for sizes, each with what it stands for."""
    for name in wanted.keys() & given.keys():
        sizes, values = _as_tuple(wanted[name]), _as_tuple(given[name])
        if len(sizes) == 1 and len(values) != 1:
            pairs = [(sizes[0], values)]  # x.view(shape): one argument for all
        else:
            pairs = list(zip(sizes, values, strict=False)) if len(sizes) == len(values) else []
        yield from ((s, v) for s, v in pairs if isinstance(s, fx.Node) and s.op == "placeholder")


def may_be_same_size(one: Any, other: Any) -> bool:
    """Tell whether two values may be equal: sizes that a graph computes may be equal to any."""
    computed = (isinstance(value, fx.Node) and is_size(value) for value in (one, other))
    return any(computed) or same_value(one, other)


def follows_from(value: Any, matched: Collection[fx.Node]) -> bool:
    """Tell whether a size depends on a value that a match computes."""
    if isinstance(value, (tuple, list)):
        return any(follows_from(inner, matched) for inner in value)
    if not isinstance(value, fx.Node):
        return False
    if value in matched:
        return True
    return is_size(value) and any(follows_from(v, matched) for v in value.all_input_nodes)


def _as_tuple(sizes: Any) -> tuple[Any, ...]:
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)


def _is_literal(sizes: tuple[Any, ...]) -> bool:
    return all(isinstance(size, int) or is_choice(size) for size in sizes)
