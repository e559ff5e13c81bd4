"""What a leaf returns, said in terms of the sizes of its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from slapo.graph.trace.contract import autocast_state
from slapo.graph.trace.expressions import Size
from slapo.graph.trace.shape_env import CaptureShapeEnv, Decision
from slapo.graph.trace.trees import SYMBOLIC, hint, leaves, map_leaves, parts

#: Types of outputs that compare by value.
_PLAIN = (str, int, float, complex, type(None), torch.dtype, torch.device)


class UnknownFormError(Exception):
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
                raise UnknownFormError
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
class TensorForm:
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
    def of(cls, result: Any, size: Callable[[Any], Any], from_meta: bool) -> OutputForm:
        """The form of a result whose sizes are told by `size`."""
        return cls(map_leaves(result, lambda _: None), forms_of(result, size), from_meta=from_meta)

    def at(self, numbers: Mapping[sympy.Symbol, int]) -> tuple[Any, ...]:
        """What the output is made of where these are the sizes of the call."""
        return tuple(_with_numbers(form, numbers) for form in self.forms)

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
            if isinstance(form, TensorForm):
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
        try:
            form = OutputForm.of(result, size_over({s: s for s in sizes}), from_meta=False)
        except UnknownFormError:
            return None
        known = set(sizes)
        told = tuple(d for d in decisions if _symbols(d) and _symbols(d) <= known)
        return cls(form, sizes, signature, told)

    @property
    def spelled(self) -> str:
        """Equal for forms of several captures that say the same."""
        names = {symbol: sympy.Symbol(size.text) for symbol, size in self.sizes.items()}
        forms = tuple(
            replace(form, sizes=tuple(_renamed(size, names) for size in form.sizes))
            if isinstance(form, TensorForm)
            else tuple(_renamed(each, names) for each in form)
            for form in self.form.forms
        )
        return repr((structure(self.form.skeleton), forms))

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


def size_over(names: Mapping[sympy.Symbol, sympy.Symbol]) -> Callable[[Any], Any]:
    """Tells sizes that are made of these symbols alone, in terms of what they are mapped to."""

    def size(value: Any) -> Any:
        if not isinstance(value, torch.SymInt) or value.node.expr.is_number:
            return int(value)
        if not value.node.expr.free_symbols <= set(names):
            raise UnknownFormError
        return value.node.expr.xreplace(names)

    return size


def _symbols(decision: Decision) -> set[sympy.Basic]:
    return set(getattr(decision.expression, "free_symbols", ()))


def _renamed(size: Any, names: Mapping[sympy.Symbol, sympy.Symbol]) -> Any:
    return size.xreplace(names) if isinstance(size, sympy.Basic) else size


def _expression(size: Any) -> sympy.Basic:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def forms_of(result: Any, size: Callable[[Any], Any]) -> tuple[Any, ...]:
    """What is to be known of each leaf of an output."""
    return tuple(_form(leaf, size) for leaf in leaves(result))


def _form(leaf: Any, size: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorForm(
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
        raise UnknownFormError
    return ("value", leaf)


def _with_numbers(form: Any, numbers: Mapping[sympy.Symbol, int]) -> Any:
    """What a form is, in a call with these numbers for sizes."""

    def number(value: Any) -> Any:
        return value if isinstance(value, int) else int(value.xreplace(numbers))

    if isinstance(form, TensorForm):
        return replace(form, sizes=tuple(map(number, form.sizes)))
    return ("value", number(form[1])) if form[0] == "size" else form


def structure(value: Any) -> Any:
    """Types and keys of the containers in an output."""
    elements = parts(value)
    if elements is None:
        return None  # what leaves are, their forms tell
    return (type(value), tuple((part.key, structure(part.value)) for part in elements))


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost, for a tensor without gaps or repeats."""
    if tensor.layout != torch.strided:
        raise UnknownFormError
    strides, sizes = ([hint(n) for n in ns] for ns in (tensor.stride(), tensor.shape))
    expected = 1
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -sizes[dim], dim))
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != expected:
            raise UnknownFormError
        expected *= sizes[dim]
    contiguous = tuple(range(tensor.dim()))
    return contiguous if tensor.is_contiguous() else tuple(order)
