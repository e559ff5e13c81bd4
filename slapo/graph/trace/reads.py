"""Which attributes of modules a forward reads, as far as its bytecode shows."""

from __future__ import annotations

import dis
import itertools
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

#: Methods that no forward calls; they name sizes that a shard changes.
_NOT_IN_FORWARD = frozenset({"__init__", "__repr__", "extra_repr", "reset_parameters"})
_ASKING = frozenset({"getattr", "hasattr"})

#: ``("drop", "p")`` for ``self.drop.p``.
Chain = tuple[str, ...]


@dataclass(frozen=True)
class Reads:
    """What the code that a forward may reach reads.

    Parameters
    ----------
    names
        Every name in it, keys and names in strings included.
    chains
        Class of a module -> what its code reads starting at ``self``.
    asked
        The same, for what the code asks the class of.
    of_any
        The same as `chains`, for functions that may be given any of the modules.
    globals
        Names of Python modules, and those that the code reads there.
    """

    names: frozenset[str]
    chains: Mapping[type, frozenset[Chain]]
    asked: Mapping[type, frozenset[Chain]]
    of_any: frozenset[Chain]
    globals: frozenset[tuple[str, str]]


def reads_of(kinds: frozenset[type], functions: Collection[FunctionType] = ()) -> Reads:
    """What the forwards of modules of these classes read that may call one another's methods.

    A method counts as reached when something reached has its name; operators always do. So do the
    functions beside them that they name, and `functions`, which the modules hold.
    """
    # What is kept would keep the values that functions are closed over.
    return _reads(kinds, functions) if functions else _reads_of_classes(kinds)


@lru_cache(maxsize=256)
def _reads_of_classes(kinds: frozenset[type]) -> Reads:
    return _reads(kinds, ())


def _reads(kinds: frozenset[type], functions: Collection[FunctionType]) -> Reads:
    names: set[str] = {"forward"}
    reached: dict[type, set[CodeType]] = defaultdict(set)
    helpers: dict[FunctionType, set[str]] = {}
    for function in functions:
        for each in _with_helpers(function, helpers):
            names.update(_names_in(each.__code__))
    seen = -1
    while len(names) != seen:
        seen = len(names)
        for kind in kinds:
            for function in _reached(kind, names):
                if function.__code__ in reached[kind]:
                    continue
                reached[kind].add(function.__code__)
                for each in _with_helpers(function, helpers):
                    names.update(_names_in(each.__code__))
    chains, asked = {}, {}
    for kind, codes in reached.items():
        found = [step for code in codes for step in _steps_in(code)]
        chains[kind] = frozenset(chain for chain, _ in found)
        asked[kind] = frozenset(chain for chain, is_asked in found if is_asked)
    homes = {f: f.__globals__.get("__name__", "") for f in helpers}
    read = {(homes[f], name) for f, used in helpers.items() for name in used}
    # Such as whether a warning was given: the code is meant to go another way the next time.
    read -= {(homes[f], name) for f in helpers for name in _globals_in(f.__code__, "STORE_GLOBAL")}
    methods = {code for codes in reached.values() for code in codes}
    beside = (f.__code__ for f in helpers if f.__code__ not in methods)
    of_any = frozenset(chain for code in beside for chain, _ in _steps_in(code))
    return Reads(frozenset(names), chains, asked, of_any, frozenset(read))


def _steps_in(code: CodeType) -> Iterator[tuple[Chain, bool]]:
    for inner in _within(code):
        yield from _steps(inner, code.co_varnames[:1])


def _reached(kind: type, names: set[str]) -> list[FunctionType]:
    bases = (base for base in kind.__mro__ if base.__module__ != nn.Module.__module__)
    methods = _methods(bases)
    return [each for name, each in methods if name.startswith("__") or name in names]


def _with_helpers(
    function: FunctionType, known: dict[FunctionType, set[str]]
) -> Iterator[FunctionType]:
    """A function and those that it names in its Python module, and so on; torch's own aside.

    `known` gets each function with the global names that it reads.
    """
    if function in known:
        return
    scope = function.__globals__
    named = {name for name in _globals_in(function.__code__) if name in scope}
    deeper = {name for name in _attributes_in(function.__code__) if name.partition(".")[0] in named}
    known[function] = named | deeper
    yield function
    for name in sorted(named):
        for helper in _functions_of(scope[name]):
            if not (helper.__module__ or "").startswith("torch."):
                yield from _with_helpers(helper, known)


@lru_cache(maxsize=4096)
def _globals_in(code: CodeType, operation: str = "LOAD_GLOBAL") -> frozenset[str]:
    steps = (step for each in _within(code) for step in dis.get_instructions(each))
    return frozenset(step.argval for step in steps if step.opname == operation)


@lru_cache(maxsize=4096)
def _attributes_in(code: CodeType) -> frozenset[str]:
    """``settings.gain``: attributes of globals."""
    found = set()
    for each in _within(code):
        steps = list(dis.get_instructions(each))
        for step, after in itertools.pairwise(steps):
            if step.opname == "LOAD_GLOBAL" and after.opname == "LOAD_ATTR":
                found.add(f"{step.argval}.{after.argval}")
    return frozenset(found)


def codes_of(kind: type) -> Iterator[CodeType]:
    """The code of all methods of a class that a forward may reach, torch's own aside."""
    bases = (base for base in kind.__mro__ if not base.__module__.startswith("torch."))
    for _, method in _methods(bases):
        yield from _within(method.__code__)


#: Wraps forwards in what checkpoints a layer, and looks at flags for that.
_AROUND_LAYERS = "transformers.modeling_layers"


def mentions(kinds: frozenset[type], word: str) -> bool:
    """Whether the code of classes has a word: as an attribute, argument, variable or key."""
    bases = {base for kind in kinds for base in kind.__mro__ if base not in nn.Module.__mro__}
    own = (f for _, f in _methods(bases) if f.__globals__.get("__name__") != _AROUND_LAYERS)
    return any(_has(code, word) for method in own for code in _within(method.__code__))


def _has(code: CodeType, name: str) -> bool:
    words = (*code.co_names, *code.co_varnames, *code.co_consts)
    return any(name in word if isinstance(word, tuple) else name == word for word in words)


def _methods(bases: Iterable[type]) -> Iterator[tuple[str, FunctionType]]:
    """The methods that classes define, constructors and the like aside."""
    for base in bases:
        for name, value in vars(base).items():
            if name not in _NOT_IN_FORWARD:
                yield from ((name, function) for function in _functions_of(value))


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _within(inner)


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """A function, method or property as it was written, and its decorators."""
    function = value.fget if isinstance(value, property) else value
    function = getattr(function, "__func__", function)  # class methods cannot be called as such
    while callable(function) and not isinstance(function, type):
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            yield function
        function = getattr(function, "__wrapped__", None)


def global_value(home: str, name: str, default: Any = None) -> Any:
    """What a Python module has under a name, or what a module or class there has.

    None where that is nothing; `default` if the module is not imported.
    """
    if home not in sys.modules:
        return default
    value: Any = sys.modules[home]
    for part in name.split("."):
        if not isinstance(value, (ModuleType, type)):
            return None
        value = getattr(value, part, None)
    return value


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that a code uses, functions and comprehensions within it included."""
    for each in _within(code):
        yield from each.co_names
        yield from (c for c in each.co_consts if isinstance(c, str) and c.isidentifier())


def _steps(code: CodeType, me: tuple[str, ...]) -> Iterator[tuple[Chain, bool]]:
    """The chains that start at a variable, and whether the class of their end is asked for."""
    chain: list[str] | None = None
    function = ""
    for step in dis.get_instructions(code):
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            if chain:
                yield tuple(chain), function in ("isinstance", "type")
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            chain = [] if loaded[-1:] == me else None
        elif chain is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if chain == ["__class__"] and not step.argval.startswith("__"):
                chain.clear()  # attributes of the class are the object's as well
            chain.append(step.argval)
        else:
            if chain:
                yield tuple(chain), function in ("isinstance", "type")
            if chain is not None and function in _ASKING and isinstance(step.argval, str):
                yield (*chain, step.argval), False
            chain = None
            function = step.argval if step.opname == "LOAD_GLOBAL" else ""
