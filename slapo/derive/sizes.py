"""Module attributes that determine sizes, and the choice of those to divide by the ranks.

While a model runs, integers computed from its attributes keep their formula. If such an integer
becomes the size of a dimension, the axes of that dimension determine its value on one rank.
"""

from __future__ import annotations

import copy
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo.derive.axes import (
    Axis,
    Chosen,
    Term,
    axes_in,
    factors,
    is_sharded,
    local_size,
    size_of,
)
from slapo.node import EINOPS, config_entries
from slapo.sharding.rules import tensor_of_size

#: Path of a module, and the name of an attribute, of one of its config (``"config.heads"``), or of
#: the size of an argument: ``"x.shape[-1]"``.
Key = tuple[str, str]

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
}


@dataclass(frozen=True)
class Formula:
    """Formula of an integer: an attribute, a constant, or an operator on two formulas."""

    key: Key | None = None
    constant: int = 0
    operator: str = ""
    operands: tuple[Formula, ...] = ()

    def value(self, read: Callable[[Key], int], constants_divided_by: int = 1) -> int:
        """Evaluate the formula with the attribute values of `read`."""
        if self.key is not None:
            return read(self.key)
        if self.operator:
            first, second = (each.value(read, constants_divided_by) for each in self.operands)
            return _OPERATORS[self.operator](first, second)
        # Constants may include sizes of local tensors, which are divided already.
        divides = self.constant % constants_divided_by == 0
        return self.constant // constants_divided_by if divides else self.constant

    def keys(self) -> Iterator[Key]:
        """Yield the attributes in the formula."""
        if self.key is not None:
            yield self.key
        for each in self.operands:
            yield from each.keys()

    def __str__(self) -> str:
        if self.key is not None:
            return self.key[1]
        if not self.operator:
            return str(self.constant)
        first, second = self.operands
        left = f"({first})" if first.operator in ("+", "-") else str(first)
        return f"{left}{self.operator}{f'({second})' if second.operator else second}"


class Counted(int):
    """Integer that keeps its formula."""

    formula: Formula

    def __new__(cls, value: int, formula: Formula) -> Counted:
        self = super().__new__(cls, value)
        self.formula = formula
        return self

    def __hash__(self) -> int:
        # einops caches shapes by the values of sizes, so that one attribute's formula would stand
        # for another's. It computes those of unhashable sizes anew.
        if sys._getframe(1).f_globals.get("__name__") == "einops.einops":
            raise TypeError("a size that keeps its formula is not hashable")
        return int(self).__hash__()

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _formula(number: int) -> Formula:
    return number.formula if isinstance(number, Counted) else Formula(constant=int(number))


def _remembering(sign: str, is_swapped: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return NotImplemented
        first, second = (other, self) if is_swapped else (self, other)
        value = _OPERATORS[sign](int(first), int(second))
        a, b = _formula(first), _formula(second)
        if sign == "-" and a.operator == "+" and a.operands[0] == b:
            return Counted(value, a.operands[1])  # the size of x[..., b : b + size]
        return Counted(value, Formula(operator=sign, operands=(a, b)))

    return method


for _name, _sign in {"add": "+", "sub": "-", "mul": "*", "floordiv": "//"}.items():
    setattr(Counted, f"__{_name}__", _remembering(_sign, False))
    setattr(Counted, f"__r{_name}__", _remembering(_sign, True))


def is_of_torch(module: nn.Module) -> bool:
    """Return True for a module of torch's own class."""
    return type(module).__module__.startswith("torch.nn")


@contextmanager
def counted_attributes(model: nn.Module) -> Iterator[dict[Key, int]]:
    """Make integer attributes of modules and of their configs keep formulas in the block."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    values: dict[Key, int] = {}

    def change(attributes: dict[str, Any], name: str, value: Any) -> None:
        before.append((attributes, name, attributes[name]))
        attributes[name] = value

    for path, module in model.named_modules():
        if is_of_torch(module):
            continue  # their attributes follow their weights when these are sharded
        own = vars(module)
        counted = [(own, "")]
        for name, value in list(own.items()):
            if config_entries(name, value) is None or hasattr(module, "get_input_embeddings"):
                continue
            # Modules share a config; in a copy, its entries count as those of this module.
            change(own, name, copy.copy(value))
            counted.append((config_entries(name, own[name]) or {}, f"{name}."))
        for attributes, prefix in counted:
            for name, value in list(attributes.items()):
                is_plain = type(value) is int and value > 1 and not name.startswith("_")
                if is_plain and tensor_of_size(module, name) is None:
                    key = path, prefix + name
                    values[key] = value
                    change(attributes, name, Counted(value, Formula(key=key)))
        if EINOPS in own:
            change(own, EINOPS, tuple(own["axes_lengths"].items()))
    try:
        yield values
    finally:
        for attributes, name, value in reversed(before):
            attributes[name] = value


@dataclass(frozen=True)
class SizeUse:
    """An integer that was passed to a torch function as the size of a dimension."""

    formula: Formula
    term: tuple[Axis, ...]
    #: the function, and the path of the module that called it
    function: str
    path: str


class UnfitNumbersError(Exception):
    """Raised if no division of attributes gives all sizes of one rank."""

    def __init__(self, why: str, axes: Chosen) -> None:
        super().__init__(why)
        self.axes = axes


#: Maximum number of attributes to divide together.
_AT_ONCE = 8


def divided_attributes(
    uses: list[SizeUse],
    values: Mapping[Key, int],
    read: Mapping[Key, Term],
    chosen: Chosen,
    ranks: int,
) -> list[Key]:
    """Return the fewest attributes to divide, so that each integer is the size of its dimension.

    `read` has the dimensions of arguments whose sizes a forward reads. If one is sharded, its size
    is divided already.
    """
    found: list[Key] = []
    whole = {**values, **{key: size_of(term) for key, term in read.items()}}
    # The forward may have set an attribute anew: its formula says nothing then.
    uses = [use for use in uses if _fits(use.formula, size_of(use.term), whole, frozenset(), 1)]
    values = {**values, **{key: local_size(term, chosen, ranks) for key, term in read.items()}}
    divided_already = {key for key, term in read.items() if is_sharded(term, chosen)}
    # Attributes of separate groups have no size in common, so each group is searched alone: the
    # number of subsets grows exponentially.
    for keys, mine in _connected(uses):
        wanted = [(use, local_size(use.term, chosen, ranks)) for use in mine]

        def fits(divided: frozenset[Key], wanted: list[tuple[SizeUse, int]] = wanted) -> bool:
            return all(_fits(use.formula, size, values, divided, ranks) for use, size in wanted)

        free = [k for k in keys - divided_already if values[k] % ranks == 0]
        free.sort(key=_heads_first)
        # Fewest first: dividing an attribute that no size needs would change something else.
        tries = (
            frozenset(some)
            for count in range(min(len(free), _AT_ONCE) + 1)
            for some in itertools.combinations(free, count)
        )
        best = next(filter(fits, tries), None)
        if best is None:
            wrong = [(use, n) for use, n in wanted if size_of(use.term) != n]
            said = ", ".join(
                f"{use.function} in {use.path!r} by {use.formula}: {size_of(use.term)} -> {n}"
                for use, n in wrong
            )
            axes = {axis: None for use, _ in wrong for axis in axes_in(use.term) if axis in chosen}
            raise UnfitNumbersError(f"no attributes, divided by {ranks}, give {said}", axes)
        found += sorted(best)
    return found


def _heads_first(key: Key) -> tuple[bool, Key]:
    """Sort key that prefers dividing the number of heads to dividing the size of a head."""
    return "head_dim" in key[1] or "head_size" in key[1], key


def _connected(uses: list[SizeUse]) -> list[tuple[set[Key], list[SizeUse]]]:
    """Group uses that share attributes, directly or through others."""
    groups: list[tuple[set[Key], list[SizeUse]]] = []
    for use in uses:
        keys, mine = set(use.formula.keys()), [use]
        apart = []
        for group in groups:
            if group[0] & keys:
                keys |= group[0]
                mine = group[1] + mine
            else:
                apart.append(group)
        groups = [*apart, (keys, mine)]
    return groups


def _fits(
    formula: Formula, size: int, values: Mapping[Key, int], divided: frozenset[Key], ranks: int
) -> bool:
    """Return whether a formula gives a size; its constants may be sizes of local tensors."""

    def read(key: Key) -> int:
        return values[key] // ranks if key in divided else values[key]

    def gives(constants_divided_by: int) -> bool:
        with suppress(ZeroDivisionError):
            return formula.value(read, constants_divided_by) == size
        return False

    return gives(1) or gives(ranks)


def formula_of(term: Term, uses: list[SizeUse]) -> Formula | None:
    """Return a formula that gave the size of a dimension with the same axes, or None."""
    own = factors(term)
    return next((use.formula for use in uses if factors(use.term) == own), None)
