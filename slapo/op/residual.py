"""The end of each half of a post-norm transformer layer: dropout, residual and layer norm."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.errors import MissingPackageError
from slapo.hooks import has_forward_hooks
from slapo.op.dispatch import is_plain
from slapo.op.mlp import SameChildren

_BACKENDS = ("torch", "triton")
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: One program of the kernel holds a row in its registers.
_MAX_HIDDEN = 8192


def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    p: float = 0.0,
    training: bool = True,
    eps: float = 1e-5,
    backend: str = "torch",
) -> Tensor:
    """Compute ``layer_norm(residual + dropout(x))``, on request by one CUDA kernel each way.

    Parameters
    ----------
    x
        Output of a sublayer, ``(..., hidden)``.
    residual
        Input of that sublayer, of the same shape.
    weight, bias
        Parameters of the norm, ``(hidden,)``.
    p
        Probability that an element of `x` is zeroed.
    training
        Apply dropout.
    eps
        Added to the variance.
    backend
        ``"torch"``: operations of torch. ``"triton"``: a kernel for CUDA, float32, float16 and
        bfloat16, and up to 8192 features. It has not been timed on a GPU yet.

    Returns
    -------
    Tensor
        The norm, ``(..., hidden)``.

    Raises
    ------
    ValueError
        If shapes do not match, or the backend does not support these tensors.
    MissingPackageError
        If the backend is not installed.

    Notes
    -----
    The kernel does not store its dropout mask. The backward pass recomputes it from one value of
    torch's generator on the device, so forked random states and checkpoints work as usual. The
    mask differs from the one that ``F.dropout`` draws from the same state.

    Examples
    --------
    >>> x, residual = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    >>> out = dropout_add_norm(x, residual, torch.ones(4), torch.zeros(4))
    >>> torch.allclose(out, F.layer_norm(residual + x, (4,)))
    True
    """
    if backend not in _BACKENDS:
        raise ValueError(
            f"dropout_add_norm: unknown backend {backend!r}; pass one of {list(_BACKENDS)}"
        )
    if x.dim() == 0 or x.shape != residual.shape:
        raise ValueError(
            f"dropout_add_norm: x has shape {tuple(x.shape)} and residual "
            f"{tuple(residual.shape)}; pass two tensors of shape (..., hidden)"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"dropout_add_norm: {name} has shape {tuple(vector.shape)}; pass "
                f"{tuple(x.shape[-1:])}, one value for each feature of x"
            )
    p = p if training else 0.0
    if backend == "triton":
        error = _unsupported(x, residual, weight, bias)
        if error is not None:
            raise error
        return _by_triton(x, residual, weight, bias, p, eps)
    total = F.dropout(x, p) + residual
    # F.layer_norm requires parameters of its input's dtype or a wider one.
    weight = weight.to(torch.promote_types(weight.dtype, total.dtype))
    bias = None if bias is None else bias.to(weight.dtype)
    return F.layer_norm(total, total.shape[-1:], weight, bias, eps)


def _unsupported(*operands: Tensor | None) -> Exception | None:
    """Error of the kernel for these tensors, or None; the first one defines the features."""
    if importlib.util.find_spec("triton") is None:
        return MissingPackageError(
            "backend 'triton' needs the package 'triton': pip install 'slapo[kernels]'"
        )
    tensors = [each for each in operands if each is not None]
    hidden, device = tensors[0].shape[-1], tensors[0].device
    types = {each.dtype for each in tensors}
    runs = device.type == "cuda" and not torch.version.hip
    runs |= device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    is_one = all(each.device == device for each in tensors)
    if runs and is_one and types.issubset(_TYPES) and 0 < hidden <= _MAX_HIDDEN:
        return None
    return ValueError(
        f"dropout_add_norm: backend 'triton' got {hidden} features of {sorted(map(str, types))} on "
        f"{sorted({str(each.device) for each in tensors})}; it supports one CUDA device, float16, "
        f"bfloat16 and float32, and 1 to {_MAX_HIDDEN} features. Pass backend='torch'"
    )


def _by_triton(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, p: float, eps: float
) -> Tensor:
    from slapo.op.residual_triton import DropoutAddNorm  # importing Triton takes a second

    out_type = torch.promote_types(x.dtype, residual.dtype)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        out_type = torch.float32  # autocast runs torch's norm in float32
    # Drawn on the device, from the random state set by a fork or a checkpoint.
    seed = torch.randint(2**63 - 1, (1,), device=x.device) if p > 0 else None
    out = DropoutAddNorm.apply(x, residual, weight, bias, seed, float(p), eps, out_type)
    return cast(Tensor, out)


class DenseDropoutAddNorm(SameChildren):
    """``LayerNorm(dropout(dense(x)) + residual)``, the end of each half of a BERT layer.

    Calls its children one by one. With ``backend = "triton"`` one kernel each way runs everything
    after `dense` (:func:`dropout_add_norm`), if it supports the tensors. Children with hooks,
    wrappers or other classes are still called, and so are all children in a trace and under
    ``torch.compile``.

    Parameters
    ----------
    in_features
        Features of the input of `dense`.
    hidden_size
        Features of its output, and of the residual.
    p
        Probability of the dropout.
    eps
        Added to the variance by the norm.
    device, dtype
        Device and dtype of the parameters.

    Attributes
    ----------
    backend : str
        ``"torch"``, or ``"triton"``; set it on the class for all modules, or on one module.

    Examples
    --------
    >>> block = DenseDropoutAddNorm(4, 8)
    >>> block(torch.ones(2, 3, 4), torch.ones(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    parts = ("dense", "LayerNorm", "dropout")
    backend = "torch"

    def __init__(
        self,
        in_features: int,
        hidden_size: int,
        p: float = 0.1,
        eps: float = 1e-12,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dense: nn.Module = nn.Linear(in_features, hidden_size, device=device, dtype=dtype)
        self.LayerNorm: nn.Module = nn.LayerNorm(hidden_size, eps, device=device, dtype=dtype)
        self.dropout: nn.Module = nn.Dropout(p)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Return the norm, of the shape of the residual `input_tensor`."""
        states: Tensor = self.dense(hidden_states)
        norm: Any = self.LayerNorm
        dropout: Any = self.dropout
        if not self._is_fused(states, input_tensor):
            return cast(Tensor, norm(dropout(states) + input_tensor))
        p = dropout.p if dropout.training else 0.0
        return _by_triton(states, input_tensor, norm.weight, norm.bias, p, norm.eps)

    def _is_fused(self, states: Tensor, residual: Tensor) -> bool:
        norm: Any = self.LayerNorm
        if self.backend == "torch" or not (
            _is_unchanged(norm, nn.LayerNorm) and _is_unchanged(self.dropout, nn.Dropout)
        ):
            return False
        operands = (states, residual, *norm.parameters())
        return (
            is_plain(*operands)
            and norm.weight is not None
            and norm.weight.shape == states.shape[-1:]
            and states.shape == residual.shape
            and _unsupported(*operands) is None
        )


def _is_unchanged(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Return True if a call runs only the forward of `cls`, without hooks that gather."""
    forward = getattr(module.forward, "__func__", None)
    return type(module) is cls and forward is cls.forward and not has_forward_hooks(module)
