"""Configuration files, and the symbols of the published package's files."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slapo.autotune.space import Choices, Refused, SpaceFunction, TuneError, configured
from slapo.errors import with_nearest


class Symbol:
    """A value to search for, with its candidates.

    Parameters
    ----------
    name
        Name of the value.
    vals
        Candidates. The first one is the value until one is fixed.

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
        """The value: the first candidate until it is fixed."""
        return self._val

    def is_fixed(self) -> bool:
        """Return True once the value is fixed."""
        return self._is_fixed

    def fix(self, val: Any) -> None:
        """Fix the value; raises ``ValueError`` if it is not a candidate."""
        if val not in self.vals:
            raise ValueError(f"{self.name!r} cannot be {val!r}; its candidates are {self.vals}")
        self._val, self._is_fixed = val, True

    def __repr__(self) -> str:
        return f"Symbol({self.name!r}, {self.val if self._is_fixed else self.vals})"


class Space:
    """Symbols by name.

    Parameters
    ----------
    fixed
        Name -> value of symbols to fix at creation.

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
        """Create a symbol, or return the one of that name.

        Parameters
        ----------
        name
            Name of the value in a trial.
        vals
            Candidates, which may depend on the values of earlier symbols.
        """
        if name not in self._symbols:
            symbol = Symbol(name, vals)
            if name in self._fixed:
                symbol.fix(self._fixed[name])
            self._symbols[name] = symbol
        return self._symbols[name]

    def is_fixed(self) -> bool:
        """Return True once all symbols are fixed."""
        return self.next_open() is None

    def next_open(self) -> Symbol | None:
        """Return the first symbol that is not fixed, or None."""
        return next((s for s in self._symbols.values() if not s.is_fixed()), None)

    def to_dict(self) -> dict[str, Any]:
        """Return name -> value."""
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
    """Return the space of a published configuration file, rebuilt after each symbol is fixed."""
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
        smallest = largest = step = 0
    if smallest < 1 or step < 1 or largest < smallest:
        raise TuneError(
            f"get_bs_range returned {found!r}, which holds no batch size; return three integers "
            "(smallest, largest, step) with 1 <= smallest <= largest and 1 <= step"
        )
    return list(range(smallest, largest + 1, step))


# --- configuration files -------------------------------------------------------------------------
_FUNCTIONS = ("space", "get_bs_range", "update_space", "predict", "constraint", "command")


@dataclass(frozen=True)
class Config:
    """Functions of a configuration file, as arguments of :func:`slapo.autotune.tune`."""

    space: SpaceFunction
    predict: Callable[[dict[str, Any]], Any] | None
    constraint: Callable[[Any], Any] | None
    command: Callable[[dict[str, Any]], Sequence[str]] | None
    grows: Collection[str] | None
    is_published: bool


def load_config(path: str | Path, args: Any = None) -> Config:
    """Read a file with ``space(choose)``, or with the functions of the published package.

    The latter are ``get_bs_range(args)`` and ``update_space(args, space)``.
    """
    module = _import(Path(path))
    found = {name: getattr(module, name, None) for name in _FUNCTIONS}
    for name, value in found.items():
        if value is not None and not callable(value):
            raise TuneError(f"{path}: {name} is {value!r}; make it a function")
    own, sizes, update, predict, constraint, command = found.values()
    published = sizes is not None or update is not None
    if (own is None) != published:
        known = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        rest = f"its functions are {', '.join(known[:8]) or 'none'}; write one of the two forms"
        what = "both space(choose) and" if own else "neither space(choose) nor"
        raise TuneError(
            f"{path} has {what} get_bs_range(args) or update_space(args, space): "
            + (rest if own else with_nearest("space", known, rest))
        )
    grows = getattr(module, "grows", ("batch_size",) if published else None)
    if isinstance(grows, str):
        raise TuneError(f"{path}: grows is {grows!r}; write a list of names")
    space = own or space_of_symbols(args, sizes, update)
    return Config(space, predict, constraint, command, grows, published)


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise TuneError(f"there is no configuration file {path}; pass a Python file as --config")
    name = f"slapo_tune_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TuneError(f"the configuration {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a script
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [
            f", line {f.lineno}," for f in frames if Path(f.filename).resolve() == path.resolve()
        ]
        line = lines[-1] if lines else ""
        raise TuneError(f"{path}{line} failed: {type(error).__name__}: {error}; fix it") from error
    return module
