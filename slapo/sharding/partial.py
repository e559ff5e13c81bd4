"""Layers with sharded input features: a partial sum, whose bias is added once."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.sharding.collectives import copy_to_group
from slapo.sharding.groups import GroupHandle, group_rank, group_size
from slapo.sharding.slicing import Cut, ShardSpec, make_spec
from slapo.sharding.state import Sharding, sharding_of
from slapo.sharding.steps import PAD, PART, SHARE, carry_out
from slapo.sharding.tags import PARTIAL_GRAD
from slapo.wrapper import MadeClass

Product = Callable[[Any, Tensor], Tensor]
#: A forward hook, called on the product before the bias is added.
Reducer = Callable[[Any, tuple[Any, ...], Tensor], Tensor]


class _Share(torch.autograd.Function):
    """1/n of a tensor in the forward pass, its full gradient in the backward pass.

    If each of n ranks adds its share to a partial sum, the reduction adds the full tensor once, and
    each rank's copy gets the gradient of the unsharded one.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world_size: int) -> Tensor:
        return carry_out(SHARE, lambda whole, _: whole / world_size, tensor, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, spec: ShardSpec, handle: GroupHandle) -> Tensor:
        ctx.spec, ctx.handle = spec, handle
        return carry_out(PART, lambda t, _, spec: spec.slice(t), full, handle.group, spec=spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        spec, group = ctx.spec, ctx.handle.group
        return carry_out(PAD, lambda t, _, spec: spec.pad(t), grad, group, spec=spec), None, None


def own_part(full: Tensor, spec: ShardSpec, group: GroupHandle) -> Tensor:
    """This rank's part of a replicated tensor; its gradient, padded with zeros, is a summand."""
    if group_size(group.group) == 1:
        return full
    return cast(Tensor, _OwnPart.apply(full, spec, group))


class PartialSumMixin:
    """Adds the bias after the reduction, or a share of it on each rank if none is known."""

    traceable = False
    _original: type[nn.Module]
    _product: Product
    _finish: Product
    _bias_dims: int
    _slapo_sharding: Sharding
    bias: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Compute the product, reduce it if a reduction is known, and add the bias once."""
        output = type(self)._product(self, input)
        bias, state = self.bias, self._slapo_sharding
        if not state.reducers:
            bias = _Share.apply(bias, state.specs["weight"].world_size)
        elif state.bias_part is not None:
            bias = state.bias_part(bias, output.dim())
        for reduce in state.reducers:
            output = reduce(self, (input,), output)
        # Under autocast the product has a smaller dtype, and so has the original's output.
        output = output + bias.to(output.dtype).view(-1, *[1] * self._bias_dims)
        return type(self)._finish(self, output)


class _DeferringClass(MadeClass):
    @property
    def _slapo_made(cls) -> tuple[Any, ...]:
        kind: Any = cls
        return _deferring_class, (kind._original,)


copyreg.pickle(_DeferringClass, lambda cls: cls._slapo_made)


def _linear(module: Any, input: Tensor) -> Tensor:
    return F.linear(input, module.weight)


def _without_bias(module: Any, input: Tensor) -> Tensor:
    bias, module._parameters["bias"] = module._parameters["bias"], None
    try:
        output: Tensor = module._original.forward(module, input)
    finally:
        module._parameters["bias"] = bias
    return output


def _matmul(module: Any, input: Tensor) -> Tensor:
    return input @ module.weight


def _convolution(module: Any, input: Tensor) -> Tensor:
    output: Tensor = module._conv_forward(input, module.weight, None)
    return output


def _transposed(module: Any, input: Tensor) -> Tensor:
    functions = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    return functions[len(module.kernel_size) - 1](
        input,
        module.weight,
        None,
        module.stride,
        module.padding,
        module.output_padding,
        module.groups,
        module.dilation,
    )


def _drop(module: Any, output: Tensor) -> Tensor:
    return F.dropout(output, module.p, module.training, module.inplace)


def _activate(module: Any, output: Tensor) -> Tensor:
    activated: Tensor = module.act_fn(output)
    return activated


def _leave(module: Any, output: Tensor) -> Tensor:
    return output


#: class with a known forward -> (product, dims after the channels, function of the reduced sum and
#: bias)
_PRODUCTS: dict[str, tuple[Product, int, Product]] = {
    "torch.nn.modules.linear.Linear": (_linear, 0, _leave),
    "slapo.op.linear.LinearWithSeparateBias": (_linear, 0, _leave),
    "slapo.op.linear.LinearWithDropout": (_linear, 0, _drop),
    "slapo.op.linear.LinearWithAct": (_linear, 0, _activate),
    "transformers.pytorch_utils.Conv1D": (_matmul, 0, _leave),
    "torch.nn.modules.conv.Conv1d": (_convolution, 1, _leave),
    "torch.nn.modules.conv.Conv2d": (_convolution, 2, _leave),
    "torch.nn.modules.conv.Conv3d": (_convolution, 3, _leave),
    "torch.nn.modules.conv.ConvTranspose1d": (_transposed, 1, _leave),
    "torch.nn.modules.conv.ConvTranspose2d": (_transposed, 2, _leave),
    "torch.nn.modules.conv.ConvTranspose3d": (_transposed, 3, _leave),
}
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def has_bias(module: nn.Module) -> bool:
    """Return True if `module` adds a bias of its own."""
    return module._parameters.get("bias") is not None


def is_deferring(module: nn.Module) -> bool:
    """Return True if `module` adds its bias after the reduction."""
    return isinstance(module, PartialSumMixin)


def is_deferrable(module: nn.Module) -> bool:
    """Return True unless `module` adds a bias to something other than a product."""
    if not has_bias(module) or is_deferring(module):
        return True
    known = _known_product(type(module))
    return known is not None and (known[0] is not _without_bias or _sums_over_inputs(module))


def _sums_over_inputs(module: Any) -> bool:
    """Return True if outputs for parts of the input features, and the bias, add up to the output.

    Runs the forward on small random tensors: that of a subclass may do anything.
    """
    small, generator = copy.copy(module), torch.Generator().manual_seed(0)
    wide = module.weight.dtype == torch.float64
    options: Any = {"dtype": torch.float64 if wide else torch.float32, "device": "cpu"}
    shapes = ((2, 4), (3, 4), (3,))
    x, weight, bias = (torch.randn(shape, generator=generator, **options) for shape in shapes)

    def run(some: slice, bias: Tensor | None) -> Tensor:
        small._parameters = {**module._parameters, "weight": weight[:, some], "bias": bias}
        output: Tensor = type(module).forward(small, x[:, some])
        return output

    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        whole, parts = run(slice(None), bias), (run(slice(2), None), run(slice(2, None), None))
        return torch.allclose(whole, sum(parts, start=bias), atol=1e-5)
    return False


def defer_bias(module: nn.Module) -> None:
    """Make `module` add its bias once, after any reduction; it stays the same object."""
    if not has_bias(module) or is_deferring(module):
        return
    module.__class__ = _deferring_class(type(module))


def defer_bias_as(old: nn.Module, new: nn.Module) -> None:
    """Make `new` add its bias after the reductions of `old`, if its forward is known."""
    before, after = sharding_of(old), sharding_of(new)
    if is_deferring(old) and has_bias(new) and is_deferrable(new):
        assert before is not None, "it defers"
        assert after is not None, "it has the slices of the other"
        defer_bias(new)
        after.reducers, before.reducers, after.bias_part = before.reducers, (), before.bias_part


def can_reduce(module: nn.Module) -> bool:
    """Return True if a reduction fits between the product and the bias of `module`.

    Other forward hooks exclude it, because they would no longer run in the order of registration.
    """
    state = sharding_of(module)
    reduces = state is not None and bool(state.reducers)
    return is_deferring(module) and not (reduces or module._forward_hooks)


def add_reducer(
    module: nn.Module,
    reduce: Reducer,
    scatter_axis: int | None = None,
    group: GroupHandle | None = None,
    is_tied: bool = False,
) -> None:
    """Call `reduce` on the product of a deferring module, before its bias."""
    state = sharding_of(module)
    assert state is not None, "a deferring module is sharded"
    state.reducers = (reduce,)
    channel_axis = -1 - type(module)._bias_dims  # type: ignore[attr-defined]
    # After a reduce_scatter each rank adds the bias to its own tokens, so its gradient is partial;
    # along the channels, it adds its part of the bias.
    if scatter_axis is not None and group is not None:
        state.bias_part = _BiasPart(scatter_axis, channel_axis, group, sums=is_tied)
        if not is_tied:
            state.tag(module, "bias", PARTIAL_GRAD[0], True)


@dataclass(frozen=True)
class _BiasPart:
    """This rank's bias for its slice of the sum along `axis`; its gradient is then partial."""

    axis: int
    channel_axis: int
    group: GroupHandle
    #: true if the gradients are summed here, not with the parameter's full gradient
    sums: bool

    def __call__(self, bias: Tensor, dims: int) -> Tensor:
        if self.sums:
            bias = copy_to_group(bias, self.group.group)
        if self.axis % dims != self.channel_axis % dims:
            return bias
        group = self.group.group
        spec = make_spec(bias.shape, Cut(0), group_rank(group), group_size(group))
        return own_part(bias, spec, self.group)


def _known_product(cls: type[nn.Module]) -> tuple[Product, int, Product] | None:
    for base in cls.__mro__:
        known = _PRODUCTS.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            if cls.forward is base.forward:  # type: ignore[attr-defined]
                return known
            # Such as those of Whisper and timm, which cast the weight. See _sums_over_inputs().
            return (_without_bias, 0, _leave) if base is nn.Linear else None
    return None


def _deferring_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _CLASSES:
        known = _known_product(cls)
        assert known is not None, "is_deferrable() was asked before"
        body = dict(zip(("_product", "_bias_dims", "_finish"), known, strict=True))
        body |= {"_original": cls, "__module__": cls.__module__}
        made: Any = _DeferringClass(cls.__name__, (PartialSumMixin, cls), body)
        _CLASSES[cls] = made
    return _CLASSES[cls]
