"""Expressions over the sizes of a call's tensors, as plain data."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch

#: Name of an operation -> the Python function that computes it on integers.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.not_,
    "max": torch.sym_max,
    "min": torch.sym_min,
    "ceil": math.ceil,
    "floor": math.floor,
    "trunc": math.trunc,
    "round": round,
    "sqrt": math.sqrt,
    "float": float,
}


@dataclass(frozen=True)
class Size:
    """A size of an input: ``path[0]`` names the parameter, the rest leads into a container."""

    path: tuple[Any, ...]
    dim: int

    @property
    def text(self) -> str:
        """As a user would write it."""
        return f"{path_text(self.path)}.size({self.dim})"

    def read(self, bound: Mapping[str, Any]) -> Any:
        """Its value in a call: a number, or a symbol when the call is itself being traced."""
        return follow(bound, self.path).shape[self.dim]


def path_text(path: tuple[Any, ...]) -> str:
    """``("cache", 0, "keys")`` as ``cache[0]['keys']``."""
    return path[0] + "".join(f"[{key!r}]" for key in path[1:])


def follow(bound: Mapping[str, Any], path: tuple[Any, ...]) -> Any:
    """What lies at `path` in the arguments of a call.

    Raises
    ------
    LookupError, TypeError
        If the call has nothing there.
    """
    value = bound[path[0]]
    for key in path[1:]:
        value = getattr(value, key) if is_dataclass(value) else value[key]
    return value


#: A number, a :class:`Size`, or ``(operation, operand, ...)``.
Formula = Any


def evaluate(expression: Formula, bound: Mapping[str, Any]) -> Any:
    """The value of a formula for the arguments of a call."""
    if isinstance(expression, Size):
        return expression.read(bound)
    if isinstance(expression, tuple):
        operands = [evaluate(operand, bound) for operand in expression[1:]]
        return OPERATIONS[expression[0]](*operands)
    return expression


def formula_text(expression: Formula, nested: bool = False) -> str:
    """A formula as a user would write it.

    Examples
    --------
    >>> formula_text(("<=", Size(("x",), 1), 64))
    'x.size(1) <= 64'
    """
    if isinstance(expression, Size):
        return expression.text
    if not isinstance(expression, tuple):
        return repr(expression)
    name, *operands = expression
    if name == "not":
        return f"not ({formula_text(operands[0])})"
    if len(operands) == 1 or name in ("max", "min"):
        return f"{name}({', '.join(map(formula_text, operands))})"
    texts = [formula_text(operand, nested=True) for operand in operands]
    text = f" {name} ".join(texts)
    return f"({text})" if nested else text
