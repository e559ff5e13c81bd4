"""Symbols and spaces as published configuration files use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slapo.autotune.space import Choices, Refused, SpaceFunction, TuneError, configured


class Symbol:
    """A value to be found, with its candidates.

    Parameters
    ----------
    name
        What it is called.
    vals
        The candidates; while it is not fixed, the first stands for it.

    Examples
    --------
    >>> batch_size = Symbol("batch_size", [4, 8])
    >>> batch_size.val, batch_size.is_fixed()
    (4, False)
    >>> batch_size.fix(8)
    >>> batch_size
    Symbol('batch_size', 8)
    """

    def __init__(self, name: str, vals: Sequence[Any]) -> None:
        self.name = name
        self.vals = list(vals)
        if not self.vals:
            raise Refused(f"{name!r} has no candidates")
        self._val = self.vals[0]
        self._is_fixed = False

    @property
    def val(self) -> Any:
        """Its value: the first candidate until it is fixed."""
        return self._val

    def is_fixed(self) -> bool:
        """Whether its value is settled."""
        return self._is_fixed

    def fix(self, val: Any) -> None:
        """Settle its value.

        Raises
        ------
        ValueError
            If it is no candidate.
        """
        if val not in self.vals:
            raise ValueError(f"{self.name!r} cannot be {val!r}; its candidates are {self.vals}")
        self._val, self._is_fixed = val, True

    def __repr__(self) -> str:
        return f"Symbol({self.name!r}, {self.val if self._is_fixed else self.vals})"


class Space:
    """Symbols by name, some of them fixed.

    Parameters
    ----------
    fixed
        Name -> value of symbols that are settled as soon as they are created.

    Examples
    --------
    >>> space = Space({"batch_size": 8})
    >>> batch_size = space.create_symbol("batch_size", range(4, 12, 4))
    >>> ratio = space.create_symbol("ckpt_ratio", [0.0] if batch_size.val < 8 else [0.5, 1.0])
    >>> space.is_fixed(), space.to_dict()
    (False, {'batch_size': 8, 'ckpt_ratio': 0.5})
    """

    def __init__(self, fixed: Mapping[str, Any] | None = None) -> None:
        self._fixed = dict(fixed or {})
        self._symbols: dict[str, Symbol] = {}

    def create_symbol(self, name: str, vals: Sequence[Any]) -> Symbol:
        """A symbol; the one that is there if the name was created before.

        Parameters
        ----------
        name
            What the trial gets it as.
        vals
            The candidates, which may depend on the values of symbols created before.

        Raises
        ------
        ValueError
            If it was settled on a value that is no candidate any more.
        """
        if name not in self._symbols:
            symbol = Symbol(name, vals)
            if name in self._fixed:
                symbol.fix(self._fixed[name])
            self._symbols[name] = symbol
        return self._symbols[name]

    def is_fixed(self) -> bool:
        """Whether all of its symbols are."""
        return self.next_open() is None

    def next_open(self) -> Symbol | None:
        """The first symbol that is not fixed."""
        return next((s for s in self._symbols.values() if not s.is_fixed()), None)

    def to_dict(self) -> dict[str, Any]:
        """Name -> value."""
        return {name: symbol.val for name, symbol in self._symbols.items()}

    def __getitem__(self, name: str) -> Symbol:
        return self._symbols[name]

    def __contains__(self, name: object) -> bool:
        return name in self._symbols

    def __iter__(self) -> Iterator[Symbol]:
        return iter(self._symbols.values())

    def __len__(self) -> int:
        return len(self._symbols)

    def __repr__(self) -> str:
        return f"Space({list(self)})"


def space_of_symbols(
    args: Any,
    get_bs_range: Callable[[Any], Sequence[Any]] | None = None,
    update_space: Callable[[Any, Space], Any] | None = None,
) -> SpaceFunction:
    """The space that the functions of a published configuration file describe.

    It is made again after each symbol that is settled, until none is open.

    Parameters
    ----------
    args
        What both functions get as their first argument.
    get_bs_range
        Returns (smallest, largest, step) of the batch size, both ends included.
    update_space
        Creates the other symbols.

    Examples
    --------
    >>> from slapo.autotune.space import survey
    >>> def update_space(args, space):
    ...     space.create_symbol("ckpt_ratio", [0.0, 1.0] if space["batch_size"].val > 4 else [0.0])
    >>> space = space_of_symbols(None, lambda args: (4, 8, 4), update_space)
    >>> for point in survey(space).points:
    ...     print(point.values)
    {'batch_size': 4, 'ckpt_ratio': 0.0}
    {'batch_size': 8, 'ckpt_ratio': 0.0}
    {'batch_size': 8, 'ckpt_ratio': 1.0}
    """
    sizes = None if get_bs_range is None else _batch_sizes(get_bs_range, args)

    def space(choose: Choices) -> dict[str, Any]:
        fixed: dict[str, Any] = {}
        while True:
            made = Space(fixed)
            if sizes is not None:
                made.create_symbol("batch_size", sizes)
            if update_space is not None:
                update_space(args, made)
            symbol = made.next_open()
            if symbol is None:
                return made.to_dict()
            fixed[symbol.name] = choose(symbol.name, symbol.vals)

    return space


def _batch_sizes(get_bs_range: Callable[[Any], Any], args: Any) -> list[int]:
    with configured("get_bs_range(args)"):
        found = get_bs_range(args)
    try:
        smallest, largest, step = (int(number) for number in found)
    except (TypeError, ValueError):
        raise TuneError(
            f"get_bs_range returned {found!r}; return three whole numbers: the smallest batch "
            "size, the largest, and the step"
        ) from None
    if smallest < 1 or step < 1 or largest < smallest:
        raise TuneError(
            f"get_bs_range returned {found!r}, which holds no batch size; return (smallest, "
            "largest, step) with 1 <= smallest <= largest and a step of at least 1"
        )
    return list(range(smallest, largest + 1, step))
