"""Whole tensors whose rows are in the order of the ranks, and not in that of one process.

Where a layer makes one dimension of samples and tokens, each rank has, of every sample, a slice of
the tokens. A gather along that dimension puts the ranks one behind the other. That is all the same
to what is computed row by row, and to a sum over the rows; a scatter along it undoes the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slapo.sharding.steps import ALL_GATHER, ALL_REDUCE, COPY, PAD, REDUCE_SCATTER, SCATTER, Step
from slapo.verify.placement.call import Call, Rule, by_rule
from slapo.verify.placement.place import OWN, WHOLE, Place, PlacementViolation, sliced
from slapo.verify.placement.pointwise import is_pointwise
from slapo.verify.placement.reduction_rules import REDUCTIONS
from slapo.verify.placement.view_rules import VIEWS

#: Of which a rule for slices says whether rows are computed by themselves, or summed over.
_BY_ROWS: tuple[str, ...] = ("mm", "addmm", "t", "transpose", "permute", "expand", "unsqueeze")
_BY_ROWS += ("squeeze", "split", "split_with_sizes", "slice", "cat", "glu", "glu_backward")
_BY_ROWS += ("detach", "alias", "clone", "contiguous", "native_dropout", "bernoulli", "_softmax")
_BY_ROWS += ("_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
_BY_ROWS += ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm")
_BY_ROWS += ("_fused_rms_norm_backward", "empty_like", "ones_like", "zeros_like")
_BY_ROWS += (*REDUCTIONS, *VIEWS)
#: Collectives that may have rows in another order.
STEPS = (ALL_REDUCE, COPY, ALL_GATHER, PAD, REDUCE_SCATTER, SCATTER)


def is_shuffled(places: Sequence[Place]) -> bool:
    """Return whether any is in another order."""
    return any(place.order for place in places)


def in_order(places: Sequence[Place]) -> list[Place]:
    """The same, as if they were in the order of one process."""
    return [replace(place, shuffled=-1, order=()) if place.order else place for place in places]


def followed(call: Call, rule: Rule, found: list[Place]) -> list[Place]:
    """Places of the results, by how they would be in order.

    What keeps a slice of the rows apart from the others keeps them in any order.
    """
    orders = {place.order for place in call.places if place.order}
    if len(orders) > 1 or not (call.name in _BY_ROWS or is_pointwise(call)):
        raise _misfit(call)
    try:
        as_slices = [_as_slice(place) for place in call.places]
        rows = by_rule(rule, replace(call, places=as_slices))
    except PlacementViolation:
        raise _misfit(call) from None
    (order,) = orders
    pairs = zip(call.tensors, call.places, strict=True)
    count = next(t.shape[p.shuffled] for t, p in pairs if p.order)
    placed = []
    for out, place, by_rows in zip(call.outs, found, rows, strict=True):
        if by_rows.is_slice:
            if out.shape[by_rows.dim] != count:  # cut, or others put behind them
                raise _misfit(call)
            place = replace(place, shuffled=by_rows.dim, order=order)
        placed.append(place)
    return placed


def _as_slice(place: Place) -> Place:
    if place.order:
        return sliced(place.shuffled)
    if place.is_whole or place.kind == OWN:
        return place
    return WHOLE


def _misfit(call: Call) -> PlacementViolation:
    place = next(place for place in call.places if place.order)
    return PlacementViolation(
        f"rows along dimension {place.shuffled} are those of one rank after the other, not in the "
        "order of one process, and it needs that; gather the tokens before samples and tokens "
        "become one dimension"
    )


# --- steps -------------------------------------------------------------------------------
def may_shuffle(step: Step, place: Place) -> bool:
    """Return whether a step of slices in blocks gives rows in the order of the ranks."""
    return step in (ALL_GATHER, PAD) and place.dim == 0 and place.share is None and not place.order


def given_by(step: Step, place: Place, given: Place) -> Place:
    """Where the result of a step lies: `given`, were all in order.

    A gather of slices in blocks has the order of the ranks; a scatter along the rows gives such
    slices.
    """
    if step in (ALL_GATHER, PAD) and place.blocks:
        return replace(given, shuffled=place.dim, order=place.blocks)
    if place.order and given.is_slice and given.dim == place.shuffled:
        return given.along(given.dim, place.order)
    return replace(given, shuffled=place.shuffled, order=place.order)
