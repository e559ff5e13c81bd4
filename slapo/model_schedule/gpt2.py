"""Names that published GPT-2 schedules import."""

from __future__ import annotations

import functools
from typing import Any

from slapo.schedule import Schedule
from slapo.sharding.collectives import reduce_from_group
from slapo.sharding.vocab import PostHook, PreHook, vocabulary_hooks


def gen_embedding_hooks(sch: Schedule, vocab_size: int) -> tuple[PreHook, PostHook]:
    """Return hooks for an embedding whose rows are sharded over the group of a schedule.

    Parameters
    ----------
    sch
        Schedule of any module of the model.
    vocab_size
        Number of rows of the full table.

    Returns
    -------
    tuple
        A pre-forward and a post-forward hook, for ``sync`` with ``"fwd_pre"`` and ``"fwd_post"``.

    Raises
    ------
    ValueError
        If the group does not divide `vocab_size`.

    Examples
    --------
    >>> import torch, slapo
    >>> sch = slapo.create_schedule(torch.nn.Embedding(8, 2))  # a world of one
    >>> before, after = gen_embedding_hooks(sch, 8)
    >>> sch.sync("fwd_pre", before).sync("fwd_post", after).mod(torch.tensor([3])).shape
    torch.Size([1, 2])
    """
    reduce: Any = functools.partial(reduce_from_group, group=sch.group)
    return vocabulary_hooks(sch.rank, sch.world_size, vocab_size, reduce)
