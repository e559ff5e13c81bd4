"""What a leaf returns, learnt from runs on numbers and said in terms of the sizes of its inputs.

On symbolic sizes an attention layer takes half a second, on meta tensors some milliseconds. So a
leaf is run on meta with primes for its symbolic sizes, twice, with other primes each time. A size
of the output that is the same in both runs is a constant; one that follows the primes of an input
size (or a product of two) is that size. A run on fake tensors of the example's sizes, which know
their device, confirms it. Whatever does not fit this picture is learnt from a run on symbols, which
also finds which sizes have to be equal.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dispatch.python import no_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from slapo.graph.trace.contract import autocast_state
from slapo.graph.trace.expressions import Size
from slapo.graph.trace.shape_env import CaptureShapeEnv, Decision
from slapo.graph.trace.trees import SYMBOLIC, leaves, map_leaves, parts


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
            forms = tuple(_moved(form, self.device) for form in _forms(result, int))
            self.known[key] = (result, forms)
        return self.known[key]

    def forms_on_fakes(
        self, call: CallForm, numbers: Mapping[Any, int]
    ) -> tuple[Any, tuple[Any, ...]]:
        """The same on fake tensors."""
        with no_python_dispatcher():
            result = self.on_fakes(*call.with_numbers(numbers))
        return result, _forms(result, int)


@contextmanager
def _modes_off() -> Iterator[None]:
    with no_python_dispatcher(), _disable_current_modes():
        yield


def _moved(form: Any, device: torch.device | None) -> Any:
    if isinstance(form, _TensorForm) and form.device.type == "meta" and device is not None:
        return replace(form, device=device)
    return form


#: Two numbers for each size, far apart, so that a size that is cut or filled up to some length, or
#: grows in large steps (strides of convolutions), is not the same in both.
_PRIMES = (
    *((3, 9973), (5, 9967), (7, 9949), (11, 9941)),
    *((13, 9931), (17, 9929), (19, 9923), (23, 9907)),
)
#: Choices of sizes to be taken for equal.
_MOST_TRIES = 64
#: Types of outputs that compare by value.
_PLAIN = (str, int, float, complex, type(None), torch.dtype, torch.device)


class _UnknownFormError(Exception):
    """The outputs do not follow the sizes of the inputs in a simple way."""


@dataclass
class CallForm:
    """A call up to the names of its sizes.

    Parameters
    ----------
    args, kwargs
        The arguments, fake.
    key
        Equal for calls that differ in the names of their sizes only.
    names
        Symbol of this call -> its name by order of appearance.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: Any = None
    names: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    env: CaptureShapeEnv | None = None
    device: torch.device | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallForm:
        """The form of a call with these arguments."""
        call = cls(args, kwargs)
        call.key = (call._key((args, kwargs)), torch.is_grad_enabled(), autocast_state())
        return call

    def _key(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.device = self.device or value.device
            shape = tuple(map(self._size_key, value.shape))
            return (shape, value.dtype, value.device, value.requires_grad)
        if isinstance(value, SYMBOLIC) or type(value) is int:
            return self._size_key(value)
        if isinstance(value, torch.Size):
            return tuple(map(self._size_key, value))
        elements = parts(value)
        if elements is None:
            return repr(value)
        return (type(value), tuple((part.key, self._key(part.value)) for part in elements))

    def _size_key(self, size: Any) -> Any:
        if not isinstance(size, SYMBOLIC):
            return size
        self.env = size.node.shape_env
        expression = size.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.names:
                name = f"size{len(self.names)}"
                self.names[symbol] = sympy.Symbol(name, integer=True, positive=True)
        return expression.xreplace(self.names)

    @property
    def hints(self) -> dict[sympy.Symbol, int]:
        """What each symbol is in the example."""
        known = self.env.hints if self.env is not None else {}
        return {symbol: known[symbol] for symbol in self.names}

    def with_numbers(
        self, numbers: Mapping[Any, int], device: str | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with numbers for symbols, on `device` or where they are."""
        made: dict[int, Any] = {}

        def stand_in(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in made:
                    made[id(value)] = _static(value, numbers, device)
                return made[id(value)]
            if isinstance(value, torch.Size):
                return torch.Size([_number(size, numbers) for size in value])
            if isinstance(value, torch.SymInt):
                return _number(value, numbers)
            if isinstance(value, SYMBOLIC):
                raise _UnknownFormError
            return value

        return map_leaves(self.args, stand_in), map_leaves(self.kwargs, stand_in)


def _static(tensor: torch.Tensor, numbers: Mapping[Any, int], device: str | None) -> torch.Tensor:
    """A tensor like `tensor` with numbers for sizes."""
    shape = [_number(size, numbers) for size in tensor.shape]
    strides = [_number(stride, numbers) for stride in tensor.stride()]
    new = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device or tensor.device)
    if not tensor.requires_grad:
        return new
    new.requires_grad_()
    return new if tensor.is_leaf else new.clone()


def _number(size: Any, numbers: Mapping[Any, int]) -> int:
    return int(size.node.expr.xreplace(numbers)) if isinstance(size, torch.SymInt) else int(size)


@dataclass(frozen=True)
class _TensorForm:
    """What is known of a tensor; `order` lists its dimensions as they lie in memory."""

    sizes: tuple[Any, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool

    def make(self, sizes: list[Any], mode: FakeTensorMode | None) -> torch.Tensor:
        """A fake tensor of this form, or, without a mode, one of its device.

        It is put together by hand: an operation on symbolic sizes takes milliseconds.
        """
        strides: list[Any] = [1] * len(sizes)
        for inner, outer in zip(reversed(self.order), reversed(self.order[:-1]), strict=False):
            strides[outer] = strides[inner] * sizes[inner]
        if mode is None:
            tensor = torch.empty_strided(sizes, strides, dtype=self.dtype, device=self.device)
        else:
            with no_dispatch():
                content = torch.empty_strided(sizes, strides, dtype=self.dtype, device="meta")
                tensor = FakeTensor(mode, content, self.device)
        if self.requires_grad:
            tensor.requires_grad_()
            if not self.is_leaf:
                tensor = tensor.clone()
        return tensor


@dataclass
class OutputForm:
    """The output of a leaf for calls that are alike up to the names of their sizes.

    Attributes
    ----------
    skeleton
        The output of a run, whose leaves are to be replaced.
    forms
        What to replace them by; sizes are expressions over the names of the call's.
    mode_matters
        Whether the output has another form in the other mode, train or eval.
    from_meta
        Whether runs on meta have taught it. A run on symbols settles sizes in one capture alone.
    """

    skeleton: Any
    forms: tuple[Any, ...]
    mode_matters: bool = False
    from_meta: bool = True

    @classmethod
    def learnt(cls, runs: Runs, call: CallForm, is_stack: bool) -> OutputForm | None:
        """The form of what a leaf returns for calls like this.

        Of a whole stack of layers, runs on meta have to do.
        """
        form = _from_numbers(runs, call, is_stack)
        return form or _from_symbols(runs.on_fakes(call.args, call.kwargs), call)

    def is_like(self, runs: Runs, call: CallForm) -> bool:
        """Whether a run on the sizes of the example yields what this says."""
        try:
            run = runs.forms_on_meta if self.from_meta else runs.forms_on_fakes
            result, found = run(call, call.hints)
        except Exception:  # a run on symbols tells, if it matters
            return False
        hints = {call.names[symbol]: number for symbol, number in call.hints.items()}
        expected = tuple(_with_numbers(form, hints) for form in self.forms)
        return _structure(result) == _structure(self.skeleton) and found == expected

    def make(self, call: CallForm) -> Any:
        """The output for a call of the same key."""
        return self.of_sizes({name: symbol for symbol, name in call.names.items()})

    def of_sizes(self, sizes: Mapping[sympy.Symbol, sympy.Basic]) -> Any:
        """The output where these are the sizes of the call."""
        mode = detect_fake_mode()
        env = mode.shape_env if mode is not None else None
        forms = iter(self.forms)

        def size(expression: Any) -> Any:
            if isinstance(expression, int):
                return expression
            found = expression.xreplace(sizes)
            if found.is_number:
                return int(found)
            assert env is not None, "a call without symbols has no symbolic output"
            return env.create_symintnode(env.replace(found), hint=None)

        def replaced(_: Any) -> Any:
            form = next(forms)
            if isinstance(form, _TensorForm):
                return form.make([size(s) for s in form.sizes], mode)
            kind, value = form
            return size(value) if kind == "size" else value

        return map_leaves(self.skeleton, replaced)


@dataclass(frozen=True)
class CapturedForm:
    """The output of a captured module.

    Parameters
    ----------
    form
        Its sizes are expressions over the symbols of the capture.
    sizes
        Which sizes of the arguments these symbols are.
    signature
        Of the module's forward.
    decisions
        What the capture has decided about these symbols.
    """

    form: OutputForm
    sizes: Mapping[sympy.Symbol, Size]
    signature: inspect.Signature
    decisions: tuple[Decision, ...]

    @classmethod
    def of(
        cls,
        result: Any,
        sizes: Mapping[sympy.Symbol, Size],
        signature: inspect.Signature,
        decisions: Iterable[Decision],
    ) -> CapturedForm | None:
        """The form of this result; None if it is made of more than sizes of the arguments."""
        known = set(sizes)
        told = tuple(d for d in decisions if _symbols(d) and _symbols(d) <= known)

        def size(value: Any) -> Any:
            if not isinstance(value, torch.SymInt) or value.node.expr.is_number:
                return int(value)
            if not value.node.expr.free_symbols <= set(sizes):
                raise _UnknownFormError
            return value.node.expr

        try:
            forms = _forms(result, size)
        except _UnknownFormError:
            return None
        return cls(OutputForm(map_leaves(result, lambda _: None), forms), sizes, signature, told)

    @property
    def spelled(self) -> str:
        """Equal for forms of several captures that say the same."""
        names = {symbol: sympy.Symbol(size.text) for symbol, size in self.sizes.items()}
        forms = tuple(
            replace(form, sizes=tuple(_renamed(size, names) for size in form.sizes))
            if isinstance(form, _TensorForm)
            else tuple(_renamed(each, names) for each in form)
            for form in self.form.forms
        )
        return repr((_structure(self.form.skeleton), forms))

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output for a call with these arguments, which is decided upon likewise."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        known = {symbol: size.read(bound.arguments) for symbol, size in self.sizes.items()}
        sizes = {symbol: _expression(number) for symbol, number in known.items()}
        mode = detect_fake_mode()
        if mode is not None and isinstance(mode.shape_env, CaptureShapeEnv):
            mode.shape_env.follow(
                d._replace(expression=d.expression.xreplace(sizes)) for d in self.decisions
            )
        return self.form.of_sizes(sizes)


def _symbols(decision: Decision) -> set[sympy.Basic]:
    return set(getattr(decision.expression, "free_symbols", ()))


def _renamed(size: Any, names: Mapping[sympy.Symbol, sympy.Symbol]) -> Any:
    return size.xreplace(names) if isinstance(size, sympy.Basic) else size


def _expression(size: Any) -> sympy.Basic:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


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
        if _structure(first) != _structure(second):
            return None
        names = [call.names[symbol] for symbol in symbols]
        sizes = _size_pairs(dict(zip(pairs, names, strict=True)))
        forms = tuple(_joined(a, b, sizes) for a, b in zip(ones, others, strict=True))
    except Exception:  # a run on symbols reports it, if it is not for the numbers
        return None
    form = OutputForm(map_leaves(first, lambda _: None), forms, from_meta=is_stack)
    confirmed = form.is_like(runs, call)
    form.from_meta = True
    return form if confirmed else None


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
    return bool(needed)


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
    if isinstance(first, _TensorForm) and isinstance(second, _TensorForm):
        pairs = zip(first.sizes, second.sizes, strict=True)
        joined = tuple(_joined_size(a, b, sizes) for a, b in pairs)
        if _with_sizes(first, joined) != _with_sizes(second, joined):
            raise _UnknownFormError
        return _with_sizes(first, joined)
    if first == second:
        return first
    if type(first[1]) is int and type(second[1]) is int:
        return ("size", _joined_size(first[1], second[1], sizes))
    raise _UnknownFormError


def _joined_size(first: int, second: int, sizes: Mapping[tuple[int, ...], Any]) -> Any:
    if first == second:
        return first
    if (first, second) not in sizes:
        raise _UnknownFormError
    return sizes[first, second]


def _from_symbols(result: Any, call: CallForm) -> OutputForm | None:
    """The form of a result on symbols; None if it is made of more than the sizes of the call."""

    def size(value: Any) -> Any:
        if not isinstance(value, torch.SymInt) or value.node.expr.is_number:
            return int(value)
        if not value.node.expr.free_symbols <= set(call.names):
            raise _UnknownFormError
        return value.node.expr.xreplace(call.names)

    try:
        forms = _forms(result, size)
    except _UnknownFormError:
        return None
    skeleton = map_leaves(result, lambda _: None)
    return OutputForm(skeleton, forms, from_meta=False)


def _forms(result: Any, size: Callable[[Any], Any]) -> tuple[Any, ...]:
    """What is to be known of each leaf of an output."""
    return tuple(_form(leaf, size) for leaf in leaves(result))


def _form(leaf: Any, size: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _TensorForm(
            tuple(map(size, leaf.shape)),
            _memory_order(leaf),
            leaf.dtype,
            leaf.device,
            leaf.requires_grad,
            leaf.is_leaf,
        )
    if isinstance(leaf, torch.SymInt):
        return ("size", size(leaf))
    if not isinstance(leaf, _PLAIN):
        raise _UnknownFormError
    return ("value", leaf)


def _with_sizes(form: _TensorForm, sizes: tuple[Any, ...]) -> _TensorForm:
    rest = (form.order, form.dtype, form.device, form.requires_grad, form.is_leaf)
    return _TensorForm(sizes, *rest)


def _with_numbers(form: Any, numbers: Mapping[sympy.Symbol, int]) -> Any:
    """What a form is, in a call with these numbers for sizes."""

    def number(value: Any) -> Any:
        return value if isinstance(value, int) else int(value.xreplace(numbers))

    if isinstance(form, _TensorForm):
        return _with_sizes(form, tuple(map(number, form.sizes)))
    return ("value", number(form[1])) if form[0] == "size" else form


def _structure(value: Any) -> Any:
    elements = parts(value)
    if elements is None:
        return None  # what leaves are, their forms tell
    return (type(value), tuple((part.key, _structure(part.value)) for part in elements))


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost, for a tensor without gaps or repeats."""
    if tensor.layout != torch.strided:
        raise _UnknownFormError
    strides, sizes = ([_hint(n) for n in ns] for ns in (tensor.stride(), tensor.shape))
    expected = 1
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -sizes[dim], dim))
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != expected:
            raise _UnknownFormError
        expected *= sizes[dim]
    contiguous = tuple(range(tensor.dim()))
    return contiguous if tensor.is_contiguous() else tuple(order)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
