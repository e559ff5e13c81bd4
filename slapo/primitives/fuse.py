"""``.fuse(subgraph)``."""

from __future__ import annotations

from typing import Any, Literal

from slapo.graph.fuse.fusion import Fuse
from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.primitives.replace import rewrite_subgraphs
from slapo.primitives.subgraphs import check_hooks, parse_one


class FusePrimitive(Primitive, name="fuse"):
    """Compile the operations of one subgraph into one module.

    ``b = x + bias; c = gelu(b) --> c = FusedModule_0(x, bias)``

    Parameters
    ----------
    subgraph
        One vertical match of ``find``, or the list returned by ``find`` if it holds one match.
    compiler
        ``"TorchScript"``, ``"inductor"``, or None for a plain ``nn.Sequential``. Inductor compiles
        instead if torch has no TorchScript.
    name
        Prefix of the fused module's name, ``<name>_<k>``, with the first free k.

    Raises
    ------
    ValueError
        For an unknown compiler, several subgraphs, inner values that are used outside, or an
        operation that may not move (see :func:`slapo.graph.rewrite.reorder.check_reorder`).
    RuntimeError
        If a hook of a fused module would be lost.
    SlapoError
        If the compiler rejects the operations.

    Examples
    --------
    >>> import torch, slapo
    >>> class Block(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = torch.nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         return torch.nn.functional.gelu(self.fc(x))
    >>> sch = slapo.create_schedule(Block())
    >>> _ = sch["fc"].decompose()
    >>> match = sch.find(lambda x, bias: torch.nn.functional.gelu(bias + x))
    >>> list(sch.fuse(match, name="BiasGeLU").child)
    ['fc', 'BiasGeLU_0']
    """

    @staticmethod
    def apply(
        sch: Node,
        /,
        subgraph: Any,
        compiler: Literal["TorchScript", "inductor"] | None = "TorchScript",
        name: str = "FusedModule",
    ) -> Node:
        subgraphs = parse_one(sch, subgraph)
        check_hooks(subgraphs, keeps_hooks=True, scripted=compiler == "TorchScript")
        rule = Fuse(subgraphs.gm, subgraphs.chains[0], compiler, name, subgraphs.picks[0])
        rewrite_subgraphs(rule, rule.made, subgraphs)
        return sch
