"""``.fork_rng()``."""

from __future__ import annotations

from slapo.node import Node
from slapo.op.checkpoint import ForkRNGWrapper
from slapo.primitives.base import Primitive
from slapo.primitives.wrapping import check_not_wrapped, wrap


class ForkRNGPrimitive(Primitive, name="fork_rng"):
    """Run a module's forward under the tensor-parallel random state.

    ``mod(x) --> with get_rng_tracker().fork(): mod(x)``

    Dropout on a sharded activation must draw a different mask on every rank; dropout on a
    replicated activation must draw the same mask. Fork the former. Call
    :func:`slapo.set_random_seed` before the forward.

    Raises
    ------
    ValueError
        If the module's forward is forked already.

    Examples
    --------
    >>> import torch, slapo
    >>> slapo.set_random_seed(1)
    >>> sch = slapo.create_schedule(torch.nn.Sequential(torch.nn.Dropout(0.5)))
    >>> sch["0"].fork_rng().mod(torch.ones(2)).shape
    torch.Size([2])
    """

    @staticmethod
    def apply(sch: Node, /) -> Node:
        check_not_wrapped(sch, ForkRNGWrapper)
        wrap(sch, ForkRNGWrapper(sch.mod))
        sch.metadata.primitives["fork_rng"]["enabled"] = True
        return sch
