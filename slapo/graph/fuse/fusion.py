"""Fusion: a subgraph becomes one module that a compiler has worked on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.fx as fx
from torch import nn

from slapo.graph.fuse.extract import extract
from slapo.graph.fuse.inductor import compile_late
from slapo.graph.fuse.sequential import sequential_of
from slapo.graph.fuse.torchscript import script
from slapo.graph.rewrite.replace import check_closed

Compiler = Callable[[fx.GraphModule, str], nn.Module]


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
        If the compiler is unknown, there are several subgraphs, or the chain is not closed.
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
        known = ", ".join(map(repr, COMPILERS))
        raise ValueError(f"unknown compiler {compiler!r}; the known ones are {known}")
    if not nodes:
        raise ValueError("the subgraph is empty; hand over one of those that find() returned")
    if any(isinstance(node, (list, tuple)) for node in nodes):
        raise ValueError(
            f"fuse takes one subgraph, got {len(nodes)}; fuse them one by one, or replace them "
            "horizontally by a module of your own"
        )
    check_closed(nodes)
    return COMPILERS[compiler](extract(gm, nodes, name), name)


def _by_torchscript(module: fx.GraphModule, name: str) -> nn.Module:
    """Script a module."""
    return script(module, name)


def _by_inductor(module: fx.GraphModule, name: str) -> nn.Module:
    """Let ``torch.compile`` translate a module when it is first called."""
    return compile_late(module, name)


def _as_sequential(module: fx.GraphModule, name: str) -> nn.Module:
    """Leave the operations as they are, one child for each."""
    return sequential_of(module, name)


COMPILERS: dict[str | None, Compiler] = {
    "TorchScript": _by_torchscript,
    "inductor": _by_inductor,
    None: _as_sequential,
}
"""The compilers that :func:`fuse_subgraph` knows. Each makes a module from an extracted one."""
