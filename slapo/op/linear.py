"""Linear layers whose bias a schedule can see, move or fuse."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearWithSeparateBias(nn.Linear):
    """``nn.Linear`` as a product and a separate addition, which a fusion can pick up.

    ``F.linear(x, weight, bias) --> F.linear(x, weight) + bias``

    A trace always shows both operations, never the layer as one call.

    Examples
    --------
    >>> layer = LinearWithSeparateBias.from_linear(nn.Linear(4, 3))
    >>> layer(torch.ones(2, 4)).shape
    torch.Size([2, 3])
    """

    inline_in_trace = True

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> LinearWithSeparateBias:
        """The same layer with the same parameter objects."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.in_features, new.out_features = linear.in_features, linear.out_features
        new.weight, new.bias = linear.weight, linear.bias
        new.training = linear.training
        return new

    def forward(self, input: Tensor) -> Tensor:
        """``input`` of shape ``(..., in_features)`` -> ``(..., out_features)``."""
        output = F.linear(input, self.weight)
        return _with_bias(output, self.bias)


class LinearWithSyncFunc(nn.Linear):
    """A linear layer that synchronises its product before it adds the bias.

    A layer whose input features are sharded computes a partial sum; its bias belongs after the
    reduction, else it is added once per rank.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As in ``nn.Linear``.
    sync_fn
        Tensor -> tensor, called on the product; None does nothing.

    Examples
    --------
    >>> layer = LinearWithSyncFunc(4, 3, sync_fn=lambda product: 2 * product)
    >>> x = torch.ones(2, 4)
    >>> torch.allclose(layer(x), 2 * F.linear(x, layer.weight) + layer.bias)
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sync_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.sync_fn = sync_fn

    def forward(self, input: Tensor) -> Tensor:
        """``input`` of shape ``(..., in_features)`` -> ``(..., out_features)``."""
        output = F.linear(input, self.weight)
        if self.sync_fn is not None:
            output = self.sync_fn(output)
        return _with_bias(output, self.bias)


def _with_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    return output if bias is None else output + bias
