"""Fusion: a subgraph becomes one module that a compiler has worked on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.fx as fx
from torch import nn

from slapo.errors import TraceError, with_nearest
from slapo.graph.fuse.extract import extract, python_type
from slapo.graph.fuse.modules import compiled_late, sequential_of
from slapo.graph.fuse.torchscript import script
from slapo.graph.match.subgraph_view import subgraph_view
from slapo.graph.rewrite.effects import HasGraph
from slapo.graph.rewrite.plan import subgraph_inputs
from slapo.graph.rewrite.rules import MadePerText, Pick

Compiler = Callable[[fx.GraphModule, str], nn.Module]

COMPILERS: dict[str | None, Compiler] = {
    "TorchScript": script,
    "inductor": compiled_late,
    None: sequential_of,
}
"""The compilers of :class:`Fuse`. Each makes a module from an extracted one."""


class Fuse(MadePerText):
    """One compiled module instead of a chain of operations.

    It takes the inputs of the chain in order of first use, weights that the graph looks up among
    them; modules that the chain calls become its children, the same objects as before.

    Parameters
    ----------
    module, chain, pick
        As for :class:`.rules.Rule`. Only the last value of the chain may be used outside.
    compiler : {"TorchScript", "inductor", None}
        ``"TorchScript"`` gives a ``torch.jit.ScriptModule``, ``"inductor"`` a module that
        ``torch.compile`` translates when it is first called, and None a plain ``nn.Sequential``
        that runs the operations one by one.
    name : str
        Name of the module's class, and stem of the child's name.

    Raises
    ------
    SlapoError
        If the compiler cannot translate the chain.

    Examples
    --------
    >>> import torch.nn.functional as F
    >>> gm = fx.symbolic_trace(lambda x, b: F.gelu(x + b))
    >>> chain = [n for n in gm.graph.nodes if n.op == "call_function"]
    >>> Fuse(gm, chain, compiler=None, name="BiasGelu").made
    BiasGelu(
      (0): Call(add)
      (1): Call(gelu)
    )
    """

    def __init__(
        self,
        module: fx.GraphModule,
        chain: Sequence[fx.Node],
        compiler: str | None = "TorchScript",
        name: str = "FusedModule",
        pick: Pick | None = None,
    ) -> None:
        if compiler not in COMPILERS:
            names = [name for name in COMPILERS if name is not None]
            known = f"known are {', '.join(map(repr, COMPILERS))}"
            raise ValueError(
                f"unknown compiler {compiler!r}; {with_nearest(str(compiler), names, known)}"
            )
        if any(isinstance(node, (list, tuple)) for node in chain):
            raise ValueError(
                f"fuse takes one subgraph, got {len(chain)}; fuse them one by one, or replace them "
                "horizontally by a module of your own"
            )
        self.compiler, self.paths = compiler, dict[str, str]()
        calls = [node for node in chain if getattr(node, "op", "") != "get_attr"]
        super().__init__(module, calls, name, pick if len(calls) == len(chain) else None)

    def __str__(self) -> str:
        return f"the fusion {self.stem} at {self.location}"

    def _make(self, gm: HasGraph, home: nn.Module, chain: list[fx.Node]) -> nn.Module:
        called = [str(node.target) for node in chain if node.op == "call_module"]
        if self.shown and called:  # the first has them, with their state and their mode
            return self._over_first(home, chain)
        part, paths = extract(gm, chain, self.stem, home.training)
        if not self.shown:
            by_order = {str(node.target): str(k) for k, node in enumerate(chain)}
            self.paths = paths if self.compiler is not None else {p: by_order[p] for p in called}
        return COMPILERS[self.compiler](part, self.stem)

    def _over_first(self, home: nn.Module, chain: list[fx.Node]) -> nn.Module:
        """The operations one by one, over the modules that the shown fusion has taken in."""
        view = subgraph_view(home, chain, subgraph_inputs(chain))
        for node in view.graph.find_nodes(op="call_module"):
            if node.target not in self.paths:
                raise TraceError(f"{self} has taken in no {node.target}, which is called here")
            node.target = f"{self.shown}.{self.paths[str(node.target)]}"
        view.recompile()
        return view

    def _text(self, gm: HasGraph, chain: list[fx.Node]) -> str:
        types = [str(python_type(value, gm)) for value in subgraph_inputs(chain)]
        return "\n".join([", ".join(types), super()._text(gm, chain)])
