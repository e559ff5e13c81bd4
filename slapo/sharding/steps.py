"""Steps of tensor parallelism: their placements over the ranks, before and after.

Collectives, and the few computations that give each rank something else, say here what they take
and what they give. One table, read by the layout check of ``Schedule.sync``, by the placement check
and by the manual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One kind of step, from how its input is laid out across the ranks to how its output does."""

    #: of the collective
    name: str
    #: ``"replicate"`` (whole on every rank), ``"partial"`` (summands), ``"shard"`` (slices), or
    #: ``"masked"`` (tokens as rows of this rank's part of a table), ``"part"`` and ``"share"``
    #: (summands of a slice that several ranks hold, and that slice)
    takes: str
    gives: str
    #: which of the step's arguments is the axis of the slices that it takes, or gives
    takes_along: str = ""
    gives_along: str = ""
    communicates: bool = True


ALL_REDUCE = Step("all_reduce", "partial", "replicate")
#: Its gradient is summed.
COPY = Step("copy", "replicate", "replicate", communicates=False)
ALL_GATHER = Step("all_gather", "shard", "replicate", takes_along="axis")
REDUCE_SCATTER = Step("reduce_scatter", "partial", "shard", gives_along="axis")
SCATTER = Step("scatter", "replicate", "shard", gives_along="axis", communicates=False)
ALL_TO_ALL = Step("all_to_all", "shard", "shard", "concat_axis", "split_axis")
#: 1/n of a tensor in the forward pass, so that a sum over n ranks adds it once.
SHARE = Step("share", "replicate", "partial", communicates=False)
#: This rank's slice among zeros: the gradient of a slice that other ranks have others of.
PAD = Step("pad", "shard", "partial", takes_along="axis", communicates=False)
#: Of a slice that several ranks hold: the gradient of each adds up to that of the slice.
SUM_SHARED = Step("sum_shared", "part", "share")
#: Of inputs: what the first rank of the group was given; without a gradient.
BROADCAST = Step("broadcast", "replicate", "replicate")
MASK_TOKENS = Step("mask_tokens", "replicate", "masked", communicates=False)

STEPS: tuple[Step, ...] = (ALL_REDUCE, COPY, ALL_GATHER, REDUCE_SCATTER, SCATTER, ALL_TO_ALL)
STEPS += (SHARE, PAD, MASK_TOKENS, SUM_SHARED, BROADCAST)

#: Gets the step, the function that carries it out, the tensor, the group and further arguments.
Carrier = Callable[..., Tensor]
_carrier: Carrier | None = None


def carry_out(
    step: Step,
    function: Callable[..., Tensor],
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    **arguments: Any,
) -> Tensor:
    """Call ``function(tensor, group, **arguments)``, or let who watches do it."""
    if _carrier is None:
        return function(tensor, group, **arguments)
    return _carrier(step, function, tensor, group, **arguments)


@contextmanager
def carried_by(carrier: Carrier) -> Iterator[None]:
    """Let a function carry out the steps that this process begins within the block."""
    global _carrier
    before, _carrier = _carrier, carrier
    try:
        yield
    finally:
        _carrier = before
