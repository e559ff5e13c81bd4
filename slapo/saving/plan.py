"""Assignment of writes to ranks: each element of each tensor is written once."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod
from typing import Any

import torch

from slapo.errors import SlapoError
from slapo.weights.pieces import Box, lengths, overlap

#: Slot of the optimizer ("" for values), and name of the original tensor.
Key = tuple[str, str]

#: A box to write, and the rank's box that contains it.
Part = tuple[Box, Box]


#: Dtype and boxes of a rank's part of a tensor.
Offer = tuple[torch.dtype, tuple[Box, ...]]


def share_out(
    offers: Sequence[Mapping[Key, Offer]],
    shapes: Mapping[str, Sequence[int]],
    buffers: Container[str],
) -> list[dict[Key, list[Part]]]:
    """Return the parts that each rank writes; the same on every rank.

    Replicas have equal boxes, or overlapping ones: ranges of flat buffers, whose lengths differ
    between tensor-parallel ranks. `buffers`, which may differ, are the first replica's.
    """
    holders: dict[Key, dict[Box, list[int]]] = {}
    for rank, offered in enumerate(offers):
        for key, (_, boxes) in offered.items():
            for box in boxes:
                holders.setdefault(key, {}).setdefault(box, []).append(rank)
    shares: list[dict[Key, list[Part]]] = [{} for _ in offers]
    load = [0] * len(offers)
    known: dict[Any, list[tuple[Part, int]]] = {}
    lacking = []
    for key, ranks in holders.items():
        form = tuple(ranks), tuple(shapes[key[1]])
        if form not in known:  # most tensors have the form of one in another layer or slot
            known[form] = [(part, prod(lengths(part[0]))) for part in _once(*form)]
        for part, size in known[form]:
            have = ranks[part[1]]
            rank = have[0] if key[1] in buffers else min(have, key=load.__getitem__)
            load[rank] += size
            shares[rank].setdefault(key, []).append(part)
        total, wanted = sum(size for _, size in known[form]), prod(shapes[key[1]])
        if total != wanted:
            lacking.append(f"{' of '.join(filter(None, key))} ({total} of {wanted} elements)")
    if lacking:
        raise SlapoError(
            f"the ranks do not hold all of {lacking[:5]}; call it on every rank, with the engine "
            "returned by slapo.build"
        )
    return shares


def _once(boxes: Sequence[Box], shape: Sequence[int]) -> list[Part]:
    """Return the boxes without their overlaps with earlier boxes."""
    # Usually boxes tile the tensor, and none has to be cut.
    sizes = sum(prod(lengths(box)) for box in boxes)
    apart = sizes == prod(shape) and not any(
        overlap(a, b) for k, a in enumerate(boxes) for b in boxes[:k]
    )
    if apart:
        return [(box, box) for box in boxes]
    found: list[Part] = []
    for box in boxes:
        rest = [box]
        for taken, _ in found:
            rest = [left for part in rest for left in _without(part, taken)]
        found += [(part, box) for part in rest]
    return found


def _without(box: Box, other: Box) -> list[Box]:
    """Return the boxes that remain of `box` without its overlap with `other`."""
    shared = overlap(box, other)
    if shared is None:
        return [box]
    # Axis by axis, the slabs before and after the overlap are cut off; what is left shrinks to it.
    found, left = [], list(box)
    for axis, (start, stop) in enumerate(shared):
        before, after = (left[axis][0], start), (stop, left[axis][1])
        found += [
            (*left[:axis], bounds, *left[axis + 1 :])
            for bounds in (before, after)
            if bounds[0] < bounds[1]
        ]
        left[axis] = (start, stop)
    return found
