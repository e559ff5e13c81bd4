"""From decisions of the shape engine, which speaks sympy, to guards on the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from slapo.graph.trace.expressions import Formula, Size
from slapo.graph.trace.guards import SizeGuard
from slapo.graph.trace.shape_env import Decision, Origin


class UntranslatableError(ValueError):
    """A size expression with a function that has no plain Python form here."""


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


def guards_of(
    decisions: Iterable[Decision],
    sizes: Mapping[sympy.Symbol, Size],
    hints: Mapping[sympy.Symbol, int],
) -> list[SizeGuard]:
    """The guards that keep a recording true, without repetitions.

    `sizes` says which input has a symbol as its size, `hints` what that size was.

    Which decisions matter:

    - All that Python code made, that of leaves included: they chose the branch that was recorded,
      or the form of what a leaf returns.
    - Of those that an operation made, only equalities between sizes of inputs and the bounds of
      slices. An operation decides anew, from the sizes of the day, when the graph runs.
    - That a size equals the fixed size of a parameter is checked by the operation that needs it,
      and may change when the parameter is sharded; what remains is that a size that was not 1
      must not become 1, for then the operation would broadcast it.
    """
    relations = [r for r in map(_relation, decisions) if r is not None and not _always_true(r)]
    equal, renamed = _same_sizes(relations)
    found: dict[str, SizeGuard] = {}
    known: set[sympy.Basic] = set()
    for relation in relations:
        if relation not in equal:
            alike = relation.xreplace(renamed)
            if alike in known or _always_true(alike):
                continue  # it follows from the others
            known.add(alike)
        for guard in _guards(relation, sizes, hints):
            found.setdefault(guard.text, guard)
    return list(found.values())


def _same_sizes(
    relations: Iterable[sympy.Basic],
) -> tuple[set[sympy.Basic], dict[sympy.Basic, sympy.Basic]]:
    """The relations that say "these two sizes are equal", and what to rename by them."""
    found: set[sympy.Basic] = set()
    renamed: dict[sympy.Basic, sympy.Basic] = {}
    for relation in relations:
        if not isinstance(relation, sympy.Eq) or not all(s.is_Symbol for s in relation.args):
            continue
        old, new = (renamed.get(s, s) for s in relation.args)
        if old != new:
            found.add(relation)
            renamed = {k: new if v == old else v for k, v in renamed.items()}
            renamed[old] = new
    return found, renamed


def _relation(decision: Decision) -> sympy.Basic | None:
    """What must stay true of the sizes, or None if nothing must."""
    expression, value = decision.expression, decision.value
    if value not in (sympy.true, sympy.false):
        if expression.is_number:
            return None
        return sympy.Eq(expression, value)  # a size that was taken as a Python number
    truth = expression if value == sympy.true else sympy.Not(expression)
    if decision.origin in (Origin.OWN, Origin.LEAF):
        other_than_one = isinstance(truth, sympy.Ne) and truth.rhs == 1 and truth.lhs.is_Symbol
        return sympy.Gt(truth.lhs, 1) if other_than_one else truth
    if isinstance(truth, sympy.Eq):
        return _equality(truth, decision.origin)
    return truth if decision.origin is Origin.SLICE and _is_bound(truth) else None


def _is_bound(truth: sympy.Basic) -> bool:
    """True for limits that a slice puts on a size, such as ``size <= 64``.

    ``size >= 2`` is not one: that is asked of every new tensor, to see how it lies in memory.
    """
    if not isinstance(truth, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)):
        return False
    low = truth.lhs if isinstance(truth, (sympy.Le, sympy.Lt)) else truth.rhs
    return not (low.is_number and low <= 2)


def _equality(truth: sympy.Eq, origin: Origin) -> sympy.Basic | None:
    fixed = truth.lhs.is_number or truth.rhs.is_number
    if fixed and origin is not Origin.LEAF:
        size = truth.rhs if truth.lhs.is_number else truth.lhs
        return sympy.Gt(size, 1) if isinstance(size, sympy.Symbol) else None
    return truth


def _always_true(relation: sympy.Basic) -> bool:
    if relation == sympy.true:
        return True
    ranges = {s: ValueRanges(sympy.Integer(1), int_oo) for s in relation.free_symbols}
    try:
        bounds = bound_sympy(relation, ranges)
    except (AssertionError, NotImplementedError, KeyError, TypeError):
        return False
    return bool(bounds.is_singleton() and bounds.lower == sympy.true)


def _guards(
    relation: sympy.Basic,
    sizes: Mapping[sympy.Symbol, Size],
    hints: Mapping[sympy.Symbol, int],
) -> list[SizeGuard]:
    """The guard for `relation`; if it has no plain form, the sizes in it stay what they were."""
    try:
        return [SizeGuard.of(formula(relation, sizes))]
    except UntranslatableError:
        symbols = sorted(relation.free_symbols, key=str)
        return [SizeGuard.of(("==", sizes[symbol], hints[symbol])) for symbol in symbols]
