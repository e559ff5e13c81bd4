"""Outputs of leaf modules, learnt from runs on concrete sizes.

On symbolic sizes an attention layer takes half a second, on numbers a few milliseconds. So a leaf
is run on fake tensors whose symbolic sizes are replaced by primes, twice, with other primes each
time. A size of the output that is the same in both runs is a constant; one that follows the primes
of an input size (or a product of two) is that size. A run on the sizes of the example confirms it.
Whatever does not fit this picture, an error included, is left to a run on symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor

from slapo.graph.trace.recorder.call_sizes import (
    MAX_SYMBOLS,
    CallSizes,
    Slots,
    find_slots,
    number_of,
)
from slapo.graph.trace.trees import SYMBOLIC, kind_of, leaves, map_leaves, parts

#: Types of outputs that compare by value.
_CONSTANTS = (str, int, float, bool, complex, type(None), torch.dtype, torch.device)

#: What a size is in the two runs -> the sizes of the call it is the product of.
_Factors = dict[tuple[int, ...], tuple[int, ...]]


class _NoTemplateError(Exception):
    """The outputs do not follow the sizes of the inputs in a simple way."""


@dataclass(frozen=True)
class _Dim:
    """A size of an output: a constant, or the product of sizes of the call."""

    constant: int = 1
    factors: tuple[int, ...] = ()

    def size(self, known: Sequence[Any]) -> Any:
        """In a call with these sizes."""
        if not self.factors:
            return self.constant
        return reduce(operator.mul, (known[index] for index in self.factors))


@dataclass(frozen=True)
class _TensorForm:
    """What is known of a tensor; `order` lists its dimensions as they lie in memory."""

    sizes: tuple[_Dim, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool

    def make(self, known: list[torch.SymInt]) -> torch.Tensor:
        """A fake tensor of this form in a call with these sizes."""
        sizes = [dim.size(known) for dim in self.sizes]
        in_memory = [sizes[dim] for dim in self.order]
        tensor = torch.empty(in_memory, dtype=self.dtype, device=self.device)
        if self.requires_grad:
            tensor.requires_grad_()
            tensor = tensor if self.is_leaf else tensor.clone()
        if self.order == tuple(range(len(sizes))):
            return tensor
        return tensor.permute(*(self.order.index(dim) for dim in range(len(sizes))))


@dataclass(frozen=True)
class OutputTemplate:
    """The output of a leaf for calls that are alike up to the names of their sizes.

    Attributes
    ----------
    skeleton
        The output of one of the runs, whose leaves are to be replaced.
    forms
        What to replace them by.
    slots
        Which sizes had to be equal.
    mode_matters
        Whether the output has another form in the other mode, train or eval.
    """

    skeleton: Any
    forms: tuple[Any, ...]
    slots: Slots
    mode_matters: bool = False

    def fits(self, sizes: CallSizes) -> bool:
        """Whether the sizes of the example are equal where they have to be."""
        return sizes.fits(self.slots)

    def make(self, sizes: CallSizes) -> Any:
        """The output for a call with these sizes."""
        sizes.assume(self.slots)
        known = list(sizes.known.values())
        forms = iter(self.forms)

        def replaced(_: Any) -> Any:
            form = next(forms)
            if isinstance(form, _TensorForm):
                return form.make(known)
            return form.size(known) if isinstance(form, _Dim) else form

        return map_leaves(self.skeleton, replaced)


def output_template(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sizes: CallSizes
) -> OutputTemplate | None:
    """Learn the form of ``run(*args, **kwargs)``; None if it takes a run on symbols."""
    hints = tuple(map(sizes.hint, sizes.symbols))
    if not 0 < len(hints) <= MAX_SYMBOLS:
        return None
    results: dict[Slots, Any] = {}

    def works(slots: Slots, second: Collection[int]) -> bool:
        try:
            result = _run(run, args, kwargs, sizes.numbers(slots, second))
        except Exception:  # a run on symbols reports it, if it is not for the sizes
            return False
        if not second:
            results[slots] = result
        return True

    slots = find_slots(hints, works)
    if slots is None:
        return None
    try:
        other = _run(run, args, kwargs, sizes.numbers(slots, range(len(slots))))
        forms = _forms(results[slots], other, sizes.by_numbers(slots))
        template = OutputTemplate(results[slots], forms, slots)
        # Bounds, as in x[:, :8], may lie between the example and the numbers.
        return template if is_like_example(template, run, args, kwargs, sizes) else None
    except Exception:
        return None


def is_like_example(
    template: OutputTemplate,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: CallSizes,
) -> bool:
    """Whether a run on the sizes of the example yields what `template` says."""
    try:
        example = sizes.example()
        result = _run(run, args, kwargs, example)
        known = [number_of(size, example) for size in sizes.known.values()]
        forms = _forms(result, result, {})
    except Exception:
        return False
    if _structure(result) != _structure(template.skeleton):
        return False
    pairs = zip(forms, template.forms, strict=True)
    return all(found == _with_numbers(form, known) for found, form in pairs)


def _with_numbers(form: Any, known: list[int]) -> Any:
    """What a form is, in a call with these numbers for sizes."""
    if isinstance(form, _Dim):
        return form.size(known)
    if isinstance(form, _TensorForm):
        return replace(form, sizes=tuple(_Dim(dim.size(known)) for dim in form.sizes))
    return form


def _run(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: dict[sympy.Symbol, sympy.Integer],
) -> Any:
    made: dict[int, torch.Tensor] = {}

    def stand_in(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            if id(value) not in made:
                made[id(value)] = _static(value, numbers)
            return made[id(value)]
        if isinstance(value, torch.Size):
            return torch.Size([number_of(size, numbers) for size in value])
        if isinstance(value, torch.SymInt):
            return number_of(value, numbers)
        if isinstance(value, SYMBOLIC):
            raise _NoTemplateError
        return value

    with no_python_dispatcher():
        return run(*map_leaves(args, stand_in), **map_leaves(kwargs, stand_in))


def _static(tensor: FakeTensor, numbers: dict[sympy.Symbol, sympy.Integer]) -> torch.Tensor:
    """A fake tensor like `tensor` with numbers for sizes."""
    shape = [number_of(size, numbers) for size in tensor.shape]
    strides = [number_of(stride, numbers) for stride in tensor.stride()]
    new = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    if not tensor.requires_grad:
        return new
    new.requires_grad_()
    return new if tensor.is_leaf else new.clone()


def _forms(first: Any, second: Any, factors: _Factors) -> tuple[Any, ...]:
    if _structure(first) != _structure(second):
        raise _NoTemplateError
    pairs = zip(leaves(first), leaves(second), strict=True)
    return tuple(_form(a, b, factors) for a, b in pairs)


def _structure(value: Any) -> Any:
    elements = parts(value)
    if elements is None:
        return kind_of(value)
    return (type(value), tuple((part.key, _structure(part.value)) for part in elements))


def _form(first: Any, second: Any, factors: _Factors) -> Any:
    if isinstance(first, torch.Tensor):
        return _tensor_form(first, second, factors)
    if type(first) is not type(second) or not isinstance(first, _CONSTANTS):
        raise _NoTemplateError
    if first == second:
        return first
    if type(first) is not int:
        raise _NoTemplateError
    return _dim(first, second, factors)


def _dim(first: int, second: int, factors: _Factors) -> _Dim:
    if first == second:
        return _Dim(first)
    if (first, second) not in factors:
        raise _NoTemplateError
    return _Dim(1, factors[first, second])


def _tensor_form(first: torch.Tensor, second: torch.Tensor, factors: _Factors) -> _TensorForm:
    alike = all(getattr(first, k) == getattr(second, k) for k in ("ndim", "dtype", "device"))
    order = _memory_order(first)
    if not alike or order is None or order != _memory_order(second):
        raise _NoTemplateError
    sizes = zip(first.shape, second.shape, strict=True)
    return _TensorForm(
        tuple(_dim(a, b, factors) for a, b in sizes),
        order,
        first.dtype,
        first.device,
        first.requires_grad,
        first.is_leaf,
    )


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions from the outermost to the innermost; None if it has gaps or repeats itself."""
    if type(tensor) is not FakeTensor or tensor.layout != torch.strided:
        return None
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tuple(order) if tensor.permute(*order).is_contiguous() else None
