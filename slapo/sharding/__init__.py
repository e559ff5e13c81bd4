"""Sharded tensors and the collectives between them.

The functions below are what ``Schedule.sync`` calls by name; use them in hook functions of your
own. They are differentiable and leave their inputs alone.
"""

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

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "Effect",
    "Layout",
    "Placement",
    "ShardSpec",
    "all_gather",
    "all_to_all",
    "copy_to_group",
    "reduce_from_group",
    "reduce_scatter",
    "register_shard_rule",
    "reshard",
    "scatter",
    "shard",
]
