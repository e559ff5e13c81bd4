"""Conversion of dynamo's graph to one with the module's own signature, names and result."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import operator
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.leaf_calls import LeafCalls, call_leaf, call_sync
from slapo.graph.trace.nests import (
    KIND,
    ONES,
    OWNER,
    SYMBOLIC,
    kind_of,
    ones_of,
    parts,
    tensors,
)
from slapo.graph.trace.nodes import HeldTensor, add_placeholder, like_input, spare_self
from slapo.graph.trace.refusals import CACHE_REFUSED, checked, module_path
from slapo.graph.trace.torch_private import (
    CaptureOutput,
    PythonReferenceAnalysis,
    ShapeEnv,
    sympy_interp,
)

#: Calls that compute nothing: some of torch's layers count their uses.
_DROPPED = frozenset({torch._C._log_api_usage_once})

#: Steps from the arguments to a value in them: the parameter's name, then (access, key) pairs.
Path = tuple[Any, ...]


class _Number(int):
    """Placeholder for a size that the captured forward returns."""


class GraphImport:
    """Copies dynamo's graph.

    `arguments` are the examples by parameter, and `places` maps each tensor's id to its path in
    them. With `any_batch` the graph must be valid for sizes of 1 too.
    """

    def __init__(
        self,
        root: nn.Module,
        arguments: Mapping[str, Any],
        places: Mapping[int, Path],
        output: CaptureOutput,
        calls: LeafCalls,
        any_batch: bool,
    ) -> None:
        self.root, self.arguments, self.places = root, arguments, places
        self.output, self.calls, self.any_batch = output, calls, any_batch
        self.graph = spare_self(fx.Graph())
        self._names = _names_of_tensors(root)
        self._nodes: dict[Any, fx.Node] = {}
        self._copies: dict[fx.Node, Any] = {}
        self._sizes: dict[Any, tuple[Path, int]] = {}
        self._results: dict[int, Any] = {}

    def run(self, frame: tuple[Any, ...]) -> fx.Graph:
        """Return the graph, for a frame ``(module, args, kwargs)`` of the captured function."""
        for name, parameter in inspect.signature(self.root.forward).parameters.items():
            self._nodes[(name,)] = add_placeholder(self.graph, parameter)
            self._nodes[(name,)].meta[KIND] = kind_of(self.arguments[name])
            self._nodes[(name,)].meta[ONES] = ones_of(self.arguments[name])
        captured = self.output.graph_capture_output
        backend = self.output.backend_input
        self._note_sizes(captured.output_graph.shape_env, frame)
        # Dynamo's own bytecode unpacks the arguments and assembles the result.
        # It calls `_copy_graph` where it would run the compiled graph. The outputs are stand-ins
        # there, and `_structure` finds them by their ids in what the bytecode returns.
        run = captured.get_runtime_env().forward_callable(
            backend.backend_id if backend is not None else "slapo_no_graph",
            self._copy_graph,
            extra_globals={**vars(builtins), **captured.f_globals},
        )
        self.graph.output(self._structure(run(*frame)))
        _drop_unused(self.graph)
        return self.graph

    def _copy_graph(self, *inputs: Any) -> list[Any]:
        """Copy the graph when it would run, and return stand-ins for its outputs."""
        backend = self.output.backend_input
        assert backend is not None, "only a graph is called"
        nodes = list(backend.graph_module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for node, value in zip(placeholders, inputs, strict=True):
            known = node.meta.get("example_value", value)
            if not isinstance(value, Tensor) and not isinstance(known, torch.SymInt):
                raise TraceError(
                    "the forward uses a number that is neither a constant nor a size (such as one "
                    "from Python's random), which a graph cannot draw; make the module a leaf"
                )
            self._copies[node] = value if isinstance(value, Tensor) else known
        for node in nodes:
            if node.op == "output":
                return [self._stand_in(value) for value in node.args[0]]
            if node.op != "placeholder" and node.target not in _DROPPED:
                self._copies[node] = new = self._copy(node, backend.graph_module)
                if isinstance(new, fx.Node):
                    new.meta[ONES] = ones_of(node.meta.get("example_value"))
        raise AssertionError("every graph has an output")

    def _note_sizes(self, env: ShapeEnv, frame: tuple[Any, ...]) -> None:
        """Record the symbols of argument sizes, including those that the graph does not use."""
        # Sources are expressions such as ``L['args'][0]``, to be evaluated on the example.
        names = {"L": dict(zip(("module", "args", "kwargs"), frame, strict=True))}
        for each in env.tracked_fakes or ():
            source = each.source.name
            if not (
                isinstance(each.fake, Tensor) and source.startswith(("L['args']", "L['kwargs']"))
            ):
                continue
            path = self.places.get(id(eval(source, names)))
            for dim, size in enumerate(each.fake.shape if path is not None else ()):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self._sizes.setdefault(size.node.expr, (path or (), dim))

    def _stand_in(self, value: Any) -> Any:
        known = value.meta.get("example_value") if isinstance(value, fx.Node) else None
        stand_in: Any = torch.empty(0) if isinstance(known, Tensor) else _Number(0)
        self._results[id(stand_in)] = (stand_in, value)
        return stand_in

    # --- nodes -------------------------------------------------------------------------------
    def _copy(self, node: fx.Node, owner: fx.GraphModule) -> Any:
        target: Any = node.target
        if node.op == "get_attr":
            return getattr(owner, str(target))  # a tensor, or the body of a refused operator
        if target is call_leaf:
            return self._leaf_call(node)
        if target is call_sync:
            number: Any
            number, tensor = node.args
            new = self.graph.call_function(self.calls.syncs[number], (self._argument(tensor),))
            new.meta |= {KIND: "tensor", OWNER: _owner_of(node)}
            return new
        source = node.args[0] if node.args else None
        if target is operator.getitem and getattr(source, "target", None) is call_leaf:
            return self._taken_out(source, node.args[1])
        # With symbolic sizes of 1, torch evaluates ``squeeze`` without a condition on the size.
        if self.any_batch and getattr(target, "__name__", target) in ("squeeze", "squeeze_"):
            _check_squeeze(node)
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        if target in _ATTRIBUTES:  # newer releases of dynamo write attributes as operators
            target, args = getattr, (args[0], _ATTRIBUTES[target])
        new = self.graph.create_node(node.op, checked(target), args, kwargs)
        new.meta[KIND] = kind_of(node.meta.get("example_value"))
        new.meta[OWNER] = _owner_of(node)
        return new

    def _leaf_call(self, node: fx.Node) -> fx.Node:
        path, args, kwargs = node.args
        new = self.graph.call_module(str(path), self._argument(args), self._argument(kwargs))
        if path in self.calls.assumed:
            new = self.graph.call_function(like_input, (new, new.all_input_nodes[0], str(path)))
        found = self.calls.accesses[str(path)]
        new.meta[KIND] = "tensor" if found == [()] else "container" if found else "value"
        new.meta[OWNER] = _owner_of(node)
        return new

    def _taken_out(self, call: Any, index: Any) -> fx.Node:
        """Return the node of one tensor in a leaf's result."""
        node: fx.Node = self._copies[call]
        for access, key in self.calls.accesses[str(call.args[0])][index]:
            step = (node, access, key)
            if step not in self._nodes:
                self._nodes[step] = self.graph.call_function(access, (node, key))
                self._nodes[step].meta[KIND] = "container"
            node = self._nodes[step]
        node.meta[KIND] = "tensor"
        return node

    def _argument(self, value: Any) -> Any:
        return fx.node.map_aggregate(value, self._element)

    def _element(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            copied = self._copies[value]
            return copied if isinstance(copied, fx.Node) else self._element(copied)
        if isinstance(value, Tensor):
            return self._tensor(value)
        return self._size(value.node.expr) if isinstance(value, SYMBOLIC) else value

    def _tensor(self, value: Tensor) -> fx.Node:
        """Return the node of a tensor that exists before the graph runs: an input, or state."""
        path = self.places.get(id(value))
        if path is not None:
            return self._at(path)
        if id(value) not in self._nodes:
            self._nodes[id(value)] = self._outside(value)
            self._nodes[id(value)].meta[KIND] = "tensor"
        return self._nodes[id(value)]

    def _outside(self, value: Tensor) -> fx.Node:
        """Return the node of a tensor that is no input: module state by name, or a constant."""
        name = self._names.get(id(value))
        if name is not None:
            return self.graph.get_attr(name)
        if isinstance(value, nn.Parameter):
            raise TraceError(
                "the forward uses a parameter of a module that is not one of its submodules; "
                "register that module"
            )
        known = (*tensors(self.arguments), *self.root.parameters(), *self.root.buffers())
        for tensor in (each for each in known if _shares_memory(each, value)):
            name = next(filter(partial(_is_attribute, tensor, value), _ATTRIBUTES.values()), None)
            if name is not None:  # dynamo leaves a mere attribute access to its own bytecode
                return self.graph.call_function(getattr, (self._tensor(tensor), name))
            raise TraceError("the forward returns a view of a tensor that no operation created")
        return self.graph.call_function(HeldTensor(value))

    def _at(self, path: Path) -> fx.Node:
        if path not in self._nodes:
            access, key = path[-1]
            holder = self._at(path[:-1])
            self._nodes[path] = self.graph.call_function(access, (holder, key))
            self._nodes[path].meta[KIND] = "tensor" if path in self.places.values() else "container"
        return self._nodes[path]

    def _size(self, expression: Any) -> Any:
        """Return a size as an expression of nodes over argument sizes."""
        if expression.is_number:
            return int(expression)
        if expression not in self._nodes:
            if expression.is_Symbol:
                if expression not in self._sizes:
                    raise TraceError(f"the size {expression} does not follow from any argument")
                path, dim = self._sizes[expression]
                node = self.graph.call_method("size", (self._at(path), dim))
            else:  # like torch's own runtime asserts
                tracer = fx.proxy.GraphAppendingTracer(self.graph)
                free = expression.free_symbols
                known = {symbol: fx.Proxy(self._size(symbol), tracer) for symbol in free}
                node = sympy_interp(PythonReferenceAnalysis, known, expression).node
                for each in (node, *node.all_input_nodes):
                    each.meta.setdefault(KIND, "value")
            node.meta[KIND] = "value"
            self._nodes[expression] = node
        return self._nodes[expression]

    # --- the result --------------------------------------------------------------------------
    def _structure(self, value: Any) -> Any:
        """Return the result with nodes in it."""
        if id(value) in self._results:
            return self._element(self._results[id(value)][1])
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.Size):
            return self._shape(value)
        elements, kind = parts(value), type(value)
        if elements is None:
            if kind.__name__.endswith("Cache"):
                raise TraceError(CACHE_REFUSED)
            return value
        items = [(part.key, self._structure(part.value)) for part in elements]
        if kind is dict:
            return dict(items)
        if isinstance(value, (tuple, list)):
            values = [item for _, item in items]
            if hasattr(value, "_fields"):
                return kind(*values)
            special = kind.__module__ == "torch.return_types"
            return self._container(kind, (tuple(values),), {}) if special else kind(values)
        if dataclasses.is_dataclass(value):
            return self._container(kind, (), dict(items))
        return self._container(kind, (dict(items),), {})

    def _shape(self, value: torch.Size) -> Any:
        """Return a shape in the result; dynamo reads a full shape off the example inputs."""
        if any(isinstance(size, _Number) for size in value):
            return tuple(map(self._structure, value))
        alike = [p for p in self.places.values() if _follow(self.arguments, p).shape == value]
        fixed = any(t.shape == value for t in (*self.root.parameters(), *self.root.buffers()))
        if not alike:
            return tuple(value)
        if len(alike) > 1 or fixed:
            raise TraceError(
                "the forward returns a shape that several tensors have in the example; return "
                "tuple(x.shape), or trace with inputs of different sizes"
            )
        node = self.graph.call_method("size", (self._at(alike[0]),))
        node.meta[KIND] = "value"
        return node

    def _container(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(kind, args, kwargs)
        node.meta[KIND] = "container"
        return node

    def entered(self, candidates: Collection[str]) -> frozenset[str]:
        """Return which of the candidate paths have operations in the graph."""
        backend = self.output.backend_input
        nodes = backend.graph_module.graph.nodes if backend is not None else ()
        stacks = (node.meta.get("nn_module_stack", {}).values() for node in nodes)
        found = {module_path(str(source)) for stack in stacks for source, _ in stack}
        return frozenset(found.intersection(candidates))


_ATTRIBUTES = {
    torch.ops.aten.numpy_T: "T",
    torch.ops.aten.mT: "mT",
    torch.ops.aten.matrix_H: "H",
    torch.ops.aten.mH: "mH",
    torch.ops.aten.real: "real",
    torch.ops.aten.imag: "imag",
}


# --- helpers -------------------------------------------------------------------------------------
def _check_squeeze(node: fx.Node) -> None:
    """Refuse a squeeze of a size that may be 1 in some calls only."""
    source: Any = node.args[0]
    shape = source.meta["example_value"].shape
    asked = [*node.args[1:], *node.kwargs.values()]
    dims = torch.utils._pytree.tree_leaves(asked) if asked else range(len(shape))
    for dim in dims:
        if isinstance(dim, int) and isinstance(shape[dim], torch.SymInt):
            raise TraceError(
                f"{node.format_node()} squeezes a dimension whose size depends on the batch; name "
                "a dimension of fixed size, or use view"
            )


def _names_of_tensors(root: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter, buffer or plain tensor attribute, by id."""
    plain = [
        (f"{path}.{name}" if path else name, value)
        for path, module in root.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
    held = [*root.named_parameters(), *root.named_buffers(), *plain]
    return {id(tensor): name for name, tensor in reversed(held)}


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    if not one.layout == other.layout == torch.strided:
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _is_attribute(tensor: Tensor, value: Tensor, name: str) -> bool:
    """Return whether `value` equals the attribute `name` of `tensor`, such as ``tensor.T``."""
    forms = []
    with suppress(RuntimeError):  # some tensors lack some attributes
        for each in (value, getattr(tensor, name)):
            flags = (each.dtype, each.is_conj(), each.storage_offset())
            forms.append((flags, each.shape, each.stride()))
    return len(forms) == 2 and forms[0] == forms[1]


def _owner_of(node: fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return module_path(str(stack[-1][0])) if stack else ""


def _follow(arguments: Mapping[str, Any], path: Path) -> Any:
    value = arguments[path[0]]
    for access, key in path[1:]:
        value = access(value, key)
    return value


def _drop_unused(graph: fx.Graph) -> None:
    """Drop look-ups without users; operations with effects or random draws stay."""
    lookups = (operator.getitem, getattr)
    for node in reversed(graph.nodes):
        is_lookup = node.op == "get_attr" or node.target in lookups or node.target == "size"
        if is_lookup and not node.users:
            graph.erase_node(node)
