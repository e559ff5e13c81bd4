"""An embedding table whose rows are spread over the ranks.

Technique: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism" (2019), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from slapo.sharding.sync import post_hook, pre_hook

_MASKED = "_slapo_vocabulary_mask"

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
    table = _Rows(rank * rows, rows)

    def mask_tokens(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *rest = inputs
        return (table.mask(tokens), *rest)

    def zero_and_reduce(module: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return reduce(table.zero(output))

    return mask_tokens, zero_and_reduce


class _Rows:
    """The rows of a table that this rank holds, and the tokens of the present call."""

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count = start, count
        self._foreign: list[Tensor] = []

    def mask(self, tokens: Tensor) -> Tensor:
        """Tokens as local rows, those of other ranks as row 0."""
        foreign = (tokens < self.start) | (tokens >= self.start + self.count)
        self._foreign[:] = [foreign]
        return (tokens - self.start).masked_fill(foreign, 0)

    def zero(self, output: Tensor) -> Tensor:
        """What row 0 gave for tokens of other ranks is taken out."""
        return output.masked_fill(self._foreign.pop().unsqueeze(-1), 0.0)


def check_maskable(table: nn.Module) -> None:
    """Refuse a table that may look up other rows than the tokens it is given.

    Raises
    ------
    ValueError
        If the class has a forward of its own.
    """
    if type(table).forward is not nn.Embedding.forward:
        raise ValueError(
            f"{type(table).__name__} has a forward of its own, which may shift or scale what it "
            "looks up; mask its tokens by hook functions of your own (sync with 'fwd_pre' and "
            "'fwd_post'), or shard axis 1"
        )


def mask_vocabulary(table: nn.Module, start: int, count: int) -> None:
    """Make a table of rows `start` to ``start + count`` give zeros for all other tokens.

    The masks are hooks right around the table, within the hooks that it has already.
    """
    if is_masked(table):
        return
    rows = _Rows(start, count)
    table.register_forward_pre_hook(pre_hook(rows.mask, "fwd_pre"), with_kwargs=True)
    table.register_forward_hook(post_hook(rows.zero), prepend=True)
    table.__dict__[_MASKED] = True


def is_masked(table: nn.Module) -> bool:
    """True when :func:`mask_vocabulary` was applied."""
    return _MASKED in table.__dict__
