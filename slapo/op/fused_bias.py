"""Bias additions fused with the following operation, and the supported activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.scripting import script

Activation = Callable[[Tensor], Tensor]


def new_gelu(x: Tensor) -> Tensor:
    """GeLU in its tanh approximation, like GPT-2's ``gelu_new`` but in one operation.

    Examples
    --------
    >>> new_gelu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1588,  0.0000,  0.8412])
    """
    return F.gelu(x, approximate="tanh")


def bias_new_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """``new_gelu(x + bias)``.

    Parameters
    ----------
    x
        ``(..., features)``.
    bias
        ``(features,)``.

    Examples
    --------
    >>> bias_new_gelu(torch.zeros(1, 2), torch.tensor([0.0, 1.0]))
    tensor([[0.0000, 0.8412]])
    """
    return F.gelu(x + bias, approximate="tanh")


def bias_dropout(x: Tensor, bias: Tensor, p: float, training: bool) -> Tensor:
    """``dropout(x + bias, p, training)``.

    Parameters
    ----------
    x
        ``(..., features)``.
    bias
        ``(features,)``.
    p
        Probability that an element is zeroed, from 0 to 1.
    training
        Apply dropout.

    Examples
    --------
    >>> bias_dropout(torch.zeros(1, 2), torch.ones(2), 0.5, training=False)
    tensor([[1., 1.]])
    """
    return F.dropout(x + bias, p, training)


class BiasGeLUFunction(torch.autograd.Function):
    """``BiasGeLUFunction.apply(x, bias)``: :func:`bias_new_gelu` without storing the sum.

    The backward pass recomputes the sum, so only `x` and `bias` are saved.

    Examples
    --------
    >>> x, bias = torch.zeros(1, 2, requires_grad=True), torch.tensor([0.0, 1.0])
    >>> BiasGeLUFunction.apply(x, bias).sum().backward()
    >>> x.grad
    tensor([[0.5000, 1.0830]])
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        """Map ``(..., features)`` and ``(features,)`` to ``(..., features)``."""
        ctx.save_for_backward(x, bias)
        return bias_new_gelu(x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, bias = ctx.saved_tensors
        # Differentiable operations on saved inputs, so that gradients of this gradient are right.
        own = torch.ops.aten.gelu_backward(grad, x + bias, approximate="tanh")
        wants_x, wants_bias = ctx.needs_input_grad
        of_x = own.sum_to_size(x.shape) if wants_x else None
        return of_x, own.sum_to_size(bias.shape) if wants_bias else None


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _identity(x: Tensor) -> Tensor:
    return x


#: Activations by their names in Transformers configs.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": new_gelu,
    "gelu_fast": new_gelu,
    "gelu_pytorch_tanh": new_gelu,
    "gelu_python": F.gelu,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _squared_relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "swish": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "linear": _identity,
}


def activation(act: str | Activation) -> Activation:
    """Return the activation for a name; functions and modules are returned unchanged."""
    if isinstance(act, str):
        if act not in ACTIVATIONS:
            raise ValueError(
                f"no activation is called {act!r}; pass one of {sorted(ACTIVATIONS)}, or a function"
            )
        return ACTIVATIONS[act]
    return act


#: Modules outside torch by qualified name, so that nothing is imported for them.
_FOREIGN = {f"transformers.activations.{n}" for n in ("NewGELUActivation", "GELUTanh")}


def is_new_gelu(act: Activation) -> bool:
    """Return True for the tanh approximation, which can be fused with a bias."""
    if isinstance(act, nn.GELU):
        return act.approximate == "tanh"
    return act is new_gelu or f"{type(act).__module__}.{type(act).__qualname__}" in _FOREIGN


@functools.cache
def scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile by TorchScript; cached here, as modules that hold the result cannot be copied."""
    return cast(Callable[..., Tensor], script(function))
