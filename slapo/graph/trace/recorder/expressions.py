"""Size expressions: from sympy, which the shape engine speaks, to plain Python."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import reduce
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch


class UntranslatableError(ValueError):
    """A size expression with a function that has no plain Python form here."""


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

#: Class name of a sympy function -> name of the operation.
_NAMES = {
    "Add": "+",
    "Mul": "*",
    "Pow": "**",
    "PowByNatural": "**",
    "FloatPow": "**",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "IntTrueDiv": "/",
    "FloatTrueDiv": "/",
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
    "And": "and",
    "Or": "or",
    "Not": "not",
    "Max": "max",
    "Min": "min",
    "CeilToInt": "ceil",
    "FloorToInt": "floor",
    "TruncToInt": "trunc",
    "RoundToInt": "round",
    "OpaqueUnaryFn_sqrt": "sqrt",
    "ToFloat": "float",
}
_FOLDED = frozenset({"+", "*", "and", "or", "max", "min"})
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


def translate(
    expression: sympy.Basic,
    symbol: Callable[[sympy.Symbol], Any],
    apply: Callable[[str, list[Any]], Any],
) -> Any:
    """Rebuild `expression` with other building blocks.

    Parameters
    ----------
    expression
        What the shape engine holds, e.g. ``s0*s1 + 1``.
    symbol
        The new form of a symbol.
    apply
        The new form of an operation (a key of ``OPERATIONS``) on operands in their new form.

    Raises
    ------
    UntranslatableError
        If a function in it is not listed here.
    """
    if isinstance(expression, sympy.Symbol):
        return symbol(expression)
    if isinstance(expression, sympy.logic.boolalg.BooleanAtom):
        return bool(expression)
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Rational):
        return apply("/", [int(expression.p), int(expression.q)])
    if isinstance(expression, sympy.Float):
        return float(expression)
    kind = type(expression).__name__
    if kind == "Identity":
        return translate(expression.args[0], symbol, apply)
    name = _NAMES.get(kind)
    if name is None:
        raise UntranslatableError(f"size expression {expression} uses {kind}")
    operands = [translate(operand, symbol, apply) for operand in _ordered(expression, name)]
    if name in _FOLDED:
        return reduce(lambda left, right: apply(name, [left, right]), operands)
    return apply(name, operands)


def _ordered(expression: sympy.Basic, name: str) -> list[sympy.Basic]:
    """Operands in the order people write: ``x + 1``, ``2*x``."""
    operands = list(expression.args)
    if name == "+":
        operands.sort(key=lambda term: bool(term.is_number))
    return operands


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


def formula(expression: sympy.Basic, sizes: Mapping[sympy.Symbol, Size]) -> Formula:
    """A plain Python form of `expression`, comparisons with the number on the right.

    Raises
    ------
    KeyError
        If a symbol is not the size of an input.
    UntranslatableError
        See :func:`translate`.
    """

    def apply(name: str, operands: list[Formula]) -> Formula:
        if name in _FLIPPED and isinstance(operands[0], (int, float)):
            return (_FLIPPED[name], operands[1], operands[0])
        return (name, *operands)

    return translate(expression, sizes.__getitem__, apply)


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
