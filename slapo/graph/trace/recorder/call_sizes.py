"""The symbolic sizes of one call, and numbers that may stand in for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from slapo.graph.trace.recorder.shape_env import Origin
from slapo.graph.trace.trees import leaves

#: Two numbers for each slot. They lie far apart, so that a size that grows in large steps (strides
#: of convolutions) is not taken for a constant; most tables of positions have 512 rows or more.
_PRIMES = (
    (17, 487),
    (23, 491),
    (29, 499),
    (31, 503),
    (37, 509),
    (41, 521),
    (43, 523),
    (47, 541),
)
MAX_SYMBOLS = len(_PRIMES)

#: For each symbol a slot; those that must be equal share one.
Slots = tuple[int, ...]


class CallSizes:
    """The symbolic sizes in the arguments of one call.

    Parameters
    ----------
    arguments
        Positional and keyword arguments, or any other nested value.

    Attributes
    ----------
    known : dict
        Expression -> size, in the order of the arguments.
    symbols : list
        The symbols in these, in this order.
    """

    def __init__(self, arguments: Any) -> None:
        self.known: dict[sympy.Expr, torch.SymInt] = {}
        self._index: dict[sympy.Symbol, int] = {}
        self._names: dict[sympy.Expr, Any] = {}
        for leaf in leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.shape)
            else:
                self._note(leaf if isinstance(leaf, torch.Size) else (leaf,))

    def _note(self, sizes: Iterable[Any]) -> None:
        for size in sizes:
            if isinstance(size, torch.SymInt) and not (expression := size.node.expr).is_number:
                if expression in self.known:
                    continue
                self.known[expression] = size
                for symbol in sorted(expression.free_symbols, key=str):
                    self._index.setdefault(symbol, len(self._index))

    @property
    def symbols(self) -> list[sympy.Symbol]:
        """In the order of their first occurrence."""
        return list(self._index)

    def name(self, size: Any) -> Any:
        """A size in a form that is equal for calls that differ in the names of symbols only."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        if expression not in self._names:
            self._names[expression] = self._new_name(expression)
        return self._names[expression]

    def _new_name(self, expression: sympy.Expr) -> Any:
        if expression.is_Symbol:
            return ("size", self._index.get(expression, str(expression)))
        renamed = {s: sympy.Symbol(f"n{i}") for s, i in self._index.items()}
        return ("size", str(expression.xreplace(renamed)))

    # --- numbers -----------------------------------------------------------------------------
    def hint(self, symbol: sympy.Symbol) -> int | None:
        """What a symbol was in the example; None if it occurs in expressions only."""
        size = self.known.get(symbol)
        return None if size is None else int(size.node.hint)

    def example(self) -> dict[sympy.Symbol, sympy.Integer]:
        """What each symbol was in the example."""
        hints: dict[sympy.Symbol, int] = {}
        for size in self.known.values():
            hints.update(size.node.shape_env.hints)
        return {symbol: sympy.Integer(hints[symbol]) for symbol in self._index}

    def numbers(self, slots: Slots, second: Collection[int]) -> dict[sympy.Symbol, sympy.Integer]:
        """What stands in for each symbol: the first number of its slot, or the second.

        `second` lists the symbols that get the second, by index.
        """
        ranks = {slot: rank for rank, slot in enumerate(dict.fromkeys(slots))}
        return {
            symbol: sympy.Integer(_PRIMES[ranks[slots[i]]][i in second])
            for symbol, i in self._index.items()
        }

    def by_numbers(self, slots: Slots) -> dict[tuple[int, ...], tuple[int, ...]]:
        """What a size is in the runs -> the indices of the known sizes it is the product of."""
        runs = [self.numbers(slots, ()), self.numbers(slots, range(len(slots)))]
        numbers = [tuple(number_of(size, run) for run in runs) for size in self.known.values()]
        indices = range(len(numbers))
        pairs = itertools.combinations_with_replacement(indices, 2)
        found: dict[tuple[int, ...], tuple[int, ...]] = {}
        for factors in (*pairs, *((index,) for index in reversed(indices))):  # single sizes win
            product = zip(*(numbers[index] for index in factors), strict=True)
            found[tuple(map(math.prod, product))] = factors
        return found

    # --- relations ---------------------------------------------------------------------------
    def fits(self, slots: Slots) -> bool:
        """Whether symbols of one slot are equal in the example."""
        first: dict[int, int | None] = {}
        hints = map(self.hint, self._index)
        return all(
            first.setdefault(slot, hint) == hint for slot, hint in zip(slots, hints, strict=True)
        )

    def assume(self, slots: Slots) -> None:
        """Decide that symbols of one slot are equal; the graph holds only where they are."""
        first: dict[int, torch.SymInt] = {}
        for symbol, slot in zip(self._index, slots, strict=True):
            size = self.known.get(symbol)
            if size is not None and (other := first.setdefault(slot, size)) is not size:
                with size.node.shape_env.asked_by(Origin.OPERATION):
                    torch._check(size == other)


def number_of(size: Any, numbers: dict[sympy.Symbol, sympy.Integer]) -> int:
    """A size with numbers for its symbols.

    Raises
    ------
    TypeError
        If that is no whole number.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    number = size.node.expr.xreplace(numbers)
    if not isinstance(number, sympy.Integer):
        raise TypeError(f"{size} is {number}")
    return int(number)


def find_slots(
    hints: Sequence[int | None], works: Callable[[Slots, Collection[int]], bool]
) -> Slots | None:
    """The freest slots that a call works with, or None if it takes a run on symbols to tell.

    Parameters
    ----------
    hints
        What the symbols were in the example. Only those that were equal may share a slot, as the
        batches of two inputs do.
    works
        ``works(slots, second)``: whether the call works with these numbers; see
        :meth:`CallSizes.numbers`.

    Examples
    --------
    >>> find_slots((3, 13, 3), lambda slots, second: slots[0] == slots[2] and not second)
    (0, 1, 0)
    >>> find_slots((3, 13), lambda slots, second: True)
    (0, 1)
    """
    count = len(hints)
    free: Slots = tuple(range(count))
    if works(free, ()):
        return free
    first: dict[int, int] = {}
    slots = tuple(i if hint is None else first.setdefault(hint, i) for i, hint in enumerate(hints))
    if slots == free or not works(slots, ()):
        return None
    for i in free:
        mates = {j for j in free if j != i and slots[j] == slots[i]}
        # A size must equal another if the call works with two numbers for both (the caller tries
        # the second), but not with one number for this and one for that. Of two, one decides.
        if mates and mates != {slots[i]} and (works(slots, {i}) or works(slots, mates)):
            slots = (*slots[:i], count + i, *slots[i + 1 :])
            if not works(slots, ()):
                return None
    return slots
