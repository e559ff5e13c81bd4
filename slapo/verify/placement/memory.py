"""Placements of tensors that share memory: `as_strided`, and writes through views.

Autograd turns the gradient of a write through a view into both.
"""

from __future__ import annotations

from torch import Tensor

from slapo.verify.placement.call import Call, rule_for
from slapo.verify.placement.place import Place
from slapo.verify.placement.view_rules import fitting


@rule_for("as_strided")
def as_strided(call: Call) -> list[Place]:
    """Keep a shard along a dimension of the same stride, or of the same memory in another shape."""
    place = through_memory(call.places[0], call.tensors[0], call.outs[0])
    if place is None:
        raise call.misfit("no rule follows a slice through these strides")
    return [place]


def through_memory(place: Place, known: Tensor, other: Tensor) -> Place | None:
    """Placement of a tensor, from another tensor of the same memory; None if unclear."""
    if place.order:
        return None
    if not place.is_slice:
        return place
    size, stride = known.shape[place.dim], known.stride(place.dim)
    for dim in range(other.ndim):
        alike = (other.shape[dim], other.stride(dim)) == (size, stride)
        others = (d for d in range(other.ndim) if d != dim)
        if alike and all(_keeps_to(other, d, size, stride) for d in others):
            return place.along(dim)
    same = (known.numel(), known.storage_offset()) == (other.numel(), other.storage_offset())
    if same and known.is_contiguous() and other.is_contiguous():
        fits = fitting(place, known.shape, other.shape)
        return min((place.along(*fit) for fit in fits), key=lambda p: len(p.blocks), default=None)
    return None


def _keeps_to(tensor: Tensor, dim: int, size: int, stride: int) -> bool:
    """Return True if steps along a dimension stay within one index of the sliced dimension."""
    step, count = tensor.stride(dim), tensor.shape[dim]
    return count == 1 or step % (size * stride) == 0 or step * (count - 1) < stride
