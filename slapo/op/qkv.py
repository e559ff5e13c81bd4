"""The three projections of attention as one product."""

from __future__ import annotations

from torch import Tensor, nn

from slapo.weights.provenance import Source


class FusedQKV(nn.Module):
    """Query, key and value projections in one matrix product, split into heads.

    Replaces three ``nn.Linear`` of the same input and their split into heads; the weights are
    packed from those of the originals, query first.

    Parameters
    ----------
    hidden_size
        Features of the input and of each projection.
    num_heads
        Heads; `hidden_size` must be divisible by it.
    world_size
        Ranks that share the heads; each has ``num_heads / world_size`` of them.

    Examples
    --------
    >>> import torch
    >>> q, k, v = FusedQKV(8, 2)(torch.ones(3, 5, 8))
    >>> q.shape  # (batch, heads, seq, head_size)
    torch.Size([3, 2, 5, 4])
    """

    def __init__(self, hidden_size: int, num_heads: int, world_size: int = 1) -> None:
        super().__init__()
        if hidden_size % num_heads or num_heads % world_size:
            raise ValueError(
                f"FusedQKV: hidden_size {hidden_size} must be divisible by num_heads {num_heads}, "
                f"and that by world_size {world_size}"
            )
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_size = hidden_size // num_heads
        self.fused_linear = nn.Linear(hidden_size, 3 * hidden_size // world_size)

    def weight_sources(self) -> dict[str, Source]:
        """Query, key and value stacked along the output features."""
        return {
            f"fused_linear.{name}": Source((f"0.{name}", f"1.{name}", f"2.{name}"))
            for name in ("weight", "bias")
        }

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(batch, seq, hidden)`` -> three of ``(batch, heads, seq, head_size)``."""
        packed: Tensor = self.fused_linear(hidden_states)
        query, key, value = packed.chunk(3, dim=-1)
        return self._heads(query), self._heads(key), self._heads(value)

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
