"""``.decompose()``."""

from __future__ import annotations

from torch import fx, nn

from slapo.errors import SlapoError
from slapo.node import Node
from slapo.op.linear import LinearWithSeparateBias
from slapo.primitives.base import Primitive
from slapo.primitives.replace import replace_module
from slapo.sharding.partial import is_deferring
from slapo.sharding.state import copy_shards, shards_of
from slapo.wrapper import innermost


class DecomposePrimitive(Primitive, name="decompose"):
    """Split a linear layer into product and bias addition, so that the addition can be fused.

    ``F.linear(x, weight, bias) --> F.linear(x, weight) + bias``

    The parameters remain the same objects under the same names, and hooks move along. A later trace
    shows both operations.

    Raises
    ------
    ValueError
        If the module is not an ``nn.Linear``, has no bias, is decomposed already, or holds only a
        slice of a parameter.

    Examples
    --------
    >>> import torch, slapo
    >>> sch = slapo.create_schedule(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    >>> sch["0"].decompose().mod
    LinearWithSeparateBias(in_features=2, out_features=2, bias=True)
    """

    @staticmethod
    def apply(sch: Node, /) -> Node:
        module = innermost(sch.mod)
        if isinstance(module, LinearWithSeparateBias):
            raise ValueError("the layer is decomposed already; leave the second call out")
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"only nn.Linear can be decomposed, not {type(module).__name__}; write your own "
                "module and use .replace()"
            )
        if module.bias is None:
            raise ValueError("the layer has no bias to separate; leave the call out")
        _check_not_in_graph(sch)
        slices = [n for n in shards_of(module) if _is_smaller(module.get_parameter(n))]
        if slices:
            raise ValueError(
                f"the layer is sharded already ({', '.join(slices)}); "
                "call .decompose() before .shard()"
            )
        # A layer that defers its bias behind a reduction has a forward of this library.
        if type(module).forward is not nn.Linear.forward and not is_deferring(module):
            raise ValueError(
                f"{type(module).__name__} has its own forward, which would be lost; write your own "
                "module and use .replace()"
            )
        new = LinearWithSeparateBias.from_linear(module)
        copy_shards(module, new)
        replace_module(sch, new)
        return sch


def _is_smaller(param: nn.Parameter) -> bool:
    """Return True for a proper slice; in a world of one, a slice is the full tensor."""
    return param.shape != getattr(param, "orig_shape", param.shape)


def _check_not_in_graph(sch: Node) -> None:
    """Raise if an ancestor is traced already: its graph calls the layer as one operation."""
    for node in sch.ancestors():
        if isinstance(innermost(node.mod), fx.GraphModule):
            raise SlapoError(
                f"{node.where} was traced with the layer as one call, and its graph would not "
                "change; decompose before tracing"
            )
