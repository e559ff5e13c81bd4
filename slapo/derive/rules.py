"""Axis rules: the dimensions of its arguments and results that an operation identifies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slapo.derive.axes import (
    Term,
    carve,
    concatenated,
    cut,
    factors,
    fresh,
    keep_whole,
    size_of,
    unify,
)
from slapo.verify.placement.call import OperationCall, qualified_name
from slapo.verify.placement.pointwise import is_pointwise
from slapo.verify.placement.reduction_rules import ATTENTION, OF_MATRICES

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
    if any(part in name for part in ("pool1d", "pool2d", "pool3d", "upsample_", "pad1d", "pad2d")):
        return _spatial(call)
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
MAKERS = {"zeros", "ones", "full", "empty", "empty_strided", "scalar_tensor"}
MAKERS |= {"zeros_like", "ones_like", "full_like", "empty_like"}
MAKERS |= {"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"}


@_rule(*MAKERS)
def _constants(call: AxisCall) -> list[Dims]:
    return [[fresh(size) for size in out.shape] for out in call.outs]


@_rule("clone", "detach", "alias", "_to_copy", "contiguous", "lift_fresh", "fill", "zero")
@_rule("dropout", "native_dropout", "bernoulli")
def _copies(call: AxisCall) -> list[Dims]:
    return [list(call.axes[0]) for _ in call.outs]


@_rule("arange", "rand", "randn", "randint", "randperm", "eye")
def _values(call: AxisCall) -> list[Dims]:
    return [[fresh(size, f"values of {call.name}") for size in out.shape] for out in call.outs]


# --- along one dimension --------------------------------------------------------------------------
@_rule("_softmax", "_safe_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort")
@_rule("topk", "flip", "roll")
def _along(call: AxisCall) -> list[Dims]:
    given = call.get("dim", call.get("dims", -1))
    every = range(len(call.axes[0]))  # rolled without a dimension
    at = {each % len(every) for each in ([given] if isinstance(given, int) else given or every)}
    call.keep_whole(*(call.axes[0][each] for each in at))
    return [_resized(call, out, call.axes[0]) for out in call.outs]


def _resized(call: AxisCall, out: Tensor, dims: Dims) -> Dims:
    """Return the dimensions of a result, with new ones where the size differs."""
    pairs = zip(dims, out.shape, strict=True)
    return [term if size_of(term) == size else fresh(size, call.name) for term, size in pairs]


@_rule("tril", "triu", *OF_MATRICES)
def _matrices(call: AxisCall) -> list[Dims]:
    """Keep the matrix dimensions replicated, and identify the batch dimensions."""
    for dims in call.axes:
        call.keep_whole(*dims[-2:])
        for a, b in zip(call.axes[0][:-2], dims[:-2], strict=True):
            call.same(a, b)
    outer = call.axes[0][:-2]
    return [[*outer, *(fresh(n, call.name) for n in o.shape[len(outer) :])] for o in call.outs]


@_rule("sum", "mean", "amax", "amin", "max", "min", "any", "all", "prod", "argmax", "argmin")
@_rule("logsumexp", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm")
@_rule("nansum", "median")
def _reduction(call: AxisCall) -> list[Dims]:
    if len(call.tensors) == 2:  # elementwise max of two tensors
        return [_pointwise(call, call.outs[0])]
    dims, at = call.axes[0], call.dims()
    call.keep_whole(*(dims[each] for each in at))
    kept = [t if n not in at else fresh(1) for n, t in enumerate(dims)]
    if not call.get("keepdim"):
        kept = [term for number, term in enumerate(kept) if number not in at]
    return [list(kept) for _ in call.outs]


@_rule("select", "unbind")
def _selected(call: AxisCall) -> list[Dims]:
    dims = list(call.axes[0])
    call.keep_whole(dims.pop(call.axis()))
    return [list(dims) for _ in call.outs]


@_rule("constant_pad_nd", "unfold")
def _padded(call: AxisCall) -> list[Dims]:
    dims, (out,) = call.axes[0], call.outs
    pairs = zip(dims, out.shape, strict=False)
    call.keep_whole(*(term for term, size in pairs if size_of(term) != size))
    more = [fresh(size, call.name) for size in out.shape[len(dims) :]]
    kept = zip(dims, out.shape, strict=False)
    return [[*(t if size_of(t) == n else fresh(n, call.name) for t, n in kept), *more]]


# --- views ----------------------------------------------------------------------------------------
@_rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def _view(call: AxisCall) -> list[Dims]:
    (out,), dims = call.outs, call.axes[0]
    if not out.numel():
        return _constants(call)
    found = carve([axis for term in dims for axis in term], out.shape)
    if found is None:
        why = f"view of {tuple(call.tensors[0].shape)} as {tuple(out.shape)}"
        return call.unknown(why)
    return [found]


@_rule("transpose", "t", "permute", "movedim")
def _permuted(call: AxisCall) -> list[Dims]:
    dims = list(call.axes[0])
    if call.name == "permute":
        return [[dims[each] for each in call.get("dims")]]
    if call.name == "t":
        return [dims[::-1]]
    a, b = call.axis("dim0"), call.axis("dim1")
    dims[a], dims[b] = dims[b], dims[a]
    return [dims]


@_rule("unsqueeze")
def _unsqueezed(call: AxisCall) -> list[Dims]:
    dims = list(call.axes[0])
    dims.insert(call.axis(more=1), fresh(1))
    return [dims]


@_rule("squeeze")
def _squeezed(call: AxisCall) -> list[Dims]:
    dims, given = call.axes[0], call.get("dim")
    ndim = max(1, len(dims))
    at = range(ndim) if given is None else [given] if isinstance(given, int) else given
    gone = {each % ndim for each in at}
    return [[t for n, t in enumerate(dims) if not (n in gone and size_of(t) == 1)]]


@_rule("view_as_complex", "view_as_real")
def _complex(call: AxisCall) -> list[Dims]:
    """Handle a last dimension of two, the real and imaginary parts."""
    dims = call.axes[0]
    if call.name == "view_as_real":
        return [[*dims, fresh(2, call.name)]]
    call.keep_whole(dims[-1])
    return [dims[:-1]]


@_rule("expand")
def _expanded(call: AxisCall) -> list[Dims]:
    (out,) = call.outs
    own = [fresh(1)] * (out.ndim - len(call.axes[0])) + call.axes[0]
    pairs = zip(own, out.shape, strict=True)
    return [[term if size_of(term) == size else fresh(size) for term, size in pairs]]


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
def _product(left: str, right: str, result: str) -> AxisRule:
    """Return the rule of a product, given by dimension letters; an addend may come first."""

    def rule(call: AxisCall) -> list[Dims]:
        last = len(call.tensors)
        terms: dict[str, Term] = {}
        for letters, dims in ((left, call.axes[last - 2]), (right, call.axes[last - 1])):
            for letter, term in zip(letters, dims, strict=True):
                call.same(terms.setdefault(letter, term), term)
        for letter in left:
            if letter not in result:
                call.contract(terms[letter], last - 2, last - 1)
        dims = [terms[letter] for letter in result]
        added = call.axes[0] if last == 3 else []
        for term, of_result in zip(reversed(added), reversed(dims), strict=False):
            if size_of(term) == size_of(of_result):
                call.same(term, of_result)
        return [dims]

    return rule


RULES |= dict.fromkeys(("mm", "addmm"), _product("mk", "kn", "mn"))
RULES |= dict.fromkeys(("bmm", "baddbmm"), _product("bmk", "bkn", "bmn"))
RULES |= dict.fromkeys(("mv", "addmv"), _product("mk", "k", "m"))
RULES |= {"dot": _product("k", "k", ""), "outer": _product("m", "n", "mn")}


@_rule("_grouped_mm")
def _grouped(call: AxisCall) -> list[Dims]:
    """Handle grouped products: each expert's tokens follow those of the preceding one (`offs`)."""
    left, right = call.axes[:2]
    rows, experts, (k, n) = left[:-1], right[0], right[1:]
    if len(left) == len(right) == 3:
        call.same(left[0], experts)
    call.same(left[-1], k)
    call.keep_whole(experts, why="a choice of experts")
    call.contract(k, 0, 1)
    return [[*rows, n]]


def _attention(call: AxisCall) -> list[Dims]:
    """Leave batch and heads free; several query heads may share one key head."""
    four = [number for number, tensor in enumerate(call.tensors) if tensor.ndim == 4]
    q, k, v = (call.axes[number] for number in four[:3])
    for other in (k, v):
        call.same(q[0], other[0])
    heads = size_of(k[1])
    shared = [q[1]] if size_of(q[1]) == heads else carve(q[1], [heads, size_of(q[1]) // heads])
    if shared is None:
        call.keep_whole(q[1], k[1], v[1])
    else:
        call.same(shared[0], k[1])
        call.same(shared[0], v[1])
    call.same(q[3], k[3])
    call.same(k[2], v[2])
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
    call.keep_whole(table[0], why="a lookup of rows")
    return [[*index, table[1]]]


@_rule("index", "_unsafe_index")
def _index(call: AxisCall) -> list[Dims]:
    dims, given = call.axes[0], call.get("indices")
    chosen = {n: index for n, index in enumerate(given) if index is not None}
    masks = [index for index in chosen.values() if index.dtype is torch.bool]
    if masks:
        if len(chosen) > 1 or 0 not in chosen:
            return call.unknown("a boolean mask")
        call.keep_whole(*dims[: masks[0].ndim], *call.axes[1], why="a boolean mask")
        rows = fresh(call.outs[0].shape[0], "a boolean mask")
        return [[rows, *dims[masks[0].ndim :]]]
    for of_index in call.axes[1:]:
        call.keep_whole(*of_index, why="an index")
    call.keep_whole(*(dims[number] for number in chosen), why="a choice by index")
    shape = torch.broadcast_shapes(*(index.shape for index in chosen.values()))
    found = [fresh(size, "a choice by index") for size in shape]
    kept = [term for number, term in enumerate(dims) if number not in chosen]
    first, last = min(chosen), max(chosen)
    at = first if last - first + 1 == len(chosen) else 0
    return [[*kept[:at], *found, *kept[at:]]]


@_rule("index_put", "_index_put_impl")
def _index_put(call: AxisCall) -> list[Dims]:
    dims, values = call.axes[0], call.axes[-1]
    at: set[int] = set()
    for number, index in enumerate(call.get("indices")):
        if index is not None:
            at |= set(range(number, number + (index.ndim if index.dtype is torch.bool else 1)))
    call.keep_whole(*(dims[number] for number in at))
    kept = [term for number, term in enumerate(dims) if number not in at]
    for term, value in zip(reversed(kept), reversed(values), strict=False):
        if size_of(value) == size_of(term):
            call.same(term, value)
    call.keep_whole(*values[: max(0, len(values) - len(kept))])
    return [list(dims)]


@_rule("index_select", "index_add", "index_copy", "index_fill")
def _by_rows(call: AxisCall) -> list[Dims]:
    dims, at = list(call.axes[0]), call.axis()
    call.keep_whole(dims[at])
    source = call.axes[-1]
    if call.name in ("index_add", "index_copy"):
        call.keep_whole(source[at])
        for number, (a, b) in enumerate(zip(dims, source, strict=True)):
            if number != at:
                call.same(a, b)
    return [_resized(call, call.outs[0], dims)]


@_rule("gather", "scatter", "scatter_add")
def _gather(call: AxisCall) -> list[Dims]:
    at, dims = call.axis(), call.axes[0]
    result = dims if call.name != "gather" else call.axes[1]
    for other in call.axes[1:]:
        for number, (a, b) in enumerate(zip(dims, other, strict=False)):
            if number == at or size_of(a) != size_of(b):
                call.keep_whole(a, b)
            else:
                call.same(a, b)
    return [list(result)]


# --- norms and convolutions -----------------------------------------------------------------------
@_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "_fused_rms_norm_forward")
def _norm(call: AxisCall) -> list[Dims]:
    dims, count = call.axes[0], len(call.get("normalized_shape"))
    outer, inner = dims[: len(dims) - count], dims[len(dims) - count :]
    call.keep_whole(*inner)
    for weights in call.axes[1:]:
        for a, b in zip(weights, inner, strict=True):
            call.same(a, b)
    statistics = [*outer, *[fresh(1)] * count]
    return [dims] + [statistics[: out.ndim] for out in call.outs[1:]]


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
    return [[x[0], out, *_spatial_dims(result, 2)]]


def _spatial(call: AxisCall) -> list[Dims]:
    """Keep the last dimensions replicated, as many as the name states (pooling and similar)."""
    dims = call.axes[0]
    first = len(dims) - int(next(letter for letter in call.name if letter.isdigit()))
    call.keep_whole(*dims[first:], why="positions of an image")
    return [[*dims[:first], *_spatial_dims(out, first)] for out in call.outs]


def _spatial_dims(out: Tensor, first: int) -> Dims:
    return [fresh(size, "positions of an image") for size in out.shape[first:]]


def in_place(first: Iterable[Term], second: Iterable[Term], name: str) -> None:
    """Unify the dimensions of a tensor with those of an in-place result."""
    for a, b in zip(first, second, strict=True):
        if factors(a) != factors(b):
            unify(a, b, name)
