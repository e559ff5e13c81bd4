"""What a recorded graph demands of a call: sizes, shapes and the structure of containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from slapo.graph.trace.recorder.expressions import (
    Formula,
    Size,
    UntranslatableError,
    evaluate,
    follow,
    formula,
    formula_text,
    path_text,
)
from slapo.graph.trace.recorder.shape_env import Decision, Origin
from slapo.graph.trace.trees import parts


@dataclass(frozen=True)
class SizeGuard:
    """A limit on the sizes of the inputs that a recorded graph relies on.

    Parameters
    ----------
    text
        The limit as a user would write it.
    relation
        The same as a formula; see :mod:`slapo.graph.trace.recorder.expressions`.

    Examples
    --------
    >>> guard = SizeGuard.of(("<=", Size(("ids",), 1), 64))
    >>> guard.text
    'ids.size(1) <= 64'
    >>> guard.holds({"ids": torch.zeros(2, 65)})
    False
    """

    text: str
    relation: Formula = field(default=True, repr=False)

    @classmethod
    def of(cls, relation: Formula) -> SizeGuard:
        """The guard for a formula."""
        return cls(formula_text(relation), relation)

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """Whether a call fits; `bound` is parameter name -> argument of this call."""
        try:
            return bool(evaluate(self.relation, bound))
        except (LookupError, TypeError, AttributeError):
            return False  # no such tensor in this call, or one of fewer dimensions

    def parameters(self) -> set[str]:
        """Names of the parameters that the guard is about."""
        path: tuple[Any, ...] = getattr(self, "path", ())
        return {str(path[0])} if path else set()


@dataclass(frozen=True)
class TensorGuard(SizeGuard):
    """A parameter is a tensor of as many dimensions as it was traced with, none of them empty.

    The shape engine takes for granted that sizes are not 0, so Python code that asks
    ``x.size(0) == 0`` leaves no trace of its question; hence an empty tensor is refused.
    """

    path: tuple[Any, ...] = ()
    rank: int = 0

    @classmethod
    def at(cls, path: tuple[Any, ...], rank: int) -> TensorGuard:
        """The guard for the tensor at `path`."""
        return cls(
            f"{path_text(path)} is a non-empty tensor of {rank} dimensions", True, path, rank
        )

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """See :meth:`SizeGuard.holds`."""
        try:
            value = follow(bound, self.path)
        except (LookupError, TypeError):
            return False
        return isinstance(value, torch.Tensor) and value.dim() == self.rank and 0 not in value.shape


def dtype_kind(dtype: torch.dtype) -> str:
    """``boolean``, ``integer``, ``floating`` or ``complex``."""
    if dtype is torch.bool:
        return "boolean"
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "integer"


@dataclass(frozen=True)
class DtypeGuard(SizeGuard):
    """A tensor whose dtype the traced code has asked for has a dtype of the same kind."""

    path: tuple[Any, ...] = ()
    kind: str = ""

    @classmethod
    def at(cls, path: tuple[Any, ...], dtype: torch.dtype) -> DtypeGuard:
        """The guard for the tensor at `path`."""
        kind = dtype_kind(dtype)
        return cls(f"{path_text(path)} is a tensor of {kind} dtype", True, path, kind)

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """See :meth:`SizeGuard.holds`."""
        try:
            return dtype_kind(follow(bound, self.path).dtype) == self.kind
        except (LookupError, TypeError, AttributeError):
            return False


@dataclass(frozen=True)
class StructureGuard(SizeGuard):
    """A container argument has the structure, and the non-tensor values, it was traced with."""

    path: tuple[Any, ...] = ()
    keys: tuple[Any, ...] = ()
    values: tuple[tuple[Any, Any], ...] = ()

    @classmethod
    def at(cls, path: tuple[Any, ...], value: Any) -> StructureGuard:
        """The guard for the container `value`, one level of it."""
        elements = _entries(value) or []
        keys = tuple(p.key for p in elements)
        plain = tuple(
            (p.key, p.value)
            for p in elements
            if parts(p.value) is None and not isinstance(p.value, torch.Tensor)
        )
        text = f"{path_text(path)} has the entries {list(keys)}"
        if plain:
            text += " with " + ", ".join(f"{key!r}: {item!r}" for key, item in plain)
        return cls(text, True, path, keys, plain)

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """See :meth:`SizeGuard.holds`."""
        try:
            value = follow(bound, self.path)
            elements = _entries(value)
        except (LookupError, TypeError):
            return False
        if elements is None or tuple(p.key for p in elements) != self.keys:
            return False
        given = {p.key: p.value for p in elements}
        return all(_equal(given[key], item) for key, item in self.values)


def _entries(value: Any) -> list[Any] | None:
    """Parts of a container; a keyword argument that is None counts as not given."""
    elements = parts(value)
    if elements is None or not isinstance(value, dict):
        return elements
    return [part for part in elements if part.value is not None]


def _equal(given: Any, traced: Any) -> bool:
    if given is traced:
        return True
    return not isinstance(given, torch.Tensor) and type(given) is type(traced) and given == traced


# --- from decisions of the shape engine to guards ------------------------------------------------
def guards_of(
    decisions: Iterable[Decision],
    sizes: Mapping[sympy.Symbol, Size],
    hints: Mapping[sympy.Symbol, int],
) -> list[SizeGuard]:
    """The guards that keep a recording true, without repetitions.

    `sizes` says which input has a symbol as its size, `hints` what that size was.

    Which decisions matter:

    - All that the traced Python code made itself: they chose the branch that was recorded.
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
    if decision.origin is Origin.OWN:
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
    return truth if fixed or origin in (Origin.OPERATION, Origin.SLICE) else None


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
