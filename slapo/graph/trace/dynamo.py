"""One flat graph by the front end of ``torch.compile``.

Technique: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
Transformation and Graph Compilation" (ASPLOS 2024).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from slapo.errors import TraceError
from slapo.graph.trace.leaves import check_modes
from slapo.graph.trace.module import CallContract, TracedModule
from slapo.graph.trace.names import spare_self
from slapo.graph.trace.recorder.expressions import Size
from slapo.graph.trace.recorder.grad_mode import GradModeRegions
from slapo.graph.trace.recorder.guards import SizeGuard
from slapo.graph.trace.recorder.signature import add_placeholder
from slapo.graph.trace.state import ModuleState


def trace_with_dynamo(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TracedModule:
    """Trace `module` into one flat graph; it holds for the example's sizes and mode.

    Parameters
    ----------
    module
        It is not changed.
    args, kwargs
        Example inputs.

    Raises
    ------
    TraceError
        If the forward does not fit into one graph, changes attributes, or calls modules in
        different modes.
    """
    args, kwargs = pytree.tree_map_only(FakeTensor, _stand_in, (args, kwargs))
    check_modes(module, [path for path, _ in module.named_modules()])
    with _untouched(module) as state:
        captured, result = _capture(module, args, kwargs)
        state.check_unchanged()
        adoption = _Adoption(module, captured, args, kwargs)
    return adoption.finish(result)


def _capture(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Captured, Any]:
    """The graph that dynamo makes of a real run, and the run's result."""
    captured: list[_Captured] = []

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        captured.append(_Captured(gm, list(inputs)))
        return captured[-1].run

    torch._dynamo.reset()
    try:
        compiled: Any = torch.compile(module.forward, backend=keep, fullgraph=True, dynamic=False)
        result = compiled(*args, **kwargs)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise TraceError(f"{type(error).__name__}: {lines[0]}") from error
    finally:
        torch._dynamo.reset()
    if len(captured) != 1:
        raise TraceError(f"the forward makes {len(captured)} graphs, one is needed")
    return captured[0], result


@dataclasses.dataclass
class _Captured:
    """A graph as dynamo made it: flat inputs, parameters among them, and flat outputs."""

    gm: fx.GraphModule
    inputs: list[Any]
    outputs: list[Any] = dataclasses.field(default_factory=list)

    def run(self, *inputs: Any) -> Any:
        self.inputs = list(inputs)
        self.outputs = list(self.gm.forward(*inputs))
        return self.outputs


class _Adoption:
    """Turns a captured graph into one with the module's signature, names and result."""

    def __init__(
        self,
        module: nn.Module,
        captured: _Captured,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.module, self.captured = module, captured
        signature = inspect.signature(module.forward)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.signature = signature
        self.arguments: Mapping[str, Any] = bound.arguments
        self.graph = spare_self(fx.Graph())
        self.constants: dict[str, Tensor] = {}
        self.known: dict[int, fx.Node] = {}
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self.names = {id(t): name for name, t in reversed(tensors)}
        for name, parameter in signature.parameters.items():
            self._bind(self.arguments[name], add_placeholder(self.graph, parameter))

    def _bind(self, value: Any, node: fx.Node) -> None:
        """Note where the call's tensors come from."""
        if isinstance(value, Tensor):
            self.known.setdefault(id(value), node)
        elif isinstance(value, (tuple, list, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(item)):
                    self._bind(item, self.graph.call_function(_get, (node, key)))

    def _node_for(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) not in self.known:
            name = self.names.get(id(tensor))
            if name is None:
                name = f"_tensor_constant{len(self.constants)}"
                self.constants[name] = tensor
            self.known[id(tensor)] = self.graph.create_node("get_attr", name)
        return self.known[id(tensor)]

    def finish(self, result: Any) -> TracedModule:
        """The traced module."""
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # regions ask for the present mode
            self._copy_nodes()
        self.graph.output(self._result(result))
        return TracedModule.from_graph(self.module, self.graph, self._contract(), self.constants)

    def _copy_nodes(self) -> None:
        copies: dict[fx.Node, Any] = {}
        values = iter(self.captured.inputs)
        regions = GradModeRegions(self.graph)
        for node in self.captured.gm.graph.nodes:
            if node.op == "placeholder":
                copies[node] = self._node_for(next(values))
            elif node.op == "get_attr":
                copies[node] = self._node_for(getattr(self.captured.gm, str(node.target)))
            elif node.target is torch._C._set_grad_enabled:
                regions.switch(bool(node.args[0]))
                torch._C._set_grad_enabled(bool(node.args[0]))
            elif node.op != "output":
                copies[node] = self.graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {}
            else:
                flat = fx.node.map_arg(node.args[0], copies.__getitem__)
                pairs = zip(self.captured.outputs, flat, strict=True)
                self.known.update((id(t), n) for t, n in pairs if isinstance(n, fx.Node))

    def _result(self, value: Any) -> Any:
        """The result's structure with nodes in it."""
        if isinstance(value, Tensor):
            return self._node_for(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            kwargs = {k: self._result(v) for k, v in parts.items() if v is not None}
            return self.graph.call_function(type(value), (), kwargs)
        if isinstance(value, (tuple, list)):
            return type(value)([self._result(v) for v in value])
        if isinstance(value, dict):
            return {k: self._result(v) for k, v in value.items()}
        return value

    def _contract(self) -> CallContract:
        guards = [
            SizeGuard.of(("==", Size((name,), dim), int(size)))
            for name, value in self.arguments.items()
            if isinstance(value, Tensor)
            for dim, size in enumerate(value.shape)
        ]
        concrete = {
            name: self._given(name, value)
            for name, value in self.arguments.items()
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
        }
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), None)
        tensors = frozenset(n for n, v in self.arguments.items() if isinstance(v, Tensor))
        inlined = tuple(path for path, _ in self.module.named_modules() if path)
        return CallContract(concrete, tensors, tuple(guards), self.module.training, dtype, inlined)

    def _given(self, name: str, value: Any) -> Any:
        """A constant argument; what ``**kwargs`` has as None counts as left out."""
        if self.signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
            return value
        return {k: v for k, v in value.items() if v is not None}


def _get(container: Any, key: Any) -> Any:
    return container[key]


def _stand_in(fake: FakeTensor) -> Tensor:
    sizes = [int(s.node.hint) if isinstance(s, torch.SymInt) else int(s) for s in fake.shape]
    return torch.zeros(sizes, dtype=fake.dtype, device=fake.device)


@contextmanager
def _untouched(module: nn.Module) -> Iterator[ModuleState]:
    """Keep random states, attributes and buffers: the run that is traced is a real one."""
    state = ModuleState(module)
    try:
        state.conceal_buffers()
        with torch.random.fork_rng():
            yield state
    finally:
        state.restore()
