"""Rules of elementwise operations, copies and constants."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from slapo.verify.placement.call import Call, OperationCall, rule_for
from slapo.verify.placement.place import (
    MASKED,
    MASKED_ELSEWHERE,
    OWN,
    SHARD,
    WHOLE,
    Fault,
    Place,
    own_draws,
)
from slapo.verify.placement.view_rules import COPIES, REORDERS, VIEWS, new_dims

#: Linear in the argument at one of these positions, if the others are replicated.
_LINEAR_IN = {
    "mul": (0, 1),
    "div": (0,),
    "true_divide": (0,),
    "neg": (0,),
    "_to_copy": (0,),
    "real": (0,),
}
#: Linear in all of their arguments together.
_ADDITIVE = ("add", "sub", "rsub", "_foreach_add")
#: Elementwise, but not tagged so by torch.
_UNTAGGED: tuple[str, ...] = ("copy", "masked_fill", "_to_copy", "hardswish", "log_sigmoid_forward")
_UNTAGGED += ("leaky_relu_backward", "elu_backward", "hardtanh_backward", "hardsigmoid_backward")
_UNTAGGED += ("hardswish_backward", "softplus_backward", "mish_backward", "softshrink_backward")
_UNTAGGED += (
    "leaky_relu",
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "hardshrink_backward",
    "log_sigmoid_backward",
)
#: Operations that create constant tensors, or fill one.
CONSTANTS = (
    "ones",
    "full",
    "scalar_tensor",
    "new_ones",
    "new_full",
    "ones_like",
    "full_like",
    "fill",
)
ZEROS: tuple[str, ...] = (
    "zeros",
    "new_zeros",
    "zeros_like",
    "zero",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
)
ZEROS += ("new_empty_strided", "_efficientzerotensor")


def is_pointwise(call: OperationCall) -> bool:
    """Return True for an elementwise operation."""
    return torch.Tag.pointwise in call.func.tags or call.name in _UNTAGGED


def of_wholes(call: Call) -> list[Place]:
    """Placements of results of replicated tensors only: replicated, and possibly constant."""
    if call.name in CONSTANTS or call.name in ZEROS:
        zero = call.name in ZEROS or call.get("fill_value", call.get("s")) == 0
        return [Place(uniform=frozenset(range(out.ndim)), is_zero=zero) for out in call.outs]
    pairs = zip(call.tensors, call.places, strict=True)
    known = any(p.uniform or p.runs or p.is_zero or tensor.ndim == 0 for tensor, p in pairs)
    if not known and call.name != "expand":
        return [WHOLE] * len(call.outs)
    zero = _stays_zero(call)
    return [
        Place(uniform=_uniform_dims(call, out), runs=_runs(call, out), is_zero=zero)
        for out in call.outs
    ]


#: Operations that keep a fully constant tensor fully constant.
_MOVES: tuple[str, ...] = ("slice", "select", "expand", "squeeze", "unsqueeze", "split", "repeat")
_MOVES += ("narrow", "as_strided", *VIEWS, *REORDERS, *COPIES)


def is_constant(tensor: Tensor, place: Place) -> bool:
    """Return True if a replicated tensor has one value everywhere."""
    return all(place.is_uniform(tensor, dim) for dim in range(tensor.ndim))


def _uniform_dims(call: Call, out: Tensor) -> frozenset[int]:
    """Dimensions along which all inputs are constant, and so the result is."""
    pairs = [*zip(call.tensors, call.places, strict=True)]
    if call.name in _MOVES and all(is_constant(tensor, place) for tensor, place in pairs):
        return frozenset(range(out.ndim))
    if call.name in VIEWS:
        return _kept_by_view(call)
    if call.name in REORDERS:
        return frozenset(map(new_dims(call).__getitem__, call.places[0].uniform))
    if call.name in ("split", "split_with_sizes", "slice"):
        return call.places[0].uniform
    if call.name == "mm":
        # Equal rows of the left factor give equal rows, equal columns of the right one equal
        # columns.
        rows, columns = (place.uniform for place in call.places)
        return frozenset({0} & rows | {1} & columns)
    if call.name == "sum":
        return _left_by_sum(call)
    if not is_pointwise(call) and call.name not in ("expand", *COPIES):
        return frozenset()
    return frozenset(
        dim
        for dim, size in enumerate(out.shape)
        if size > 1 and all(p.is_uniform(t, dim - (out.ndim - t.ndim)) for t, p in pairs)
    )


def _kept_by_view(call: Call) -> frozenset[int]:
    old, new = call.tensors[0].shape, call.outs[0].shape
    # A dimension survives a view if one has the same size and as many elements behind each index.
    kept = {(old[dim], prod(old[dim + 1 :])) for dim in call.places[0].uniform}
    return frozenset(d for d, size in enumerate(new) if (size, prod(new[d + 1 :])) in kept)


def _runs(call: Call, out: Tensor) -> tuple[tuple[int, int], ...]:
    """Dimensions that are constant within runs: created by views, and kept when moved."""
    old, new, place = call.tensors[0].shape, out.shape, call.places[0]
    if call.name in REORDERS:
        moved = new_dims(call)
        return tuple((moved[dim], run) for dim, run in place.runs)
    if call.name in ("expand", *COPIES):
        return tuple((dim + len(new) - len(old), run) for dim, run in place.runs)
    if call.name not in VIEWS:
        return ()
    # A dimension, or part of one, matches if it has as many elements behind each index.
    kept = [(old[dim], prod(old[dim + 1 :])) for dim in place.uniform]
    kept += [(run, prod(old[dim + 1 :])) for dim, run in place.runs]
    return tuple(
        (dim, run)
        for dim, size in enumerate(new)
        for run, inner in kept
        if run < size and size % run == 0 and prod(new[dim + 1 :]) == inner
    )


def _left_by_sum(call: Call) -> frozenset[int]:
    ndim, gone = call.tensors[0].ndim, call.dims()
    left = [dim for dim in range(ndim) if call.get("keepdim") or dim not in gone]
    return frozenset(left.index(dim) for dim in call.places[0].uniform if dim in left)


def _stays_zero(call: Call) -> bool:
    if call.name in ("neg", *_MOVES):
        return call.places[0].is_zero
    if call.name in ("add", "mul"):
        scalars = [a for a in call.args[:2] if not isinstance(a, Tensor)]
        if scalars and call.name == "add":
            return False
        zeros = [place.is_zero for place in call.places]
        return all(zeros) if call.name == "add" else any(zeros)
    return False


def pointwise(call: Call) -> list[Place]:
    """Slices combine with slices of the same kind, or with tensors constant along them."""
    if call.name == "copy":
        return _copied(call)
    if any(place.is_partial for place in call.places):
        return _linear(call)
    kinds = {place.kind for place in call.places}
    if MASKED in kinds:
        raise call.misfit(MASKED_ELSEWHERE)
    if SHARD not in kinds:
        return _drawn_for(call)
    first_at = next(i for i, place in enumerate(call.places) if place.is_slice)
    first = call.places[first_at]
    size = call.tensors[first_at].shape[first.dim]
    # From the end, as in broadcasting.
    dim = first.dim - call.tensors[first_at].ndim
    for tensor, place in zip(call.tensors, call.places, strict=True):
        here = tensor.ndim + dim
        alike = place.is_slice and place.dim == here and place.is_cut_as(first)
        own = place.kind == OWN and here >= 0 and here not in place.uniform
        alike |= own and tensor.shape[here] == size
        if place.kind == OWN and not alike:  # one random value for a full slice
            raise own_draws()
        if not (alike or (place.is_whole and place.is_uniform(tensor, here))):
            raise call.misfit("its inputs have different placements")
    return [first.along(out.ndim + dim) for out in call.outs]


def _drawn_for(call: Call) -> list[Place]:
    """Per-rank random values combine with each other, and with constants."""
    for tensor, place in zip(call.tensors, call.places, strict=True):
        if place.is_whole and not is_constant(tensor, place):
            raise own_draws()
    return [Place(OWN, uniform=_uniform_dims(call, out)) for out in call.outs]


def _copied(call: Call) -> list[Place]:
    """The source's placement; slices overwritten by a value constant along them stay slices."""
    target, source = call.places[0], call.places[-1]
    if target.is_slice and source.is_whole:
        written = call.tensors[-1]
        if source.is_uniform(written, target.dim - (call.outs[0].ndim - written.ndim)):
            return [target] * len(call.outs)
    if source.is_slice:
        source = source.along(source.dim + call.outs[0].ndim - call.tensors[-1].ndim)
    return [source] * len(call.outs)


def _linear(call: Call) -> list[Place]:
    """Linear operations keep partial sums; others require a reduction first."""
    name, places = call.name, call.places
    # The sum of rounded summands is not the rounded sum; a cast to integers rounds as well.
    rounds = name in ("div", "true_divide") and call.get("rounding_mode") is not None
    if rounds or any(not (out.is_floating_point() or out.is_complex()) for out in call.outs):
        raise call.misfit("it rounds a partial sum that is not reduced")
    partial = next(place for place in places if place.is_partial)
    at = [index for index, place in enumerate(places) if place.is_partial]
    summands = all(place.is_partial or place.is_zero for place in places)
    if name in _ADDITIVE:
        if summands and not any(isinstance(a, (int, float)) and a for a in call.args[:2]):
            return [partial] * len(call.outs)
        raise call.misfit(
            "a partial sum is added to a tensor that is not partial, which would count "
            "once per rank"
        )
    if name == "where":
        chosen = all(place.is_partial or place.is_zero for place in places[1:])
        if chosen and places[0].is_whole and call.tensors[0].dtype is torch.bool:
            return [partial] * len(call.outs)
    elif name == "masked_fill":
        value = call.get("value")
        zero = value == 0 if not isinstance(value, Tensor) else places[-1].is_zero
        if at == [0] and places[1].is_whole and zero:
            return [partial] * len(call.outs)
    elif at[0] in _LINEAR_IN.get(name, ()) and others_whole(places):
        return [partial] * len(call.outs)
    raise call.misfit("it is not linear, and its input is a partial sum that is not reduced")


def others_whole(places: list[Place]) -> bool:
    """Return True if all inputs but one are replicated."""
    return sum(place.is_whole for place in places) == len(places) - 1


# Autograd saves an operation's own output as a detached copy, which the mode sees as `detach`: by
# this rule saved outputs keep their placements for the backward pass.
@rule_for("detach", "alias", "clone", "contiguous", "lift_fresh", "positive", "conj", "_conj")
def _same(call: Call) -> list[Place]:
    return [call.places[0]] * len(call.outs)


@rule_for("ones_like", "full_like", "zeros_like", "empty_like", "new_empty_strided")
def like(call: Call) -> list[Place]:
    """Constants shaped like a slice are slices; those shaped like a summand are replicated."""
    place = call.places[0]
    if place.is_slice:
        return [place] * len(call.outs)
    # A random mask may be drawn into it, and partial sums allow none.
    return [replace(constant, blank_of=place.origin) for constant in of_wholes(call)]


# Constants of another shape than the tensor that provides their type.
rule_for("new_zeros", "new_ones", "new_full", "new_empty")(of_wholes)


#: Operations that draw random numbers.
DRAWS = {"native_dropout", "bernoulli", "rand", "randn", "randint", "uniform", "normal"}
DRAWS |= {"rand_like", "randn_like", "randint_like", "exponential", "random", "multinomial"}
DRAWS |= {"randperm", "dropout"}


@rule_for("bernoulli", "native_dropout", "rand_like", "randn_like", "randint_like")
@rule_for("uniform", "normal", "exponential", "random", "dropout")
def drawn(call: Call) -> list[Place]:
    """Values for a slice are drawn slice by slice; the mode checks the random state."""
    if not call.places[0].is_slice:
        if call.name in ("uniform", "normal", "exponential", "random", "rand_like", "randn_like"):
            return [WHOLE] * len(call.outs)
        raise call.misfit(
            "a random mask on a partial sum differs from a mask on the sum", Fault.DRAWS_FOR_PARTIAL
        )
    return [call.places[0]] * len(call.outs)
