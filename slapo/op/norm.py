"""Norms of language models by torch's fused function, rounded like the originals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.op import liger
from slapo.op.dispatch import is_plain

#: Names that modules use for the epsilon added to the mean of squares.
_EPSILONS = ("variance_epsilon", "eps")


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the last dimension, with the rounding of Transformers' modules.

    ``weight * cast(x / sqrt(mean(x ** 2) + eps))`` for Llama and similar models, which cast from
    float32 to the input's dtype before the multiplication. With an offset ``cast((offset + weight)
    * x / sqrt(mean(x ** 2) + eps))``, as in Gemma, which casts at the end. T5 casts to the weight's
    dtype instead of the input's.

    If torch needs several kernels, liger-kernel's kernel is used on CUDA, if installed.

    Parameters
    ----------
    hidden_size
        Size of the last dimension.
    eps
        Added to the mean of squares.
    offset
        Added to the weight: 1.0 for Gemma.
    casts_to_weight
        Cast the normalized input to the weight's dtype before the multiplication.
    device, dtype
        Device and dtype of the weight.

    Notes
    -----
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    Examples
    --------
    >>> RMSNorm(4)(torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
    tensor([[ 1.0000, -1.0000,  1.0000, -1.0000]], grad_fn=...)
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casts_to_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)
        self.offset, self.casts_to_weight = offset, casts_to_weight

    @classmethod
    def like(cls, module: nn.Module, offset: float = 0.0, casts_to_weight: bool = False) -> RMSNorm:
        """Build the same norm around the parameter object of `module`.

        Parameters
        ----------
        module
            A norm with a parameter ``weight`` of one dimension, and an epsilon named
            ``variance_epsilon`` or ``eps``.
        offset, casts_to_weight
            As for the class.

        Raises
        ------
        ValueError
            If the weight or the epsilon is missing or invalid, or if `module` has further
            parameters or a forward set on the object.
        """
        weight = module._parameters.get("weight")
        eps = next((getattr(module, n) for n in _EPSILONS if hasattr(module, n)), None)
        others = [name for name in module._parameters if name != "weight"]
        others += ["forward"] if "forward" in vars(module) else []
        if weight is None or weight.dim() != 1 or not isinstance(eps, float) or others:
            shape = None if weight is None else tuple(weight.shape)
            raise ValueError(
                f"RMSNorm.like({type(module).__name__}): weight of shape {shape}, eps {eps} and "
                f"other attributes {others}; pass a norm with only a one-dimensional weight, and "
                f"a number as one of {list(_EPSILONS)}"
            )
        # The weight is replaced at once, so none is allocated.
        with torch.device("meta"):
            new = cls(weight.numel(), eps, offset, casts_to_weight)
        new.weight = weight
        new.training = module.training
        return new

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``(..., hidden_size)``; mixed dtypes promote as in the originals."""
        shape = self.normalized_shape
        # Torch has no single kernel for this, and liger-kernel has one with the same rounding.
        has_no_kernel = self.offset or x.dtype == self.weight.dtype != torch.float32
        if has_no_kernel and self.eps is not None and liger.fits(x) and is_plain(self.weight):
            return liger.rms_norm(x, self.weight, self.eps, self.offset)
        if self.offset:
            # In float32: half precision would round small offsets from 1 away.
            scale = self.offset + self.weight.float()
            return F.rms_norm(x.float(), shape, scale, self.eps).to(x.dtype)
        if x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, shape, self.weight, self.eps)
        # Rounded before the product with the weight, where Llama rounds.
        dtype = self.weight.dtype if self.casts_to_weight else x.dtype
        return self.weight * F.rms_norm(x.float(), shape, None, self.eps).to(dtype)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", offset={self.offset}" if self.offset else "")
