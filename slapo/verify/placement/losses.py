"""Rules of losses over a sharded vocabulary, which communicate on their own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slapo.op.cross_entropy import TokenLosses, has_others
from slapo.op.linear_loss import LinearLoss
from slapo.sharding.groups import share_of
from slapo.verify.placement.call import Call
from slapo.verify.placement.place import PARTIAL_SUM, WHOLE, Place
from slapo.verify.placement.rules import ASKED_OF_WHOLES, register_place_rule

#: Attribute of a function's context with the placements of its gradients.
_GRADIENTS = "_slapo_gradient_places"


def token_losses(call: Call) -> Place:
    """Logits sharded by vocabulary give replicated losses; sharded tokens give sharded losses."""
    ctx, logits, _, start, group, *_ = call.args
    of_logits, of_labels = call.places[:2]
    if has_others(group):
        _check_labels(call, of_labels)
        _check_slice(call, "the logits", of_logits, logits.ndim - 1)
        _check_start(call, of_logits, logits.shape[-1], start)
        setattr(ctx, _GRADIENTS, [of_logits])
        return WHOLE
    setattr(ctx, _GRADIENTS, [of_logits])
    return _by_tokens(call, of_logits, of_labels, logits.ndim - 1)


def linear_loss(call: Call) -> Place:
    """A row-sharded weight gives a replicated loss and a partial gradient of the hidden states."""
    ctx, _, weight, _, _, settings = call.args
    of_hidden, of_weight, *of_bias, of_labels = call.places
    if not has_others(settings.group):
        if not all(place.is_plain for place in (of_weight, *of_bias)):
            raise call.misfit(f"the weight is {of_weight}, and no group is given for the rest")
        loss = _by_tokens(call, of_hidden, of_labels, 1)
        of_params = PARTIAL_SUM if loss.is_slice else WHOLE
        setattr(ctx, _GRADIENTS, [of_hidden, of_params, *(of_params for _ in of_bias)])
        return PARTIAL_SUM if loss.is_slice else WHOLE
    _check_labels(call, of_labels)
    if not of_hidden.is_plain:
        raise call.misfit(
            f"the hidden states are {of_hidden}, but ranks that shard the vocabulary need the "
            "states of the same tokens: gather or reduce the states before the head"
        )
    _check_slice(call, "the weight", of_weight, 0)
    for place in of_bias:
        if not place.same(of_weight):
            raise call.misfit(
                f"the bias is {place} and the weight {of_weight}: slice both the same way"
            )
    _check_start(call, of_weight, weight.shape[0], settings.start)
    # The gradient of the hidden states sums over the vocabulary, of which each rank has a part.
    setattr(ctx, _GRADIENTS, [PARTIAL_SUM, of_weight, *of_bias])
    return WHOLE


def gradients(call: Call) -> Sequence[Place]:
    """Placements of the operands; a partial gradient of the loss gives partial gradients."""
    ctx, of_grad = call.args[0], call.places[0]
    known: list[Place] = getattr(ctx, _GRADIENTS)
    found = [place for place, wanted in zip(known, ctx.needs_input_grad, strict=False) if wanted]
    if of_grad.is_plain or (of_grad.is_slice and all(of_grad.same(place) for place in found)):
        return found
    if of_grad.is_partial and all(place.is_plain for place in found):
        return [PARTIAL_SUM] * len(found)
    raise call.misfit(
        f"the gradient of the loss is {of_grad}: each rank needs the gradient of the whole loss"
    )


def _by_tokens(call: Call, place: Place, of_labels: Place, vocabulary: int) -> Place:
    """Placement of losses that each rank computes alone, for its own tokens."""
    if place.is_partial:
        raise call.misfit("a cross entropy is not linear, and its input is a partial sum")
    if place.is_slice and place.dim == vocabulary:
        raise call.misfit(
            "each rank has a part of the vocabulary, and no group is given for the rest"
        )
    if not place.same(of_labels):
        raise call.misfit(f"labels are {of_labels}, but the tensor that they label is {place}")
    return place


def _check_labels(call: Call, place: Place) -> None:
    if not place.is_plain:
        raise call.misfit(
            f"the labels are {place}, but each rank needs the labels of all tokens, as indices "
            "into the whole vocabulary"
        )


def _check_slice(call: Call, what: str, place: Place, dim: int) -> None:
    """Raise unless the ranks' parts in rank order form the vocabulary."""
    if place.is_plain:
        raise call.misfit(
            f"{what}: whole on every rank, but the group would add them up as if each rank had a "
            "different part of the vocabulary; pass slices, or no group"
        )
    if not place.is_slice or place.dim != dim or place.blocks or place.copies > 1:
        raise call.misfit(f"{what}: must be sliced along dimension {dim}, the vocabulary")


def _check_start(call: Call, place: Place, own: int, start: int | Tensor) -> None:
    if isinstance(start, Tensor):  # the ranks exchanged their sizes
        return
    whole = place.whole_size(own, call.ranks)
    first, _ = share_of(whole, call.rank, call.ranks)
    if start != first:
        raise call.misfit(
            f"this rank's part of the vocabulary of {whole} begins at {first}, but start={start}"
        )


register_place_rule(TokenLosses, token_losses, backward=gradients)
register_place_rule(LinearLoss, linear_loss, backward=gradients)
# A replicated tensor is wrong if a group is given for the other columns.
ASKED_OF_WHOLES.update((TokenLosses, LinearLoss))
