"""Sharded tensors and the collectives between them.

``Schedule.sync`` calls these functions by name; your own hook functions can use them too. They are
differentiable and do not change their inputs.
"""

from typing import TYPE_CHECKING, Any

from slapo.late import attribute
from slapo.sharding.collectives import (
    all_gather,
    all_to_all,
    copy_to_group,
    reduce_from_group,
    reduce_scatter,
    reshard,
    scatter,
)
from slapo.sharding.layout import PARTIAL, REPLICATE, Layout, Placement, shard
from slapo.sharding.rules import Effect, register_shard_rule
from slapo.sharding.slicing import ShardSpec
from slapo.sharding.vocab import masked, vocabulary_hooks

if TYPE_CHECKING:
    from slapo.sharding.sync_ops import (
        all_gather_forward_output,
        reduce_backward_grad,
        reduce_forward_output,
        reduce_scatter_forward_output,
        scatter_forward_output,
    )

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "Effect",
    "Layout",
    "Placement",
    "ShardSpec",
    "all_gather",
    "all_gather_forward_output",
    "all_to_all",
    "copy_to_group",
    "masked",
    "reduce_backward_grad",
    "reduce_forward_output",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_forward_output",
    "register_shard_rule",
    "reshard",
    "scatter",
    "scatter_forward_output",
    "shard",
    "vocabulary_hooks",
]

#: Names that older scripts import.
_LATE = dict.fromkeys(
    [name for name in __all__ if name.endswith(("_forward_output", "_backward_grad"))],
    "slapo.sharding.sync_ops",
)


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _LATE)
