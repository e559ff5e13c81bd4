"""Rules of products: matrix products and convolutions, as equations of dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from slapo.verify.placement.call import Call, rule_for
from slapo.verify.placement.place import PARTIAL_SUM, WHOLE, Fault, Place

#: The dimensions of both factors as letters, as in ``torch.einsum``.
PRODUCTS = {
    "mm": "mk,kn->mn",
    "addmm": "mk,kn->mn",
    "bmm": "bmk,bkn->bmn",
    "baddbmm": "bmk,bkn->bmn",
    "mv": "mk,k->m",
    "addmv": "mk,k->m",
    "dot": "k,k->",
    "outer": "m,n->mn",
}


@rule_for(*PRODUCTS)
def product(call: Call) -> list[Place]:
    """Slices of a contracted dimension give partial sums, others give slices of the result."""
    factors = call.places[-2:]
    result = multiplied(call, PRODUCTS[call.name], factors[0], factors[1])
    if len(call.places) == 3:
        _check_added(call, result)
    return [result]


def multiplied(call: Call, equation: str, left: Place, right: Place) -> Place:
    """The placement of the product of two tensors."""
    if left.is_whole and right.is_whole:
        return WHOLE
    inputs, output = equation.split("->")
    if left.is_partial or right.is_partial:
        # A product of two sums also has the terms between different ranks, which no rank computes.
        if {left.kind, right.kind} == {PARTIAL_SUM.kind, WHOLE.kind}:
            return left if left.is_partial else right
        raise call.misfit("a product with a partial sum is right only for whole factors")
    names = inputs.split(",")
    slices = [
        (each[place.dim], place)
        for each, place in zip(names, (left, right), strict=True)
        if place.is_slice
    ]
    if any(place.kind == "masked" for place in (left, right)) or not slices:
        raise call.misfit("masked tokens and per-rank random numbers cannot be factors")
    letter, first = slices[0]
    for each, place in zip(names, (left, right), strict=True):
        axis = each.find(letter)
        in_runs = {run for dim, run in place.runs if dim == axis} == {*first.blocks}
        constant = place.is_whole and (axis in place.uniform or in_runs)
        if not (constant or _lies_along(letter, each, place)):
            raise call.misfit("a slice meets a dimension that is whole, or different slices")
    if not all(other == letter and place.is_cut_as(first) for other, place in slices):
        raise call.misfit("the two are sliced in different blocks or shares", Fault.BLOCKS)
    return PARTIAL_SUM if letter not in output else first.anew(output.index(letter))


def _lies_along(letter: str, names: str, place: Place) -> bool:
    """Return True if a factor is sharded along a letter that it has, or replicated otherwise."""
    return names[place.dim] == letter if place.is_slice else letter not in names


def _check_added(call: Call, result: Place) -> None:
    bias, place, ndim = call.tensors[0], call.places[0], call.outs[0].ndim
    # Zeros add nothing, however often they count.
    if place.is_zero:
        return
    if result.is_partial:
        if not place.is_partial:
            raise call.misfit("it adds a bias to a partial sum: that would count once per rank")
        return
    axis = result.dim - ndim + bias.ndim
    wanted = result.along(axis) if axis >= 0 and bias.shape[axis] > 1 else WHOLE
    if not place.same(wanted) and axis not in place.uniform:
        raise call.misfit("the bias that it adds and the product have different placements")


#: Numbers of dimensions of both factors -> product of row groups, each with its own matrix.
GROUPED = {
    (2, 3): "tk,ekn->tn",
    (2, 2): "kt,tn->ekn",
    (3, 2): "emk,kt->mt",
    (3, 3): "emk,ekn->emn",
}


@rule_for("_grouped_mm")
def grouped_product(call: Call) -> list[Place]:
    """Products of row groups, each with its own matrix: experts and their tokens."""
    left, right = call.tensors[:2]
    if not all(place.is_whole for place in call.places[2:]):
        raise call.misfit("the offsets of the groups must be whole")
    return [multiplied(call, GROUPED[left.ndim, right.ndim], *call.places[:2])]


@rule_for("convolution", "_convolution")
def convolution(call: Call) -> list[Place]:
    """Placements of a convolution sharded by batch, output channels, input channels or groups."""
    x, weight = call.places[:2]
    bias = call.place("bias")
    place = _convolved(call, x, weight, call.get("groups"), bool(call.get("transposed")))
    wanted = place.kind if place.is_partial or place.dim == 1 else WHOLE.kind
    if bias is not None and bias.kind != wanted:
        raise call.misfit("the bias that it adds and the product have different placements")
    return [place]


def _convolved(call: Call, x: Place, weight: Place, groups: int, transposed: bool) -> Place:
    """Input (batch, in, ...); weight (out, in, ...), or (in, out, ...) if transposed."""
    if x.is_slice and x.dim > 1:
        raise call.misfit("it mixes pixels, which are sharded")
    if _by_groups(x, weight, groups, transposed):
        own = call.tensors[0].shape[1]
        if any(block % (own // groups) for block in x.blocks_in(own)):
            raise call.misfit("a group of channels has parts on several ranks")
        cut = _cut_of_groups(call, (0, 1), (1, 0))
        return x.anew(1).along(1, [int(part * call.outs[0].shape[1]) for part in cut])
    if groups > 1:
        if x.is_slice and x.dim == 0 and weight.is_whole:
            return x
        raise call.misfit("groups of channels and their weights need the same slices")
    return multiplied(call, "bi,io->bo" if transposed else "bi,oi->bo", x, weight)


def _by_groups(x: Place, weight: Place, groups: int, transposed: bool) -> bool:
    """Return True if ranks shard the groups: the channels and the weights' first dimension."""
    # `groups` is this rank's number, which may be 1 of several. In a real convolution of one group,
    # such weights would need more channels than the rank has; in a transposed one they are slices
    # of its input channels, which are contracted.
    is_contracted = transposed and groups == 1
    both = x.is_slice and x.dim == 1 and weight.is_slice and weight.dim == 0
    return both and not is_contracted


def _cut_of_groups(call: Call, at: Sequence[int], dims: Sequence[int]) -> list[Fraction]:
    """Relative blocks of a rank's channels, which must be equal in the given tensors."""
    # Relative, because a group may have more inputs than outputs, or fewer.
    cuts = []
    for index, dim in zip(at, dims, strict=True):
        place, size = call.places[index], call.tensors[index].shape[dim]
        blocks = [Fraction(block, size) for block in place.blocks_in(size)]
        cuts.append((place.is_slice and place.dim == dim, place.share, blocks))
    if not all(cut[0] and cut == cuts[0] for cut in cuts):
        raise call.misfit("groups of channels and their weights need the same slices")
    return cuts[0][2]


@rule_for("convolution_backward")
def _convolution_backward(call: Call) -> list[Place]:
    grad, x, weight = call.places[:3]
    groups, transposed = call.get("groups"), bool(call.get("transposed"))
    mask = call.get("output_mask")
    if groups > 1 or _by_groups(x, weight, groups, transposed):
        places = _grouped_gradients(call)
    else:
        io = "io" if transposed else "oi"
        of_x = multiplied(call, f"bo,{io}->bi", grad, weight) if mask[0] else WHOLE
        of_weight = multiplied(call, f"bo,bi->{io}", grad, x) if mask[1] else WHOLE
        places = [of_x, of_weight, _summed_to_channels(grad)]
    # Unwanted gradients are None.
    return [place for place, wanted in zip(places, mask, strict=True) if wanted]


def _grouped_gradients(call: Call) -> list[Place]:
    grad, x, weight = call.places[:3]
    if grad.is_slice and grad.dim == 1:
        _cut_of_groups(call, (0, 1, 2), (1, 1, 0))
        return [x, weight, grad.anew(0)]
    if grad.is_slice and grad.dim == 0 and grad.same(x) and weight.is_whole:
        return [x, PARTIAL_SUM, PARTIAL_SUM]
    raise call.misfit("groups of channels, their weights and gradients need the same slices")


def _summed_to_channels(grad: Place) -> Place:
    """Placement of a bias gradient, which sums over all dimensions but the channels."""
    if grad.is_slice:
        return grad.anew(0) if grad.dim == 1 else PARTIAL_SUM
    return grad
