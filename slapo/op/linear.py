"""Linear layers whose bias a schedule can see, move or fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.op.fused_bias import (
    Activation,
    BiasGeLUFunction,
    activation,
    bias_dropout,
    is_new_gelu,
    scripted,
)
from slapo.weights.provenance import Source


class LinearWithSeparateBias(nn.Linear):
    """``nn.Linear`` as a product and a separate addition, which can be fused.

    ``F.linear(x, weight, bias) --> F.linear(x, weight) + bias``

    A trace always shows both operations, never one call of the layer.

    Examples
    --------
    >>> layer = LinearWithSeparateBias.from_linear(nn.Linear(4, 3))
    >>> layer(torch.ones(2, 4)).shape
    torch.Size([2, 3])
    """

    #: Traces keep subclasses of torch's layers as one call, unless they have this mark.
    inline_in_trace = True

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> LinearWithSeparateBias:
        """Build the layer around the parameter objects of `linear`."""
        return same_linear(cls, linear)

    def forward(self, input: Tensor) -> Tensor:
        """``input`` of shape ``(..., in_features)`` -> ``(..., out_features)``."""
        output = F.linear(input, self.weight)
        return _with_bias(output, self.bias)


class LinearWithSyncFunc(nn.Linear):
    """A linear layer that synchronizes its product before it adds the bias.

    A layer with sharded input features computes a partial sum. The bias must follow the reduction,
    or it is added once per rank.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As in ``nn.Linear``.
    sync_fn
        Function of the product that returns a tensor; None does nothing.

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


class LinearWithAct(nn.Linear):
    """A linear layer and its activation: ``act_fn(linear(x))``.

    For GPT-2's GeLU the bias addition is fused with the activation, and their sum is not stored for
    the backward pass.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As in ``nn.Linear``.
    act_fn
        Name of an activation in Transformers configs, such as ``"gelu_new"``; a function or a
        module.

    Raises
    ------
    ValueError
        For an unknown name.

    Examples
    --------
    >>> layer = LinearWithAct(4, 3, "relu")
    >>> bool((layer(torch.randn(2, 4)) >= 0).all())
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        act_fn: str | Activation,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.act_fn = activation(act_fn)

    def forward(self, input: Tensor) -> Tensor:
        """``input`` of shape ``(..., in_features)`` -> ``(..., out_features)``."""
        output = F.linear(input, self.weight)
        if self.bias is not None and is_new_gelu(self.act_fn):
            # Under autocast the product is in half precision, and the function does not promote.
            return cast(Tensor, BiasGeLUFunction.apply(output, self.bias.to(output.dtype)))
        return self.act_fn(_with_bias(output, self.bias))


class LinearWithDropout(nn.Linear):
    """A linear layer followed by dropout: ``dropout(linear(x))``.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As in ``nn.Linear``.
    p
        Probability that an element of the output is zeroed in training, from 0 to 1.
    inplace
        Apply the dropout in place.
    use_torchscript
        Run the bias addition and the dropout by TorchScript.

    Examples
    --------
    >>> layer = LinearWithDropout(4, 3, p=0.5).eval()
    >>> x = torch.ones(2, 4)
    >>> torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias))
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        p: float = 0.5,
        inplace: bool = False,
        use_torchscript: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.p, self.inplace, self.use_torchscript = p, inplace, use_torchscript

    def forward(self, input: Tensor) -> Tensor:
        """``input`` of shape ``(..., in_features)`` -> ``(..., out_features)``."""
        output = F.linear(input, self.weight)
        if self.bias is not None and self.use_torchscript:
            return scripted(bias_dropout)(output, self.bias, self.p, self.training)
        return F.dropout(_with_bias(output, self.bias), self.p, self.training, self.inplace)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class FusedQKV(nn.Module):
    """Query, key and value projections in one matrix product, split into heads.

    Replaces three ``nn.Linear`` of the same input and their split into heads. Its weights are
    packed from the originals, query first.

    Parameters
    ----------
    hidden_size
        Features of the input and of each projection.
    num_heads
        Number of heads; `hidden_size` must be divisible by it.
    world_size
        Number of ranks that share the heads; each holds ``num_heads / world_size`` of them.

    Examples
    --------
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
        """Stack query, key and value along the output features."""
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


def _with_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    # Never addmm: a trace must show the addition as an operation of its own.
    return output if bias is None else output + bias


Layer = TypeVar("Layer", bound=nn.Linear)


def same_linear(cls: type[Layer], linear: nn.Linear) -> Layer:
    """Build a layer of another class around the parameter objects of `linear`."""
    # Without __init__, which would allocate and initialize a weight.
    new = cls.__new__(cls)
    nn.Module.__init__(new)
    new.in_features, new.out_features = linear.in_features, linear.out_features
    new.weight, new.bias = linear.weight, linear.bias
    new.training = linear.training
    return new
