"""Steps of tensor parallelism, with their placements before and after.

Collectives, and the few local computations that change a placement, declare here their input and
output placements. The layout check of ``Schedule.sync``, the placement check and the manual read
this table.
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
    """One kind of step, with the placements of its input and output."""

    #: name of the collective
    name: str
    #: ``"replicate"`` (the full tensor on every rank), ``"partial"`` (summands), ``"shard"``
    #: (slices), or ``"masked"`` (tokens as rows of this rank's part of a table), ``"part"`` and
    #: ``"share"`` (summands of a slice that several ranks hold, and that slice)
    takes: str
    gives: str
    #: name of the argument with the axis of the input's, or the output's, slices
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
#: This rank's part of a tensor, by its ShardSpec; the gradient of it, padded with zeros.
PART = Step("part", "replicate", "shard", gives_along="spec.axis", communicates=False)
PAD = Step("pad", "shard", "partial", takes_along="spec.axis", communicates=False)
#: For a slice that several ranks hold: sums their gradients to that of the slice.
SUM_SHARED = Step("sum_shared", "part", "share")
#: For inputs: the first rank's tensor on every rank of the group; no gradient.
BROADCAST = Step("broadcast", "replicate", "replicate")
MASK_TOKENS = Step("mask_tokens", "replicate", "masked", communicates=False)

STEPS: tuple[Step, ...] = (ALL_REDUCE, COPY, ALL_GATHER, REDUCE_SCATTER, SCATTER, ALL_TO_ALL)
STEPS += (SHARE, PART, PAD, MASK_TOKENS, SUM_SHARED, BROADCAST)

#: Called with the step, the function that runs it, the tensor, the group and further arguments.
Carrier = Callable[..., Tensor]
# For the placement check, which runs in one process, where a collective would have no peers; and
# for Verify, which has to know whether the other ranks take the same step.
_carrier: Carrier | None = None


def carry_out(
    step: Step,
    function: Callable[..., Tensor],
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    **arguments: Any,
) -> Tensor:
    """Call ``function(tensor, group, **arguments)``, or pass the call to the active carrier."""
    if _carrier is None:
        return function(tensor, group, **arguments)
    return _carrier(step, function, tensor, group, **arguments)


@contextmanager
def carried_by(carrier: Carrier) -> Iterator[None]:
    """Run all steps within the block through `carrier`."""
    global _carrier
    before, _carrier = _carrier, carrier
    try:
        yield
    finally:
        _carrier = before
