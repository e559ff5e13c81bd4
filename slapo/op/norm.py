"""Norms of language models by torch's fused function, with the numbers of the originals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.op import liger
from slapo.op.dispatch import is_plain

#: What modules call the number that is added to the mean of squares.
_EPSILONS = ("variance_epsilon", "eps")


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the last dimension, rounded where Transformers' modules round.

    ``weight * cast(x / sqrt(mean(x ** 2) + eps))`` for Llama and its kin, which cast from float32
    to the type of the input before they multiply; with an offset
    ``cast((offset + weight) * x / sqrt(mean(x ** 2) + eps))``, as Gemma, which casts at the end.
    T5's casts to the type of the weight instead of the input's.
    Where torch needs several kernels for that, on CUDA that of liger-kernel is used, if installed.

    Parameters
    ----------
    hidden_size
        Of the last dimension.
    eps
        Added to the mean of squares.
    offset
        Added to the weight: 1.0 for Gemma.
    casts_to_weight
        Whether the norm is cast to the type of the weight before they multiply.
    device, dtype
        Of the weight.

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
            A norm with a parameter ``weight`` of one dimension, and its epsilon as
            ``variance_epsilon`` or ``eps``.
        offset, casts_to_weight
            As for the class.

        Raises
        ------
        ValueError
            If it has no such weight, or no epsilon.
        """
        weight = module._parameters.get("weight")
        eps = next((getattr(module, n) for n in _EPSILONS if hasattr(module, n)), None)
        others = [name for name in module._parameters if name != "weight"]
        others += ["forward"] if "forward" in vars(module) else []
        if weight is None or weight.dim() != 1 or not isinstance(eps, float) or others:
            shape = None if weight is None else tuple(weight.shape)
            raise ValueError(
                f"RMSNorm.like({type(module).__name__}): weight of shape {shape}, eps {eps} and "
                f"of its own beside them {others}; pass a norm with a weight of one dimension "
                f"alone, and a number as one of {list(_EPSILONS)}"
            )
        with torch.device("meta"):
            new = cls(weight.numel(), eps, offset, casts_to_weight)
        new.weight = weight
        new.training = module.training
        return new

    def forward(self, x: Tensor) -> Tensor:
        """``(..., hidden_size)`` -> the same; mixed types promote as in the originals."""
        shape = self.normalized_shape
        # Where torch has no single kernel, and liger-kernel one of the same roundings.
        has_no_kernel = self.offset or x.dtype == self.weight.dtype != torch.float32
        if has_no_kernel and self.eps is not None and liger.fits(x) and is_plain(self.weight):
            return liger.rms_norm(x, self.weight, self.eps, self.offset)
        if self.offset:
            scale = self.offset + self.weight.float()
            return F.rms_norm(x.float(), shape, scale, self.eps).to(x.dtype)
        if x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, shape, self.weight, self.eps)
        dtype = self.weight.dtype if self.casts_to_weight else x.dtype
        return self.weight * F.rms_norm(x.float(), shape, None, self.eps).to(dtype)

    def extra_repr(self) -> str:
        """Sizes, and the offset where there is one."""
        return super().extra_repr() + (f", offset={self.offset}" if self.offset else "")
