"""Fusion: a subgraph becomes one module that a compiler has worked on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.fx as fx
from torch import nn

from slapo.errors import with_nearest
from slapo.graph.fuse.extract import extract
from slapo.graph.fuse.inductor import compile_late
from slapo.graph.fuse.sequential import sequential_of
from slapo.graph.fuse.torchscript import script
from slapo.graph.rewrite.may_move import may_move
from slapo.graph.rewrite.subgraph import check_closed, in_order

Compiler = Callable[[fx.GraphModule, str], nn.Module]

COMPILERS: dict[str | None, Compiler] = {
    "TorchScript": script,
    "inductor": compile_late,
    None: sequential_of,
}
"""The compilers that :func:`fuse_subgraph` knows. Each makes a module from an extracted one."""


def fuse_subgraph(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    compiler: str | None = "TorchScript",
    name: str = "FusedModule",
) -> nn.Module:
    """Compile a chain of operations into one module.

    The graph stays as it is; ``replace_vertical`` puts the module in.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of the graph.
    nodes : sequence of torch.fx.Node
        The chain. Only its last value may be used outside.
    compiler : {"TorchScript", "inductor", None}
        ``"TorchScript"`` gives a ``torch.jit.ScriptModule``, ``"inductor"`` a module that
        ``torch.compile`` translates when it is first called, and None a plain
        ``nn.Sequential`` that runs the operations one by one.
    name : str, default "FusedModule"
        Name of the new module's class.

    Returns
    -------
    torch.nn.Module
        A module that takes the inputs of the chain in order of first use. Parameters and buffers
        are the same objects as before.

    Raises
    ------
    ValueError
        If the compiler is unknown, there are several subgraphs, the chain is not closed, or an
        operation may not move to the place of the last one.
    SlapoError
        If the compiler cannot translate the chain.

    Examples
    --------
    >>> import torch.nn.functional as F
    >>> gm = fx.symbolic_trace(lambda x, b: F.gelu(x + b))
    >>> chain = [n for n in gm.graph.nodes if n.op == "call_function"]
    >>> fuse_subgraph(gm, chain, compiler=None, name="BiasGelu")
    BiasGelu(
      (0): Call(add)
      (1): Call(gelu)
    )
    """
    if compiler not in COMPILERS:
        names = [name for name in COMPILERS if name is not None]
        known = with_nearest(str(compiler), names, f"known are {', '.join(map(repr, COMPILERS))}")
        raise ValueError(f"unknown compiler {compiler!r}; {known}")
    if any(isinstance(node, (list, tuple)) for node in nodes):
        raise ValueError(
            f"fuse takes one subgraph, got {len(nodes)}; fuse them one by one, or replace them "
            "horizontally by a module of your own"
        )
    chain = in_order(gm, nodes)
    check_closed(chain)
    may_move(gm, chain, chain[-1])  # before a compiler works in vain
    return COMPILERS[compiler](extract(gm, chain, name), name)
