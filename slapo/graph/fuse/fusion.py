"""Fusion: replace a subgraph by one compiled module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx
from torch import nn

from slapo.errors import TraceError
from slapo.graph.fuse.modules import compiled_late, sequential_of
from slapo.graph.fuse.torchscript import has_state, script
from slapo.graph.match.subgraph_view import subgraph_view
from slapo.graph.rewrite.effects import HasGraph
from slapo.graph.rewrite.plan import subgraph_inputs
from slapo.graph.rewrite.rules import MadePerText, Pick
from slapo.graph.trace.nodes import attribute, called_name, spare_self

_SCALARS = (bool, int, float)
_INTEGER_ARITHMETIC = frozenset({"add", "sub", "mul", "floordiv", "mod", "neg"})
_LISTS: dict[Any, Any] = {"size": list[int], "shape": list[int], "ndim": int}

Compiler = Callable[[fx.GraphModule, str], nn.Module]

COMPILERS: dict[str | None, Compiler] = {
    "TorchScript": script,
    "inductor": compiled_late,
    None: sequential_of,
}
"""The compilers of :class:`Fuse`. Each makes a module from an extracted one."""


class Fuse(MadePerText):
    """Rule that replaces a chain of operations by one compiled module.

    The module takes the inputs of the chain in order of first use. Modules that the chain calls
    become its children, without copies. `compiler` is a key of :data:`COMPILERS`; `name` is the
    class name and the stem of the child's name.

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
        self.compiler, self.paths = compiler, dict[str, str]()
        calls = [node for node in chain if getattr(node, "op", "") != "get_attr"]
        # Lookups of parameters become inputs of the module, so that the traced module still owns
        # them. The search that found the match finds more than the chain then, so another one is
        # made.
        super().__init__(module, calls, name, pick if len(calls) == len(chain) else None)

    def __str__(self) -> str:
        return f"the fusion {self.stem} at {self.location}"

    def _make(self, gm: HasGraph, home: nn.Module, chain: list[fx.Node]) -> nn.Module:
        called = [str(node.target) for node in chain if node.op == "call_module"]
        if self.shown and called:  # the first fused module owns them, with their state and mode
            return self._over_first(home, chain)
        part, paths = extract(gm, chain, self.stem, home.training)
        if not self.shown:
            by_order = {str(node.target): str(k) for k, node in enumerate(chain)}
            self.paths = paths if self.compiler is not None else {p: by_order[p] for p in called}
        return COMPILERS[self.compiler](part, self.stem)

    def _over_first(self, home: nn.Module, chain: list[fx.Node]) -> nn.Module:
        """Run the operations one by one, over the modules that the first fused module owns."""
        view = subgraph_view(home, chain, subgraph_inputs(chain))
        for node in view.graph.find_nodes(op="call_module"):
            if node.target not in self.paths:
                raise TraceError(f"{self} does not contain {node.target}, which is called here")
            node.target = f"{self.shown}.{self.paths[str(node.target)]}"
        view.recompile()
        return view

    def _text(self, gm: HasGraph, chain: list[fx.Node]) -> str:
        # TorchScript takes untyped arguments for tensors, so code with an integer size is other
        # code.
        types = [str(_python_type(value, gm)) for value in subgraph_inputs(chain)]
        return "\n".join([", ".join(types), super()._text(gm, chain)])


def extract(
    gm: HasGraph, chain: Sequence[fx.Node], name: str, training: bool = True
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Make a module of class `name` that computes a chain; the graph stays unchanged.

    ``gm: b = fc(x); c = f(b, y)  -->  module(x, y) = f(fc(x), y)``

    Submodules are shared. Also returns path in `gm` -> path in the module.
    """
    graph = spare_self(fx.Graph())
    copies = {
        value: graph.placeholder(f"input_{k}", _python_type(value, gm))
        for k, value in enumerate(subgraph_inputs(chain), 1)
    }
    called = [str(node.target) for node in chain if node.op == "call_module"]
    paths = _paths_of({path: gm.get_submodule(path) for path in called})
    for node in chain:
        target: Any = node.target if node.op != "call_module" else paths[str(node.target)]
        args: Any = fx.map_arg(node.args, copies.__getitem__)
        kwargs: Any = fx.map_arg(dict(node.kwargs), copies.__getitem__)
        # Fresh names: equal chains then give equal code, wherever they come from.
        copies[node] = graph.create_node(node.op, target, args, kwargs, type_expr=node.type)
        copies[node].meta = dict(node.meta)
    graph.output(copies[chain[-1]])
    # Placeholders for the children: fx recompiles children that are graph modules, and a traced
    # module would take that for a manual edit.
    module = fx.GraphModule({paths[path]: nn.Module() for path in called}, graph, name)
    for path in called:
        module.set_submodule(paths[path], gm.get_submodule(path))
    module.training = training  # not .train(): the shared submodules keep their own mode
    return module, paths


def _paths_of(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Return short paths for modules without state, so that equal chains give equal code."""
    paths: dict[str, str] = {}
    taken = {path.split(".")[0] for path in modules}
    for path, module in modules.items():
        paths[path] = path
        if "." in path and not has_state(module):
            stem = name = path.rpartition(".")[2]
            k = 0
            while name in taken or hasattr(fx.GraphModule, name):
                name, k = f"{stem}_{k}", k + 1
            paths[path] = name
            taken.add(name)
    return paths


def _python_type(node: fx.Node, gm: HasGraph) -> Any:
    """Return the type of a non-tensor value if the graph shows it, else None."""
    if node.op == "placeholder":
        return node.type if node.type in _SCALARS else _scalar_type(*node.args)
    if node.op == "get_attr":
        return _scalar_type(attribute(gm, str(node.target)))  # type: ignore[arg-type]
    if node.op == "call_method":
        one = node.target == "size" and len(node.args) + len(node.kwargs) == 2
        return int if one or node.target in ("dim", "numel") else _LISTS.get(node.target)
    if node.op != "call_function":
        return None
    if node.target is getattr:
        return _LISTS.get(node.args[1])
    name = called_name(node)
    kinds = [_python_type(v, gm) if isinstance(v, fx.Node) else type(v) for v in node.args]
    if name == "getitem" and kinds[0] == list[int]:
        return int if kinds[1] is int else list[int]
    return int if name in _INTEGER_ARITHMETIC and set(kinds) == {int} else None


def _scalar_type(*values: Any) -> Any:
    """Return the common type of Python scalars, else None."""
    kinds = {type(value) for value in values}
    return kinds.pop() if len(kinds) == 1 and kinds <= set(_SCALARS) else None
