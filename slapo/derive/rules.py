"""Axis rules: the dimensions of its arguments and results that an operation identifies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slapo.derive.axes import (
    Term,
    carve,
    concatenated,
    cut,
    fresh,
    keep_whole,
    size_of,
    unify,
)
from slapo.verify.placement.call import OperationCall, qualified_name
from slapo.verify.placement.einsum_rules import GROUPED, PRODUCTS
from slapo.verify.placement.pointwise import CONSTANTS, ZEROS, is_pointwise
from slapo.verify.placement.reduction_rules import (
    ALONG,
    ATTENTION,
    LAST,
    PIXELS,
    REDUCTIONS,
    mixed_dims,
)
from slapo.verify.placement.view_rules import (
    COPIES,
    REORDERS,
    VIEWS,
    dims_behind,
    indexed,
    new_dims,
)

#: The dimensions of a tensor.
Dims = list[Term]


@dataclass
class AxisCall(OperationCall):
    """One call of an operation, as axis rules take it."""

    #: the dimensions of each tensor argument
    axes: list[Dims]
    #: for each of them, True if it is a parameter or a view of one
    are_parameters: list[bool]
    #: summed dimensions shared by a parameter and the tensor it is multiplied with
    contracted: list[Term] = field(default_factory=list)

    def axis(self, name: str = "dim", default: int = 0, more: int = 0) -> int:
        """Return an argument that is a dimension of the first tensor, as a nonnegative index."""
        return int(self.get(name, default)) % max(1, self.tensors[0].ndim + more)

    def same(self, first: Term, second: Term) -> None:
        """Identify two dimensions."""
        unify(first, second, self.name)

    def keep_whole(self, *terms: Term, why: str = "") -> None:
        """Keep dimensions replicated, as the operation needs all of each."""
        for term in terms:
            keep_whole(term, why or self.name)

    def contract(self, term: Term, *numbers: int) -> None:
        """Sum over a dimension: a partial sum if one of the arguments is a parameter."""
        # A sum over two activations, such as attention scores over head features, is used at once,
        # where no module ends that could reduce it.
        if any(self.are_parameters[number] for number in numbers):
            self.contracted.append(term)
        else:
            self.keep_whole(term, why=f"{self.name} of two activations sums over it")

    def unknown(self, why: str) -> list[Dims]:
        """Keep all arguments and results replicated."""
        for dims in self.axes:
            self.keep_whole(*dims, why=why)
        return [[fresh(size, why) for size in out.shape] for out in self.outs]


AxisRule = Callable[[AxisCall], list[Dims]]

#: Name of an operation -> its rule.
RULES: dict[str, AxisRule] = {}


def register_axis_rule(operation: Any, rule: AxisRule) -> None:
    """Register which axes a custom operation leaves free, for :func:`slapo.draft`.

    Without a rule a draft replicates all dimensions of the operation's arguments and results.

    Parameters
    ----------
    operation
        ``torch.ops.mylib.gelu``, one of its overloads, or its name, ``"mylib::gelu"``.
    rule
        Function that takes an ``AxisCall`` and returns the dimensions of each result, made from
        those in ``call.axes``. ``call.same(a, b)`` identifies two dimensions.
        ``call.keep_whole(a)`` keeps one replicated.

    Examples
    --------
    >>> register_axis_rule("mylib::scale_rows", lambda call: [call.axes[0]])
    >>> "mylib::scale_rows" in RULES
    True
    """
    name = operation if isinstance(operation, str) else qualified_name(operation)
    RULES[name.removeprefix("aten::")] = rule


def apply_rule(call: AxisCall) -> list[Dims]:
    """Return the dimensions of an operation's results."""
    name = call.name
    if name in RULES:
        return RULES[name](call)
    if name.startswith(ATTENTION):
        return _attention(call)
    if is_pointwise(call):
        return [_pointwise(call, out) for out in call.outs]
    if not call.tensors:
        return [[fresh(size, f"values of {name}") for size in out.shape] for out in call.outs]
    return call.unknown(f"no axis rule for {name}")


def _rule(*names: str) -> Callable[[AxisRule], AxisRule]:
    def enter(rule: AxisRule) -> AxisRule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return enter


# --- elementwise --------------------------------------------------------------------------------
def _pointwise(call: AxisCall, out: Tensor) -> Dims:
    """Identify all dimensions that are not broadcast."""
    found: list[Term | None] = [None] * out.ndim
    for tensor, dims in zip(call.tensors, call.axes, strict=True):
        for number, term in enumerate(dims, out.ndim - tensor.ndim):
            if size_of(term) == 1 != out.shape[number]:
                continue
            known = found[number]
            if known is None:
                found[number] = term
            else:
                call.same(known, term)
    return [fresh(n) if t is None else t for t, n in zip(found, out.shape, strict=True)]


#: Operations that make new tensors, some with the size of another.
MAKERS = {*CONSTANTS, *ZEROS} - {"fill", "zero"}


@_rule(*MAKERS)
def _constants(call: AxisCall) -> list[Dims]:
    return [[fresh(size) for size in out.shape] for out in call.outs]


@_rule(*COPIES, "fill", "zero", "dropout", "native_dropout", "bernoulli")
def _copies(call: AxisCall) -> list[Dims]:
    return [list(call.axes[0]) for _ in call.outs]


# --- slice by slice -------------------------------------------------------------------------------
@_rule(*REDUCTIONS, *ALONG, *LAST, "constant_pad_nd", "select", "unbind", "index_select")
@_rule("index_add", "index_copy", "index_fill", "gather", "scatter", "scatter_add")
@_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "_fused_rms_norm_forward")
def _by_slices(call: AxisCall) -> list[Dims]:
    """Keep the dimensions replicated that the operation mixes, and identify the others."""
    mixed, first = mixed_dims(call), call.axes[0]
    why = "positions of an image" if call.name in PIXELS else call.name
    for dims in call.axes:
        if len(dims) != len(first):
            call.keep_whole(*dims, why=why)
            continue
        for number, (a, b) in enumerate(zip(first, dims, strict=True)):
            if number in mixed or size_of(a) != size_of(b):
                call.keep_whole(a, b, why=why)
            else:
                call.same(a, b)
    others = [term for number, term in enumerate(first) if number not in mixed]
    return [_resized(out, first if out.ndim >= len(first) else others, why) for out in call.outs]


def _resized(out: Tensor, dims: Dims, why: str) -> Dims:
    """Return the dimensions of a result, with new ones where sizes differ or that it has more."""
    pairs = itertools.zip_longest(dims, out.shape)
    return [
        term if term is not None and size_of(term) == size else fresh(size, why)
        for term, size in pairs
    ]


# --- views ----------------------------------------------------------------------------------------
@_rule(*VIEWS)
def _view(call: AxisCall) -> list[Dims]:
    (out,), dims = call.outs, call.axes[0]
    if not out.numel():
        return _constants(call)
    found = carve([axis for term in dims for axis in term], out.shape)
    if found is None:
        why = f"view of {tuple(call.tensors[0].shape)} as {tuple(out.shape)}"
        return call.unknown(why)
    return [found]


@_rule("unsqueeze", "squeeze", "expand", *REORDERS)
def _reordered(call: AxisCall) -> list[Dims]:
    dims = [fresh(size) for size in call.outs[0].shape]
    for term, number in zip(call.axes[0], new_dims(call), strict=True):
        if number >= 0:
            dims[number] = term
    return [dims]


@_rule("repeat")
def _repeated(call: AxisCall) -> list[Dims]:
    times = call.get("repeats")
    own = [fresh(1)] * (len(times) - len(call.axes[0])) + call.axes[0]
    return [[(*fresh(n), *term) if n > 1 else term for n, term in zip(times, own, strict=True)]]


# --- blocks ---------------------------------------------------------------------------------------
@_rule("split", "split_with_sizes", "unsafe_split", "chunk")
def _split(call: AxisCall) -> list[Dims]:
    at = call.axis()
    return _cut(call, at, [out.shape[at] for out in call.outs])


def _cut(call: AxisCall, at: int, sizes: list[int]) -> list[Dims]:
    dims = call.axes[0]
    parts = cut(dims[at], sizes)
    if parts is None:
        call.keep_whole(dims[at], why=f"{call.name} into {sizes}")
        parts = [fresh(size, call.name) for size in sizes]
    return [[*dims[:at], part, *dims[at + 1 :]] for part in parts]


@_rule("slice")
def _slice(call: AxisCall) -> list[Dims]:
    (out,), dims, at = call.outs, list(call.axes[0]), call.axis()
    size = size_of(dims[at])
    start, stop, step = slice(call.get("start"), call.get("end"), call.get("step", 1)).indices(size)
    if out.shape[at] == size:
        return [dims]
    if step != 1 or not out.numel():
        call.keep_whole(dims[at], why="a slice with a step")
        dims[at] = fresh(out.shape[at], "a slice with a step")
        return [dims]
    sizes = [each for each in (start, stop - start, size - stop) if each]
    return [_cut(call, at, sizes)[1 if start else 0]]


@_rule("glu")
def _glu(call: AxisCall) -> list[Dims]:
    at = call.axis(default=-1)
    halves = _cut(call, at, [size_of(call.axes[0][at]) // 2] * 2)
    call.same(halves[0][at], halves[1][at])
    return halves[:1]


@_rule("cat")
def _cat(call: AxisCall) -> list[Dims]:
    pairs = zip(call.tensors, call.axes, strict=True)
    parts = [dims for tensor, dims in pairs if tensor.numel()]
    if not parts:
        return _constants(call)
    at = int(call.get("dim", 0)) % call.outs[0].ndim
    for other in parts[1:]:
        for number, (a, b) in enumerate(zip(parts[0], other, strict=True)):
            if number != at:
                call.same(a, b)
    dims = list(parts[0])
    dims[at] = concatenated([part[at] for part in parts])
    return [dims]


@_rule("stack")
def _stack(call: AxisCall) -> list[Dims]:
    for other in call.axes[1:]:
        for a, b in zip(call.axes[0], other, strict=True):
            call.same(a, b)
    dims = list(call.axes[0])
    dims.insert(call.axis(more=1), fresh(len(call.tensors), "stack"))
    return [dims]


# --- products -------------------------------------------------------------------------------------
@_rule(*PRODUCTS)
def _product(call: AxisCall) -> list[Dims]:
    """Identify dimensions of the same letter; an addend may come before the factors."""
    dims = _multiplied(call, PRODUCTS[call.name], len(call.tensors) - 2)
    added = call.axes[0] if len(call.tensors) == 3 else []
    for term, of_result in zip(reversed(added), reversed(dims), strict=False):
        if size_of(term) == size_of(of_result):
            call.same(term, of_result)
    return [dims]


def _multiplied(call: AxisCall, equation: str, left: int) -> Dims:
    """Return the dimensions of the product of two tensors, by the number of the first one."""
    inputs, output = equation.split("->")
    terms: dict[str, Term] = {}
    for number, letters in enumerate(inputs.split(","), left):
        for letter, term in zip(letters, call.axes[number], strict=True):
            call.same(terms.setdefault(letter, term), term)
    for letter, term in terms.items():
        if letter not in output:
            call.contract(term, left, left + 1)
    return [terms[letter] for letter in output]


@_rule("_grouped_mm")
def _grouped(call: AxisCall) -> list[Dims]:
    """Handle grouped products: each expert's tokens follow those of the preceding one (`offs`)."""
    left, (experts, *_) = call.axes[:2]
    call.keep_whole(experts, why="a choice of experts")
    return [_multiplied(call, GROUPED[len(left), 3], 0)]


def _attention(call: AxisCall) -> list[Dims]:
    """Leave batch and heads free; several query heads may share one key head."""
    four = [number for number, tensor in enumerate(call.tensors) if tensor.ndim == 4]
    q, k, v = (call.axes[number] for number in four[:3])
    for other in (k, v):
        call.same(q[0], other[0])
    # Consecutive query heads share a key head, so key heads are the outer factor of the query
    # heads.
    heads = size_of(k[1])
    shared = [q[1]] if size_of(q[1]) == heads else carve(q[1], [heads, size_of(q[1]) // heads])
    if shared is None:
        call.keep_whole(q[1], k[1], v[1])
    else:
        call.same(shared[0], k[1])
        call.same(shared[0], v[1])
    call.same(q[3], k[3])
    call.same(k[2], v[2])
    # Softmax runs over tokens, scores sum over the features of queries and keys; those of values
    # are free.
    call.keep_whole(q[2], q[3], k[2])
    for number in four[3:]:
        for of_mask, term in zip(call.axes[number][:2], q[:2], strict=True):
            if size_of(of_mask) != 1:
                call.same(of_mask, term)
    dims = {4: [q[0], q[1], q[2], v[3]], 3: [q[0], q[1], q[2]]}
    return [dims.get(out.ndim) or [fresh(n) for n in out.shape] for out in call.outs]


# --- lookups --------------------------------------------------------------------------------------
@_rule("embedding")
def _embedding(call: AxisCall) -> list[Dims]:
    table, index = call.axes
    # Vocabulary tables are sharded by rows all the same, with masked tokens; see `vocabulary`.
    call.keep_whole(table[0], why="a lookup of rows")
    return [[*index, table[1]]]


@_rule("index", "_unsafe_index")
def _index(call: AxisCall) -> list[Dims]:
    dims, behind = call.axes[0], dims_behind(call)
    has_mask = any(index.dtype is torch.bool for index in call.tensors[1:])
    why = "a boolean mask" if has_mask else "a choice by index"
    for of_index in call.axes[1:]:
        call.keep_whole(*of_index, why="a boolean mask" if has_mask else "an index")
    call.keep_whole(*(term for dim, term in enumerate(dims) if dim not in behind), why=why)
    pairs = zip(behind, call.outs[0].shape, strict=True)
    return [[dims[dim] if dim >= 0 else fresh(size, why) for dim, size in pairs]]


@_rule("index_put", "_index_put_impl")
def _index_put(call: AxisCall) -> list[Dims]:
    dims, values = call.axes[0], call.axes[-1]
    at, _ = indexed(call)
    call.keep_whole(*(dims[number] for number in at))
    kept = [term for number, term in enumerate(dims) if number not in at]
    for term, value in zip(reversed(kept), reversed(values), strict=False):
        if size_of(value) == size_of(term):
            call.same(term, value)
    call.keep_whole(*values[: max(0, len(values) - len(kept))])
    return [list(dims)]


# --- norms over the batch, convolutions -----------------------------------------------------------
@_rule("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
@_rule("_batch_norm_with_update", "_native_batch_norm_legit_no_training")
def _batch_norm(call: AxisCall) -> list[Dims]:
    dims = call.axes[0]
    call.keep_whole(dims[0], *dims[2:])
    for weights in call.axes[1:]:
        if weights and size_of(weights[0]):
            call.same(weights[0], dims[1])
    rest = [[dims[1]] if out.ndim == 1 and out.numel() else _blank(out) for out in call.outs[1:]]
    return [dims, *rest]


def _blank(tensor: Tensor) -> Dims:
    return [fresh(size) for size in tensor.shape]


@_rule("native_group_norm")
def _group_norm(call: AxisCall) -> list[Dims]:
    dims, groups = call.axes[0], call.get("group")
    call.keep_whole(*dims[2:])
    parts = carve(dims[1], [groups, size_of(dims[1]) // groups])
    call.keep_whole(parts[1] if parts else dims[1])
    for weights in call.axes[1:]:
        call.same(weights[0], dims[1])
    statistics = [dims[0], parts[0] if parts else fresh(groups, call.name)]
    return [dims, statistics, statistics]


@_rule("convolution", "_convolution")
def _convolution(call: AxisCall) -> list[Dims]:
    (x, weight), groups = call.axes[:2], call.get("groups")
    call.keep_whole(*x[2:], *weight[2:], why="positions of a convolution")
    out, inner = (weight[1], weight[0]) if call.get("transposed") else (weight[0], weight[1])
    if groups == 1:
        call.same(x[1], inner)
        call.contract(inner, 1)
    elif call.get("transposed"):
        return call.unknown("a transposed convolution of groups")
    # Depthwise: each channel is a group of its own.
    elif size_of(x[1]) == groups == size_of(out):
        call.same(x[1], out)
    else:
        a, b = (carve(term, [groups, size_of(term) // groups]) for term in (x[1], out))
        if a and b:
            call.same(a[0], b[0])
            call.same(a[1], inner)
            call.keep_whole(a[1], b[1], why="a convolution of groups")
        else:
            call.keep_whole(x[1], inner, out, why="a convolution of groups")
    for bias in call.axes[2:]:
        call.same(bias[0], out)
    (result,) = call.outs
    pixels = [fresh(size, "positions of an image") for size in result.shape[2:]]
    return [[x[0], out, *pixels]]
