"""``.fork_rng()``."""

from __future__ import annotations

from slapo.node import Node
from slapo.op.checkpoint import ForkRNGWrapper
from slapo.primitives.base import Primitive
from slapo.primitives.wrapping import wrap
from slapo.wrapper import ModuleWrapper


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
        module = sch.mod
        while isinstance(module, ModuleWrapper):
            if isinstance(module, ForkRNGWrapper):
                raise ValueError(
                    "the module's forward is under fork_rng already; leave the second call out"
                )
            module = module.mod
        wrap(sch, ForkRNGWrapper(sch.mod))
        sch.metadata.primitives["fork_rng"]["enabled"] = True
        return sch
