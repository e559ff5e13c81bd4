"""A module that prints, for a look into traced models."""

from __future__ import annotations

from torch import Tensor, nn


class Print(nn.Module):
    """Prints a value at run time and passes it on.

    In a trace it stays a call, so that what is printed is of the run; also where nothing uses what
    it returns.

    Examples
    --------
    >>> import torch
    >>> Print()(torch.ones(2), "after the norm:") + 1
    after the norm: tensor([1., 1.])
    tensor([2., 2.])
    """

    #: A graph would hold what was printed while it was made.
    traceable = False
    #: For torch.fx: a call without users is not to be dropped.
    _is_impure = True

    def forward(self, x: Tensor, message: str = "") -> Tensor:
        """``x`` of any shape -> the same."""
        print(f"{message} {x}" if message else f"{x}")
        return x
