"""A module that prints, for a look into traced models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor


class Print(nn.Module):
    """Prints values at run time and passes the first one on.

    In a trace it stays a call, so that what is printed is of the run; also where nothing uses what
    it returns. A string that the forward formats itself is formatted while the graph is made, and
    prints as it is: pass the values on their own.

    Examples
    --------
    >>> import torch
    >>> x = Print()(torch.ones(2), "after the norm:")
    after the norm: tensor([1., 1.])
    >>> x = Print()(x, "shape", x.shape, "mean", x.mean(), "of")
    shape torch.Size([2]) mean tensor(1.) of tensor([1., 1.])
    """

    #: A graph would hold what was printed while it was made.
    traceable = False
    #: For torch.fx: a call without users is not to be dropped.
    _is_impure = True

    def forward(self, x: Tensor, *values: Any, message: str = "") -> Tensor:
        """``x`` of any shape -> the same. The values are printed in order, and then ``x``."""
        return show(x, *([message] if message else []), *values)


@torch.fx.wrap
def show(x: Tensor, *values: Any) -> Tensor:
    """The function that a graph calls where a forward makes a :class:`Print` of its own."""
    if not isinstance(x, FakeTensor):  # a graph is made of it
        print(*values, x)
    return x


fx.node.has_side_effect(show)
