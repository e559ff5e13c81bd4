"""What a leaf returns, learnt from runs on numbers.

On symbolic sizes an attention layer takes half a second, on meta tensors some milliseconds. So a
leaf is run on meta with primes for its symbolic sizes, twice, with other primes each time. A size
of the output that is the same in both runs is a constant; one that follows the primes of an input
size (or a product of two) is that size. A run on fake tensors of the example's sizes, which know
their device, confirms it. Whatever does not fit this picture is learnt from a run on symbols, which
also finds which sizes have to be equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from slapo.graph.trace.leaf_outputs import (
    CallForm,
    OutputForm,
    TensorForm,
    UnknownFormError,
    forms_of,
    size_over,
    structure,
)
from slapo.graph.trace.trees import map_leaves

#: Two numbers for each size, far apart, so that a size that is cut or filled up to some length, or
#: grows in large steps (strides of convolutions), is not the same in both.
_PRIMES = (
    *((3, 9973), (5, 9967), (7, 9949), (11, 9941)),
    *((13, 9931), (17, 9929), (19, 9923), (23, 9907)),
)
#: Choices of sizes to be taken for equal.
_MOST_TRIES = 64


@dataclass(frozen=True)
class Runs:
    """Ways to run a leaf.

    Parameters
    ----------
    on_fakes
        On fake tensors, which may have symbols for sizes.
    on_meta
        On meta tensors: the cheapest, and blind to devices.
    device
        Where what lies on meta really is.
    known
        What has been found on meta, by the form of the call.
    """

    on_fakes: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    on_meta: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    device: torch.device | None
    known: dict[Any, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict)

    def forms_on_meta(
        self, call: CallForm, numbers: Mapping[Any, int]
    ) -> tuple[Any, tuple[Any, ...]]:
        """The output for these sizes, and what it is made of."""
        with _modes_off():
            args, kwargs = call.with_numbers(numbers, "meta")
        key = CallForm.of(args, kwargs).key
        if key not in self.known:
            with _modes_off(), torch.device("meta"):
                result = self.on_meta(args, kwargs)
            forms = tuple(_moved(form, self.device) for form in forms_of(result, int))
            self.known[key] = (result, forms)
        return self.known[key]

    def forms_on_fakes(
        self, call: CallForm, numbers: Mapping[Any, int]
    ) -> tuple[Any, tuple[Any, ...]]:
        """The same on fake tensors."""
        with no_python_dispatcher():
            result = self.on_fakes(*call.with_numbers(numbers))
        return result, forms_of(result, int)

    def confirm(self, form: OutputForm, call: CallForm, on_meta: bool | None = None) -> bool:
        """Whether a run on the sizes of the example, by default as it was learnt, yields a form."""
        by_meta = form.from_meta if on_meta is None else on_meta
        try:
            run = self.forms_on_meta if by_meta else self.forms_on_fakes
            result, found = run(call, call.hints)
        except Exception:  # a run on symbols tells, if it matters
            return False
        hints = {call.names[symbol]: number for symbol, number in call.hints.items()}
        return structure(result) == structure(form.skeleton) and found == form.at(hints)


@contextmanager
def _modes_off() -> Iterator[None]:
    with no_python_dispatcher(), _disable_current_modes():
        yield


def _moved(form: Any, device: torch.device | None) -> Any:
    if isinstance(form, TensorForm) and form.device.type == "meta" and device is not None:
        return replace(form, device=device)
    return form


def learn(runs: Runs, call: CallForm, is_stack: bool) -> OutputForm | None:
    """The form of what a leaf returns for calls like this; None if each must be run by itself.

    Of a whole stack of layers, runs on meta have to do.
    """
    form = _from_numbers(runs, call, is_stack)
    return form or _from_symbols(runs.on_fakes(call.args, call.kwargs), call)


def _from_numbers(runs: Runs, call: CallForm, is_stack: bool) -> OutputForm | None:
    """The form that two runs on primes suggest and one on the sizes of the example confirms."""
    symbols = list(call.hints)
    if not 0 < len(symbols) <= len(_PRIMES):
        return None
    pairs = _PRIMES[: len(symbols)]
    try:
        (first, ones), (second, others) = (
            runs.forms_on_meta(call, dict(zip(symbols, numbers, strict=True)))
            for numbers in zip(*pairs, strict=True)
        )
        if structure(first) != structure(second):
            return None
        names = [call.names[symbol] for symbol in symbols]
        sizes = _size_pairs(dict(zip(pairs, names, strict=True)))
        forms = tuple(_joined(a, b, sizes) for a, b in zip(ones, others, strict=True))
    except Exception:  # a run on symbols reports it, if it is not for the numbers
        return None
    form = OutputForm(map_leaves(first, lambda _: None), forms)
    return form if runs.confirm(form, call, on_meta=is_stack) else None


def settle_equal_sizes(runs: Runs, call: CallForm) -> bool:
    """Decide that sizes are equal which the leaf needs so: a mask's and its queries'.

    Those that are equal in the example are tried. True if there were any; the names of the call's
    sizes are out of date then.
    """
    symbols = list(call.hints)
    pairs = [
        (old, new)
        for new, old in itertools.combinations(symbols, 2)
        if call.hints[old] == call.hints[new]
    ]
    if not pairs or len(symbols) > len(_PRIMES) or _runs_with(runs, call, {}):
        return False
    if not _runs_with(runs, call, _joined_symbols(pairs)):
        return False
    choices = (c for n in range(1, len(pairs) + 1) for c in itertools.combinations(pairs, n))
    tried = itertools.islice(map(_joined_symbols, choices), _MOST_TRIES)
    needed = next((each for each in tried if _runs_with(runs, call, each)), None)
    needed = needed or _joined_symbols(pairs)
    env = call.env
    assert env is not None, "there are symbols"
    for old, new in needed.items():
        env.evaluate_expr(sympy.Eq(old, new, evaluate=False), hint=True)
    return True


def _joined_symbols(pairs: Iterable[tuple[Any, Any]]) -> dict[sympy.Symbol, sympy.Symbol]:
    """Each of the symbols that some pairs make equal -> the one that stands for them."""
    known: dict[Any, Any] = {}
    for old, new in pairs:
        one, other = known.get(old, old), known.get(new, new)
        known = {symbol: other if to is one else to for symbol, to in known.items()}
        known[one] = known[old] = other
    return {symbol: to for symbol, to in known.items() if symbol is not to}


def _runs_with(runs: Runs, call: CallForm, equal: Mapping[sympy.Symbol, sympy.Symbol]) -> bool:
    """Whether the leaf runs on large primes for sizes, some of them equal: no constant is one."""
    numbers = {symbol: pair[1] for symbol, pair in zip(call.hints, _PRIMES, strict=False)}
    try:
        runs.forms_on_meta(call, {s: numbers[equal.get(s, s)] for s in numbers})
    except Exception:  # a run on symbols reports it, if it is not for the numbers
        return False
    return True


def _size_pairs(known: dict[tuple[int, ...], sympy.Symbol]) -> dict[tuple[int, ...], Any]:
    """What a size is in the two runs -> the expression it must be."""
    products: dict[tuple[int, ...], Any] = {
        (a[0] * b[0], a[1] * b[1]): known[a] * known[b]
        for a, b in itertools.combinations_with_replacement(known, 2)
    }
    return {**products, **known}


def _joined(first: Any, second: Any, sizes: Mapping[tuple[int, ...], Any]) -> Any:
    """One form for what two runs have yielded in one place."""
    if isinstance(first, TensorForm) and isinstance(second, TensorForm):
        pairs = zip(first.sizes, second.sizes, strict=True)
        joined = tuple(_joined_size(a, b, sizes) for a, b in pairs)
        if replace(first, sizes=joined) != replace(second, sizes=joined):
            raise UnknownFormError
        return replace(first, sizes=joined)
    if first == second:
        return first
    if type(first[1]) is int and type(second[1]) is int:
        return ("size", _joined_size(first[1], second[1], sizes))
    raise UnknownFormError


def _joined_size(first: int, second: int, sizes: Mapping[tuple[int, ...], Any]) -> Any:
    if first == second:
        return first
    if (first, second) not in sizes:
        raise UnknownFormError
    return sizes[first, second]


def _from_symbols(result: Any, call: CallForm) -> OutputForm | None:
    """The form of a result on symbols; None if it is made of more than the sizes of the call."""
    try:
        return OutputForm.of(result, size_over(call.names), from_meta=False)
    except UnknownFormError:
        return None
