"""An embedding table whose rows are spread over the ranks.

Technique: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism" (2019), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from slapo.sharding.collectives import reduce_from_group

PreHook = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]
PostHook = Callable[[Any, tuple[Any, ...], Tensor], Tensor]


def vocabulary_hooks(
    rank: int,
    world_size: int,
    vocab_size: int,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[PreHook, PostHook]:
    """Hooks for an embedding of which this rank holds ``vocab_size / world_size`` rows.

    The pre-forward hook turns tokens into local rows, those of other ranks into row 0; the
    post-forward hook zeroes what those gave, and `reduce` sums over the ranks.

    Parameters
    ----------
    rank, world_size
        This rank's place.
    vocab_size
        Rows of the whole table, divisible by `world_size`.
    reduce
        Tensor -> tensor: sums the ranks' parts, each of shape ``(..., hidden)``.

    Raises
    ------
    ValueError
        If the table cannot be spread evenly.

    Examples
    --------
    >>> import torch
    >>> table = torch.nn.Embedding(4, 2)  # rows 4 to 7 of 8
    >>> pre, post = vocabulary_hooks(1, 2, 8, reduce=lambda part: part)
    >>> _ = table.register_forward_pre_hook(pre), table.register_forward_hook(post)
    >>> table(torch.tensor([3, 5])).abs().sum(-1) > 0
    tensor([False,  True])
    """
    if vocab_size % world_size:
        raise ValueError(
            f"vocab_size {vocab_size} is not divisible by world_size {world_size}; "
            "pad the vocabulary or pick a group whose size divides it"
        )
    rows = vocab_size // world_size
    start = rank * rows
    masks: list[Tensor] = []

    def mask_tokens(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *rest = inputs
        foreign = (tokens < start) | (tokens >= start + rows)
        masks[:] = [foreign]
        return ((tokens - start).masked_fill(foreign, 0), *rest)

    def zero_and_reduce(module: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return reduce(output.masked_fill(masks.pop().unsqueeze(-1), 0.0))

    return mask_tokens, zero_and_reduce


def group_vocabulary_hooks(
    rank: int, world_size: int, vocab_size: int, group: dist.ProcessGroup | None
) -> tuple[PreHook, PostHook]:
    """:func:`vocabulary_hooks` that sum over `group`."""
    return vocabulary_hooks(
        rank, world_size, vocab_size, lambda part: reduce_from_group(part, group)
    )
