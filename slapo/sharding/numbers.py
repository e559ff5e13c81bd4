"""Global sizes stored in a sharded module, such as its number of heads."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from slapo.history import Record, contains
from slapo.wrapper import innermost

#: Names that models use for their number of heads.
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads")
#: Sizes that do not depend on the number of heads.
_OF_ONE_HEAD = re.compile(r"head_(dim|size)|(groups|buckets|distance|idx|index)$")


def sizes_kept(module: nn.Module, path: str, records: Sequence[Record], world_size: int) -> str:
    """Describe the sizes of a module with shards below it; sharding does not adjust them."""
    below = [record for record in records if contains(path, record.path)]
    if not any(record.primitive == "shard" and record.path != path for record in below):
        return ""
    bare = innermost(module)
    known = {record.arguments["name"] for record in below if record.primitive == "set"}
    heads = [
        (name, getattr(bare, name, getattr(getattr(bare, "config", None), name, None)))
        for name in _HEADS
        if repr(name) not in known
    ]
    uneven = [f"{name}={n}" for name, n in heads if type(n) is int and n % world_size]
    if uneven:
        return (
            f"\nit holds shards, and {uneven[0]} cannot be split into whole heads over "
            f"{world_size} ranks; use a number of ranks that divides it, or keep its projections "
            "whole"
        )
    numbers = [
        f"{name}={value}"
        for name, value in vars(bare).items()
        if type(value) is int and value > 1 and name[0] != "_" and repr(name) not in known
        if not _OF_ONE_HEAD.search(name)
    ]
    if not numbers:
        return ""
    return (
        f"\nit holds shards, but keeps {', '.join(numbers)}: set full sizes to this rank's share, "
        f'as by sch["{path}"].set(name, whole=...), with whole heads on each rank'
    )
