"""Rules of users' own operations."""

from __future__ import annotations

from typing import Any

from slapo.check.call import RULES, Rule


def register_place_rule(operation: Any, rule: Rule) -> None:
    """Say where the results of an operation lie, for :func:`slapo.check`.

    Needed for operations of ``torch.library`` that get slices or partial sums; on whole tensors
    every operation gives whole ones.

    Parameters
    ----------
    operation
        ``torch.ops.mylib.gelu``, one of its overloads, or its name, ``"mylib::gelu"``.
    rule
        Takes a :class:`slapo.check.call.Call`, returns a :class:`slapo.check.place.Place` for each
        tensor that the operation returns (or one for all), or raises ``call.misfit(why)``.
    """
    name = operation if isinstance(operation, str) else _name(operation)
    RULES[name.removeprefix("aten::")] = rule


def _name(operation: Any) -> str:
    return str(getattr(operation, "_qualified_op_name", None) or operation.name()).partition(".")[0]
