"""Layers whose input features are sharded: a partial sum, whose bias is added once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.hooks import REDUCERS
from slapo.sharding.collectives import copy_to_group, scatter

Product = Callable[[Any, Tensor], Tensor]
#: A forward hook, called on the product before the bias is added.
Reducer = Callable[[Any, tuple[Any, ...], Tensor], Tensor]
#: (bias, dimensions of the product) -> what to add to this rank's part of the reduced product.
BiasPart = Callable[[Tensor, int], Tensor]


class _Share(torch.autograd.Function):
    """1/n of a tensor in the forward pass, its whole gradient in the backward pass.

    When each of n ranks adds its share to a partial sum, the reduction adds the whole once, and
    each rank's copy gets the gradient that the single one would.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world_size: int) -> Tensor:
        return tensor / world_size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class PartialSumMixin:
    """product -> reduction -> bias; while no reduction is known here, a share of the bias."""

    traceable = False
    _product: Product
    _bias_dims: int
    _slapo_reducers: tuple[Reducer, ...]
    _slapo_bias_part: BiasPart | None
    _slapo_world_size: int
    bias: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """The product, reduced where a reduction is known, and the bias once."""
        output = type(self)._product(self, input)
        bias = self.bias
        if not self._slapo_reducers:
            bias = _Share.apply(bias, self._slapo_world_size)
        elif self._slapo_bias_part is not None:
            bias = self._slapo_bias_part(bias, output.dim())
        for reduce in self._slapo_reducers:
            output = reduce(self, (input,), output)
        # Under autocast the product has a smaller dtype, and so has the original's output.
        return output + bias.to(output.dtype).view(-1, *[1] * self._bias_dims)


def _linear(module: Any, input: Tensor) -> Tensor:
    return F.linear(input, module.weight)


def _matmul(module: Any, input: Tensor) -> Tensor:
    return input @ module.weight


def _convolution(module: Any, input: Tensor) -> Tensor:
    output: Tensor = module._conv_forward(input, module.weight, None)
    return output


#: forward that a class must have for us to know its product -> (product, dims behind channels)
_PRODUCTS: dict[str, tuple[Product, int]] = {
    "torch.nn.modules.linear.Linear": (_linear, 0),
    "slapo.op.linear.LinearWithSeparateBias": (_linear, 0),
    "transformers.pytorch_utils.Conv1D": (_matmul, 0),
    "torch.nn.modules.conv.Conv1d": (_convolution, 1),
    "torch.nn.modules.conv.Conv2d": (_convolution, 2),
    "torch.nn.modules.conv.Conv3d": (_convolution, 3),
}
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def has_bias(module: nn.Module) -> bool:
    """True when `module` adds a bias of its own."""
    return module._parameters.get("bias") is not None


def is_deferring(module: nn.Module) -> bool:
    """True when `module` adds its bias after the reduction."""
    return isinstance(module, PartialSumMixin)


def check_deferrable(module: nn.Module) -> None:
    """Refuse a class whose forward we do not know.

    Raises
    ------
    ValueError
        If the bias would be added once per rank and we cannot prevent it.
    """
    if has_bias(module) and not is_deferring(module) and _known_product(module) is None:
        raise ValueError(
            f"{type(module).__name__} adds a bias to what would be a partial sum, once per rank, "
            "and its forward is its own; replace it by slapo.op.LinearWithSyncFunc or give it "
            "a module without bias"
        )


def defer_bias(module: nn.Module, world_size: int) -> None:
    """Make `module` add its bias once, whatever reduces its output; it stays the same object."""
    if not has_bias(module) or is_deferring(module):
        return
    module.__dict__.update(
        {REDUCERS: (), "_slapo_bias_part": None, "_slapo_world_size": world_size}
    )
    module.__class__ = _deferring_class(type(module))


def can_reduce(module: nn.Module) -> bool:
    """True when a reduction can be put between the product and the bias of `module`.

    Not after other forward hooks, which would then run in another order than they were added.
    """
    return is_deferring(module) and not (module.__dict__[REDUCERS] or module._forward_hooks)


def add_reducer(
    module: nn.Module,
    reduce: Reducer,
    scatter_axis: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Call `reduce` on the product of a deferring module, before its bias.

    `scatter_axis`: the axis of which each rank of `group` keeps a slice of the sum, if it does.
    """
    module.__dict__[REDUCERS] = (reduce,)
    channel_axis = -1 - type(module)._bias_dims  # type: ignore[attr-defined]
    if scatter_axis is not None:
        # A function, not the group itself: copies of the module share functions.
        module.__dict__["_slapo_bias_part"] = _bias_part(scatter_axis, channel_axis, group)


def _bias_part(axis: int, channel_axis: int, group: dist.ProcessGroup | None) -> BiasPart:
    def part(bias: Tensor, dims: int) -> Tensor:
        if axis % dims == channel_axis % dims:
            return scatter(bias, group, 0)
        # Ranks add the bias to different tokens: its gradient is the sum of theirs.
        return copy_to_group(bias, group)

    return part


def _known_product(module: nn.Module) -> tuple[Product, int] | None:
    forward = type(module).forward
    for cls in type(module).__mro__:
        known = _PRODUCTS.get(f"{cls.__module__}.{cls.__qualname__}")
        if known is not None:
            return known if forward is cls.forward else None  # type: ignore[attr-defined]
    return None


def _deferring_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _CLASSES:
        known = _PRODUCTS[_product_owner(cls)]
        body = {"_product": known[0], "_bias_dims": known[1], "__module__": cls.__module__}
        _CLASSES[cls] = type(cls.__name__, (PartialSumMixin, cls), body)
    return _CLASSES[cls]


def _product_owner(cls: type[nn.Module]) -> str:
    names = (f"{c.__module__}.{c.__qualname__}" for c in cls.__mro__)
    return next(name for name in names if name in _PRODUCTS)
