"""Replicated tensors whose rows are in rank order, not in the order of one process.

If a layer merges samples and tokens into one dimension, each rank has a slice of the tokens of
every sample. A gather along that dimension concatenates the ranks' rows. Rowwise operations, and
sums over the rows, are correct in any order. A scatter along the rows restores the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slapo.sharding.steps import ALL_GATHER, ALL_REDUCE, COPY, REDUCE_SCATTER, SCATTER, Step
from slapo.verify.placement.call import Call, Rule, by_rule
from slapo.verify.placement.place import OWN, WHOLE, Place, PlacementViolation, sliced
from slapo.verify.placement.pointwise import is_pointwise
from slapo.verify.placement.reduction_rules import REDUCTIONS
from slapo.verify.placement.view_rules import VIEWS

#: Operations whose rules for slices show if they are rowwise, or sum over rows.
_BY_ROWS: tuple[str, ...] = ("mm", "addmm", "t", "transpose", "permute", "expand", "unsqueeze")
_BY_ROWS += ("squeeze", "split", "split_with_sizes", "slice", "cat", "glu", "glu_backward")
_BY_ROWS += ("detach", "alias", "clone", "contiguous", "native_dropout", "bernoulli", "_softmax")
_BY_ROWS += ("_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
_BY_ROWS += ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm")
_BY_ROWS += ("_fused_rms_norm_backward", "empty_like", "ones_like", "zeros_like")
_BY_ROWS += (*REDUCTIONS, *VIEWS)
#: Collectives that accept rows in another order.
STEPS = (ALL_REDUCE, COPY, ALL_GATHER, REDUCE_SCATTER, SCATTER)


def is_shuffled(places: Sequence[Place]) -> bool:
    """Return True if any placement has another order."""
    return any(place.order for place in places)


def in_order(places: Sequence[Place]) -> list[Place]:
    """The same placements in the order of one process."""
    return [replace(place, shuffled=-1, order=()) if place.order else place for place in places]


def followed(call: Call, rule: Rule, found: list[Place]) -> list[Place]:
    """Placements of the results, from those for ordered inputs.

    An operation that keeps slices of the rows separate keeps rows separate in any order.
    """
    orders = {place.order for place in call.places if place.order}
    if len(orders) > 1 or not (call.name in _BY_ROWS or is_pointwise(call)):
        raise _misfit(call)
    try:
        # Ask the rule what it does to slices of the rows: where these stay slices, rows do not mix,
        # and any order of rows is kept.
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
            if out.shape[by_rows.dim] != count:  # cut, or extended
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
        f"rows along dimension {place.shuffled} are in the ranks' order, but it needs the order of "
        "one process; gather the tokens before samples and tokens become one dimension"
    )


# --- steps -------------------------------------------------------------------------------
def may_shuffle(step: Step, place: Place) -> bool:
    """Return True if a step turns slices in blocks into rows in rank order."""
    return step == ALL_GATHER and place.dim == 0 and place.share is None and not place.order


def given_by(step: Step, place: Place, given: Place) -> Place:
    """Placement of a step's result; `given` is that for ordered inputs.

    A gather of slices in blocks gives rank order; a scatter along the rows gives such slices.
    """
    if step == ALL_GATHER and place.blocks:
        return replace(given, shuffled=place.dim, order=place.blocks)
    if place.order and given.is_slice and given.dim == place.shuffled:
        return given.along(given.dim, place.order)
    return replace(given, shuffled=place.shuffled, order=place.order)
