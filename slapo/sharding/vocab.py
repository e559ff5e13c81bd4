"""Embeddings sharded by rows.

Technique: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism" (2019), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.sharding.collectives import reduce_from_group
from slapo.sharding.state import sharding_of, shards_of, syncs_of
from slapo.sharding.steps import MASK_TOKENS, carry_out
from slapo.sharding.sync_hooks import InputHook, OutputHook, SyncHook

#: Attribute of a table with its local rows.
_ROWS = "_slapo_rows"

PreHook = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]
PostHook = Callable[[Any, tuple[Any, ...], Tensor], Tensor]


def vocabulary_hooks(
    rank: int,
    world_size: int,
    vocab_size: int,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[PreHook, PostHook]:
    """Hooks for an embedding with ``vocab_size / world_size`` rows on this rank.

    The pre-forward hook maps tokens to local rows, and tokens of other ranks to row 0. The
    post-forward hook zeroes the output for the latter, and `reduce` sums over the ranks.

    Parameters
    ----------
    rank, world_size
        This rank's position in the group.
    vocab_size
        Rows of the full table, divisible by `world_size`.
    reduce
        Function that sums the ranks' outputs, each of shape ``(..., hidden)``.

    Raises
    ------
    ValueError
        If `world_size` does not divide `vocab_size`.

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
    table = _Rows(rank * rows, rows, vocab_size)

    def mask_tokens(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *rest = inputs
        return (table.mask(tokens), *rest)

    def zero_and_reduce(module: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return reduce(table.zero(output))

    return mask_tokens, zero_and_reduce


def look_up_own_rows(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pre-forward hook for a row-sharded table whose forward does more than a lookup.

    Use it with :func:`sum_looked_up`; both read the local rows from the module.
    """
    tokens, *rest = inputs
    return (_rows_of(module).mask(tokens), *rest)


def sum_looked_up(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """Post-forward hook that zeroes outputs for other ranks' tokens, and sums over the ranks.

    Correct if the table's forward maps zeros to zeros, such as one that scales the lookup.
    """
    state = sharding_of(module)
    assert state is not None, "the hook before it has looked"
    return reduce_from_group(_rows_of(module).zero(output), state.group.group)


def _rows_of(table: nn.Module) -> _Rows:
    rows: _Rows | None = table.__dict__.get(_ROWS)
    if rows is None:
        spec = shards_of(table).get("weight")
        if spec is None or spec.axis != 0:
            raise SlapoError(
                f"the weight of {type(table).__name__} is not sharded by rows; call "
                "shard('weight', axis=0) before these hooks run"
            )
        rows = table.__dict__[_ROWS] = _Rows(spec.start, spec.local_shape[0], spec.full_shape[0])
    return rows


def masked(tokens: Tensor, start: int, count: int, total: int | None = None) -> Tensor:
    """Map tokens to rows of this rank's part of a table, and tokens of other parts to row 0.

    For your own hooks around a sharded table; :func:`slapo.check` uses it to track the rows. Your
    hooks must zero the output for tokens of other parts.

    Parameters
    ----------
    tokens
        Integers of any shape.
    start, count
        First row and number of rows of this rank.
    total
        Rows of the full table; required if some ranks hold more rows than others.

    Examples
    --------
    >>> import torch
    >>> masked(torch.tensor([3, 5, 9]), start=4, count=4)
    tensor([0, 1, 0])
    """

    def local(tokens: Tensor, _: object, start: int, count: int, total: int | None) -> Tensor:
        rows = tokens - start
        return rows.masked_fill((rows < 0) | (rows >= count), 0)

    return carry_out(MASK_TOKENS, local, tokens, None, start=start, count=count, total=total)


class _Rows:
    """The local rows of a table, and the mask of the current call."""

    def __init__(self, start: int, count: int, total: int) -> None:
        self.start, self.count, self.total = start, count, total
        self._foreign: list[Tensor] = []

    def mask(self, tokens: Tensor) -> Tensor:
        """Map tokens to local rows, and tokens of other ranks to row 0.

        Indices outside the full table stay out of range, so that the lookup raises.
        """
        rows = {"start": self.start, "count": self.count, "total": self.total}
        return carry_out(MASK_TOKENS, self._mask, tokens, None, **rows)

    def _mask(self, tokens: Tensor, _: object, start: int, count: int, total: int) -> Tensor:
        foreign = (tokens < start) | (tokens >= start + count)
        # For `zero`, which runs after the lookup of this call and frees the mask.
        self._foreign[:] = [foreign]
        elsewhere = foreign & (tokens >= 0) & (tokens < total)
        return (tokens - start).masked_fill(elsewhere, 0)

    def zero(self, output: Tensor) -> Tensor:
        """Zero the output rows for tokens of other ranks."""
        return output.masked_fill(self._foreign.pop().unsqueeze(-1), 0.0)


def check_maskable(table: nn.Module, outer: nn.Module | None = None) -> None:
    """Raise for a table whose lookup may not use the tokens as given."""
    hooks = {**table._forward_pre_hooks, **(outer._forward_pre_hooks if outer else {})}
    unknown = [hook for hook in hooks.values() if not isinstance(hook, SyncHook)]
    if unknown and not masks_itself(table):
        name = getattr(unknown[0], "__name__", type(unknown[0]).__name__)
        raise ValueError(
            f"the pre-forward hook {name!r} runs before the table, and may or may not turn tokens "
            "into rows of this rank: if it does, pass it to sync('fwd_pre', function) instead of "
            "register_forward_pre_hook; if not, register it after this call"
        )
    if type(table).forward is not nn.Embedding.forward:
        raise ValueError(
            f"{type(table).__name__} has its own forward, which may shift or scale its rows; mask "
            "its tokens with your own hook functions (sync with 'fwd_pre' and 'fwd_post'), or "
            "shard axis 1"
        )


def mask_vocabulary(table: nn.Module) -> None:
    """Make a sharded table return zeros for tokens of other ranks.

    The masking hooks run directly around the table, inside the existing hooks.
    """
    state = sharding_of(table)
    assert state is not None, "the table is sharded"
    if state.masks_vocabulary:
        return
    spec = state.specs["weight"]
    rows = _Rows(spec.start, spec.local_shape[0], spec.full_shape[0])
    table.register_forward_pre_hook(InputHook(rows.mask, "fwd_pre"), with_kwargs=True)
    # First, so that reductions which are already on the table sum the zeroed rows.
    table.register_forward_hook(OutputHook(rows.zero), prepend=True)
    state.masks_vocabulary = True


def is_masked(table: nn.Module) -> bool:
    """Return True if tokens of other ranks are masked, by this library or a user's hook."""
    state = sharding_of(table)
    return (state is not None and state.masks_vocabulary) or masks_itself(table)


def masks_itself(table: nn.Module) -> bool:
    """Return True if a user's function runs before the table, by ``sync("fwd_pre", function)``."""
    return any(sync.mode == "fwd_pre" and not sync.op for sync in syncs_of(table))
