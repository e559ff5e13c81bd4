"""A module that prints values of traced models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor


class Print(nn.Module):
    """Prints values at run time and returns the first one.

    It stays a call in a trace, even if its result is unused, so each run prints its own values. A
    string formatted in the forward is fixed when the graph is made; pass the values separately.

    Examples
    --------
    >>> import torch
    >>> x = Print()(torch.ones(2), "after the norm:")
    after the norm: tensor([1., 1.])
    >>> x = Print()(x, "shape", x.shape, "mean", x.mean(), "of")
    shape torch.Size([2]) mean tensor(1.) of tensor([1., 1.])
    """

    #: Inlined, it would print only while the graph is made.
    traceable = False
    #: For torch.fx: dead code elimination must keep a call without users.
    _is_impure = True

    def forward(self, x: Tensor, *values: Any, message: str = "") -> Tensor:
        """Print the values in order, then ``x`` of any shape; return ``x``."""
        return show(x, *([message] if message else []), *values)


@torch.fx.wrap
def show(x: Tensor, *values: Any) -> Tensor:
    """The function that a graph calls if a forward creates its own :class:`Print`."""
    if not isinstance(x, FakeTensor):  # a trace in progress
        print(*values, x)
    return x


fx.node.has_side_effect(show)
