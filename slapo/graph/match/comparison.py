"""Comparison of the values in a pattern with those in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx as fx
from torch import nn

from slapo.graph.match.canonical import Call, ModuleState, positions_and_names
from slapo.graph.match.steps import Step

MISSING = object()
"""The value of an argument that a call neither states nor has a default for."""

_SCALARS = (bool, int, float, complex, str, tuple, list, type(None))
_UNCOMPARED_SETTINGS = frozenset({"training", "p", "inplace"})

Pair = tuple[Any, Any]


def argument_pairs(step: Step, node: fx.Node, call: Call) -> Iterator[list[Pair]]:
    """Yield the ways to lay the arguments of a pattern's call over those of a graph's call."""
    if step.regex is not None:
        yield from _named_pairs(step, node, call)
        return
    wanted, args, op = step.call.args, call.args, call.op
    if wanted is None or args is None:
        return
    skipped = op.free | op.ignored if op else frozenset()
    for name in args.keys() - wanted.keys() - skipped:
        default = step.call.defaults.get(str(name), MISSING)
        if not same_value(default, args[name]):
            return
    values = {name: args.get(name, call.defaults.get(str(name), MISSING)) for name in wanted}
    yield [(wanted[name], value) for name, value in values.items()]
    if op and op.swap and op.swap[0] in values and op.swap[1] in values and _swaps(values):
        first, second = op.swap
        values[first], values[second] = values[second], values[first]
        yield [(wanted[name], value) for name, value in values.items()]


def _swaps(values: dict[str | int, Any]) -> bool:
    """Tell whether operands may change places: not when one is scaled by ``alpha``."""
    return values.get("alpha", 1) == 1


def _named_pairs(step: Step, node: fx.Node, call: Call) -> Iterator[list[Pair]]:
    """Compare the arguments that a pattern states for a module that it names."""
    wanted = step.call.args or {}
    given = positions_and_names(node.args, node.kwargs)
    if not wanted.keys() <= given.keys():
        # The same argument may be positional on one side and a keyword on the other.
        names = list(call.args or {})
        wanted = {
            names[k] if isinstance(k, int) and k < len(names) else k: v for k, v in wanted.items()
        }
        given = dict(call.args or {})
    if wanted.keys() <= given.keys():
        yield [(value, given[name]) for name, value in wanted.items()]


def inner_pairs(wanted: Any, value: Any) -> list[Pair] | None:
    """Take a constant or container of a pattern apart; None if it differs from `value`."""
    if isinstance(wanted, (tuple, list)):
        same = isinstance(value, (tuple, list)) and len(wanted) == len(value)
        return list(zip(wanted, value, strict=True)) if same else None
    if isinstance(wanted, dict):
        same = isinstance(value, dict) and wanted.keys() == value.keys()
        return [(wanted[key], value[key]) for key in wanted] if same else None
    if isinstance(wanted, slice):
        if not isinstance(value, slice):
            return None
        return [(getattr(wanted, k), getattr(value, k)) for k in ("start", "stop", "step")]
    return [] if same_value(wanted, value) else None


def same_value(one: Any, other: Any) -> bool:
    """Tell whether two values are the same node, the same weight or equal constants."""
    if one is other:
        return True
    if isinstance(one, (fx.Node, ModuleState)) or isinstance(other, (fx.Node, ModuleState)):
        return isinstance(one, ModuleState) and one == other
    if isinstance(one, (tuple, list, dict, slice)):
        inner = inner_pairs(one, other)
        return inner is not None and all(same_value(a, b) for a, b in inner)
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return (numbers or type(one) is type(other)) and _equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    """Compare two objects whose ``==`` may not give a truth value."""
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def same_settings(wanted: nn.Module, module: nn.Module) -> bool:
    """Compare the plain settings of two modules without parameters."""
    if next(wanted.parameters(), None) is not None:
        return True
    return _settings(wanted) == _settings(module)


def _settings(module: nn.Module) -> dict[str, Any]:
    """List the plain settings of a module, as far as they decide what it computes."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in _UNCOMPARED_SETTINGS
        and (isinstance(value, _SCALARS))
    }
