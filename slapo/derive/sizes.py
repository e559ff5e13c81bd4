"""Numbers of modules that sizes are computed of, and which of them each rank divides.

While a model runs, its integer attributes remember what was computed of them. Where such a number
arrives as the size of a dimension, that dimension's axes say what it has to be on one rank.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo.derive.axes import Axis, Chosen, Term, axes_in, factors, local_size, size_of
from slapo.sharding.rules import tensor_of_size

#: Path of a module, or of its config (``"h.0.config"``), and the name of the attribute.
Key = tuple[str, str]

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
}


@dataclass(frozen=True)
class Formula:
    """How a number was computed: an attribute, a constant, or an operator of two formulas."""

    key: Key | None = None
    constant: int = 0
    operator: str = ""
    operands: tuple[Formula, ...] = ()

    def value(self, read: Callable[[Key], int], constants_divided_by: int = 1) -> int:
        """The number, where attributes have the values that `read` gives."""
        if self.key is not None:
            return read(self.key)
        if self.operator:
            first, second = (each.value(read, constants_divided_by) for each in self.operands)
            return _OPERATORS[self.operator](first, second)
        # Sizes of tensors among the constants may be local ones, which are divided by themselves.
        divides = self.constant % constants_divided_by == 0
        return self.constant // constants_divided_by if divides else self.constant

    def keys(self) -> Iterator[Key]:
        """The attributes in it."""
        if self.key is not None:
            yield self.key
        for each in self.operands:
            yield from each.keys()

    def __str__(self) -> str:
        if self.key is not None:
            path, name = self.key
            return f"config.{name}" if path.rpartition(".")[2] == "config" else name
        if not self.operator:
            return str(self.constant)
        first, second = self.operands
        left = f"({first})" if first.operator in ("+", "-") else str(first)
        return f"{left}{self.operator}{f'({second})' if second.operator else second}"


class Counted(int):
    """An integer that remembers its formula."""

    formula: Formula

    def __new__(cls, value: int, formula: Formula) -> Counted:
        self = super().__new__(cls, value)
        self.formula = formula
        return self

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


@contextmanager
def counted_attributes(model: nn.Module) -> Iterator[dict[Key, int]]:
    """Attributes of modules, and of a copy of its config for each, are counted in the block."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    values: dict[Key, int] = {}
    for path, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn"):
            continue  # whose numbers follow their weights when these are sharded
        own = vars(module)
        holders = [(own, path)]
        config = own.get("config")
        if hasattr(config, "__dict__") and not hasattr(module, "get_input_embeddings"):
            before.append((own, "config", config))
            own["config"] = copy.copy(config)
            holders.append((vars(own["config"]), f"{path}.config"))
        for attributes, where in holders:
            for name, value in list(attributes.items()):
                is_plain = type(value) is int and value > 1 and not name.startswith("_")
                if is_plain and tensor_of_size(module, name) is None:
                    values[where, name] = value
                    before.append((attributes, name, value))
                    attributes[name] = Counted(value, Formula(key=(where, name)))
    try:
        yield values
    finally:
        for attributes, name, value in reversed(before):
            attributes[name] = value


@dataclass(frozen=True)
class SizeUse:
    """A number that was given to a function of torch as the size of a dimension."""

    formula: Formula
    term: tuple[Axis, ...]
    #: the function, and the module that called it
    function: str
    path: str


class UnfitNumbersError(Exception):
    """No choice of attributes to divide makes all sizes those of one rank."""

    def __init__(self, why: str, axes: Chosen) -> None:
        super().__init__(why)
        self.axes = axes


#: Up to so many attributes are divided together.
_AT_ONCE = 8


def divided_attributes(
    uses: list[SizeUse], values: Mapping[Key, int], chosen: Chosen, ranks: int
) -> list[Key]:
    """The fewest attributes to divide, so that each number is the size of its dimension."""
    found: list[Key] = []
    for keys, mine in _connected(uses):
        wanted = [(use, local_size(use.term, chosen, ranks)) for use in mine]

        def fits(divided: frozenset[Key], wanted: list[tuple[SizeUse, int]] = wanted) -> bool:
            return all(_fits(use.formula, size, values, divided, ranks) for use, size in wanted)

        free = sorted((k for k in keys if values[k] % ranks == 0), key=_heads_first)
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
    """A size of a head stays, where the number of heads can be divided."""
    return "head_dim" in key[1] or "head_size" in key[1], key


def _connected(uses: list[SizeUse]) -> list[tuple[set[Key], list[SizeUse]]]:
    """Uses that have attributes in common, directly or by others."""
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
    """Return whether a formula gives a size; constants in it may be sizes of local tensors."""

    def read(key: Key) -> int:
        return values[key] // ranks if key in divided else values[key]

    try:
        return size in (formula.value(read), formula.value(read, ranks))
    except ZeroDivisionError:
        return False


def formula_of(term: Term, uses: list[SizeUse]) -> Formula | None:
    """A number that a dimension's size was given by, wherever it has the same axes."""
    own = factors(term)
    return next((use.formula for use in uses if factors(use.term) == own), None)
