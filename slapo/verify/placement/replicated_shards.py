"""Slices that several ranks hold, such as key and value heads if there are more ranks.

Each rank uses its copy for its own queries. In the backward pass each rank therefore has a part of
the slice's gradient. Only the sum over the ranks that hold the slice is the full gradient.
"""

from __future__ import annotations

from dataclasses import replace

from slapo.verify.placement.call import Call, Rule, by_rule
from slapo.verify.placement.place import Place, PlacementViolation, sliced
from slapo.verify.placement.reduction_rules import ATTENTION
from slapo.verify.placement.view_rules import COPIES, REORDERS, VIEWS

#: Linear in all of their tensors together.
_TOGETHER = ("add", "sub", "cat", "concat", "stack")
#: Linear in each of their tensors.
_EACH: tuple[str, ...] = ("mul", "mm", "bmm", "mv", "sum", "neg", "unsqueeze", "squeeze", "expand")
_EACH += ("slice", "select", "split", "split_with_sizes", "narrow", "constant_pad_nd")
_EACH += (*VIEWS, *REORDERS, *COPIES)


def is_shared(call: Call) -> bool:
    """Return True if an input, or the result of a gradient, is a slice held by several ranks."""
    before = call.of_gradient_of
    return any(p.copies > 1 for p in call.places) or (before is not None and before.copies > 1)


def followed(call: Call, rule: Rule) -> list[Place]:
    """Placements of the results."""
    if any(place.within >= 0 for place in call.places):
        return _cut_within(call)
    if any(place.is_slice and place.copies == 1 for place in call.places):
        return _with_own_slices(call, rule)
    summed = [replace(place, is_part=False) for place in call.places]
    found = by_rule(rule, replace(call, places=summed))
    if not any(place.is_part for place in call.places):
        if any(place.is_partial for place in found):
            raise call.misfit("ranks that hold the same slice would each count it")
        return _repeated(call, found) if call.name == "expand" else found
    _check_linear(call)
    return [replace(place, is_part=place.is_slice) for place in found]


def _with_own_slices(call: Call, rule: Rule) -> list[Place]:
    """Combine with per-rank slices: a shared head counts as one head per rank."""
    before = call.of_gradient_of
    if before is not None and before.copies > 1 and call.name in VIEWS:
        return [replace(before, is_part=before.within < 0)]
    places = []
    for tensor, place in zip(call.tensors, call.places, strict=True):
        if place.copies > 1:
            sizes = place.blocks_in(tensor.shape[place.dim])
            # One head per block meets all of the rank's queries. Of several, each meets some, which
            # no rule follows.
            if place.is_part or set(sizes) != {1}:
                raise call.misfit("a slice that several ranks hold meets slices of their own")
            place = sliced(place.dim, place.blocks)
        places.append(place)
    found = by_rule(rule, replace(call, places=places))
    if call.name.startswith(ATTENTION) and "backward" in call.name:
        for index, name in enumerate(("query", "key", "value")):
            given = call.place(name)
            if given is not None and given.copies > 1:
                found[index] = replace(given, is_part=True)
    return found


def _repeated(call: Call, found: list[Place]) -> list[Place]:
    """A repeated head: each rank takes the copies for its own queries."""
    (place,), old, new = found, call.tensors[0].shape, call.outs[0].shape
    behind = place.dim + 1
    grows = len(old) == len(new) > behind and old[behind] == 1 < new[behind]
    return [replace(place, within=behind)] if grows else found


def _cut_within(call: Call) -> list[Place]:
    """Copies of one slice that are sharded along another dimension: joined, or summed."""
    (place,), old, new = call.places, call.tensors[0].shape, call.outs[0].shape
    dim, within = place.dim, place.within
    if call.name in COPIES:
        return [place]
    if call.name == "sum" and call.dims() == {within}:
        return [replace(place, within=-1, is_part=True)]
    joined = (*old[:dim], old[within], *old[within + 1 :])
    if call.name in VIEWS and within == dim + 1 and old[dim] == 1 and tuple(new) == joined:
        return [sliced(dim)]
    raise call.misfit("no rule follows a head through it that ranks share and repeat")


def _check_linear(call: Call) -> None:
    """Raise for nonlinear operations on parts of a gradient, which must be summed first."""
    parts = [place.is_part for place in call.places]
    # A product of two parts would have terms between ranks, as that of two partial sums.
    one = parts.count(True) == 1
    scalar = any(isinstance(value, (int, float)) and value for value in call.args[:2])
    good = (
        (one and call.name in _EACH)
        or (one and parts[0] and (call.name == "div" or call.name.endswith("_backward")))
        or (
            call.name in _TOGETHER
            and not scalar
            and all(place.is_part or place.is_zero for place in call.places)
        )
    )
    if not good:
        raise PlacementViolation("it is not linear, and ranks have parts of its input")
