"""From dynamo's graph to one with the module's signature, names and result."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import operator
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import CaptureOutput

from slapo.errors import TraceError
from slapo.graph.trace.call import CACHE_REFUSED, add_placeholder
from slapo.graph.trace.contract import CallContract, constants_in
from slapo.graph.trace.decisions import guards_of, translate
from slapo.graph.trace.example_tensors import ExampleCall
from slapo.graph.trace.expressions import OPERATIONS, Size
from slapo.graph.trace.guards import (
    DtypeGuard,
    GradGuard,
    SizeGuard,
    StructureGuard,
    TensorGuard,
)
from slapo.graph.trace.leaf_calls import call_leaf
from slapo.graph.trace.leaf_outputs import CapturedForm
from slapo.graph.trace.names import spare_self
from slapo.graph.trace.region_calls import Regions
from slapo.graph.trace.shape_env import CaptureShapeEnv, Decision, Origin
from slapo.graph.trace.targets import checked
from slapo.graph.trace.trees import KIND, has_tensor, kind_of, map_leaves, parts
from slapo.graph.trace.watch import Watch, states_read

_SQUEEZES = frozenset({"squeeze", "squeeze_"})
_DROPPED = frozenset({torch._C._log_api_usage_once})


class _Number(int):
    """Stands for a size that the captured forward returns."""


class Adoption:
    """Turns the output of dynamo into a graph of ours.

    Parameters
    ----------
    root
        The captured module.
    example
        What it was called with.
    output
        What dynamo has made of that.
    shape_env
        Where the decisions on sizes are listed.
    watch
        What was seen of the forward beside its tensors.
    accesses
        Path of a leaf -> how to reach the tensors in what it returns.
    """

    def __init__(
        self,
        root: nn.Module,
        example: ExampleCall,
        output: CaptureOutput,
        shape_env: CaptureShapeEnv | None,
        watch: Watch,
        accesses: Mapping[str, list[tuple[Any, ...]]],
    ) -> None:
        assert shape_env is not None, "dynamo makes a shape engine for every frame"
        self.root, self.example, self.output = root, example, output
        self.shape_env, self.watch, self.accesses = shape_env, watch, accesses
        self.graph = spare_self(fx.Graph())
        self.constants: dict[str, Tensor] = {}
        self._names = _first_names(root)
        self._sizes: dict[sympy.Symbol, Size] = {}
        self._nodes: dict[Any, fx.Node] = {}
        self._copies: dict[fx.Node, Any] = {}
        self._results: dict[int, Any] = {}
        self._fakes: dict[int, Tensor] = {}
        self._result: Any = None

    # --- the graph ---------------------------------------------------------------------------
    def finish(self) -> fx.Graph:
        """The graph."""
        for name, parameter in self.example.call.signature.parameters.items():
            node = add_placeholder(self.graph, parameter)
            node.meta[KIND] = kind_of(self.example.arguments[name])
            self._nodes[(name,)] = node
        self._result = self._run(self._copy_graph)
        self.graph.output(self._structure(self._result)).meta[KIND] = kind_of(self._result)
        _drop_unused(self.graph)
        return self.graph

    def form(self) -> CapturedForm | None:
        """The form of what the forward returns; to be asked for after :meth:`contract`.

        How a tensor lies in memory is a question about sizes, which is no limit of the graph.
        """
        decided = list(self.shape_env.decisions)
        result = map_leaves(self._result, self._example)
        return CapturedForm.of(result, self._sizes, self.example.call.signature, decided)

    def _example(self, value: Any) -> Any:
        """The fake tensor or symbol behind a value of the result."""
        if id(value) in self._results:
            value = self._results[id(value)][1]
        known = value.meta.get("example_value") if isinstance(value, fx.Node) else value
        return self._fakes.get(id(known), known)

    def _run(self, compiled: Any) -> Any:
        """Run what dynamo has generated around the graph.

        It takes the inputs out of the arguments, and puts the outputs into the result.
        """
        environment = self.output.graph_capture_output.get_runtime_env()
        backend = self.output.backend_input
        name = backend.backend_id if backend is not None else "slapo_no_graph"
        # Torch before 2.13 looks for the names of builtins there too.
        names = {**vars(builtins), **self.output.graph_capture_output.f_globals}
        run = environment.forward_callable(name, compiled, extra_globals=names)
        return run(self.root, self.example.args, self.example.kwargs)

    def _copy_graph(self, *inputs: Any) -> list[Any]:
        """Called in place of the captured graph: copies it, returns stand-ins for its outputs."""
        assert self.output.backend_input is not None, "only a graph is called"
        nodes = list(self.output.backend_input.graph_module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for node, value in zip(placeholders, inputs, strict=True):
            self._bind(node, value)
        regions = Regions(self.graph)
        for node in nodes:
            if node.op == "output":
                return [self._stand_in(value) for value in node.args[0]]
            if node.op != "placeholder":
                self._copy(node, regions)
        raise AssertionError("every graph has an output")

    def _bind(self, node: fx.Node, value: Any) -> None:
        """Note what a placeholder of dynamo's stands for."""
        if not isinstance(value, Tensor):
            known = node.meta.get("example_value", value)
            if not isinstance(known, torch.SymInt):
                raise TraceError(
                    "the forward uses a number that is neither a constant nor a size (Python's "
                    "random numbers are such); a graph cannot draw it; make the module a leaf"
                )
            self._copies[node] = known
            return
        path = self.example.places.get(id(value))
        if path is not None:
            self._fakes[id(value)] = node.meta["example_value"]
            for dim, size in enumerate(node.meta["example_value"].shape):
                if isinstance(size, torch.SymInt) and size.node._expr.is_Symbol:
                    self._sizes.setdefault(size.node._expr, Size(path, dim))
        self._copies[node] = value

    def _stand_in(self, value: Any) -> Any:
        """What the generated code takes for an output."""
        is_tensor = isinstance(value, fx.Node) and isinstance(
            value.meta.get("example_value"), Tensor
        )
        stand_in: Any = torch.empty(0) if is_tensor else _Number(0)
        self._results[id(stand_in)] = (stand_in, value)
        return stand_in

    # --- nodes -------------------------------------------------------------------------------
    def _copy(self, node: fx.Node, regions: Regions) -> None:
        target: Any = node.target
        if target in _DROPPED:
            return
        if regions.copy(node, self._argument):
            self._copies[node] = regions.last
            return
        if target is operator.getitem and self._is_leaf_call(node.args[0]):
            self._copies[node] = self._taken_out(*node.args)
            return
        if target is call_leaf:
            path, args, kwargs = node.args
            new = self.graph.call_module(str(path), self._argument(args), self._argument(kwargs))
            known = self.accesses[str(path)]
            new.meta[KIND] = "tensor" if known == [()] else "container" if known else "value"
            self._copies[node] = new
            return
        if node.op == "get_attr":
            assert self.output.backend_input is not None
            value = getattr(self.output.backend_input.graph_module, str(target))
            if isinstance(value, fx.GraphModule):
                return  # the body of a higher-order operator, whose call is refused
            self._copies[node] = value
            return
        if getattr(target, "__name__", target) in _SQUEEZES:
            self._keep_dimensions(node)
        function = checked(target)
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        new = self.graph.create_node(node.op, function, args, kwargs)
        new.meta[KIND] = kind_of(node.meta.get("example_value"))
        self._copies[node] = new

    def _keep_dimensions(self, squeeze: fx.Node) -> None:
        """Sizes that are squeezed if they are 1 stay larger.

        Python does not ask the shape engine how many dimensions a result has, and goes by it.
        """
        shape = squeeze.args[0].meta["example_value"].shape  # type: ignore[union-attr]
        asked = [*squeeze.args[1:], *squeeze.kwargs.values()]
        dims = torch.utils._pytree.tree_leaves(asked) if asked else range(len(shape))
        for dim in dims:
            if isinstance(dim, int) and isinstance(shape[dim], torch.SymInt):
                larger = sympy.Gt(shape[dim].node.expr, 1)
                self.shape_env.decisions.append(Decision(larger, sympy.true, Origin.OWN))

    def _is_leaf_call(self, value: Any) -> bool:
        return (
            isinstance(value, fx.Node)
            and value.target is call_leaf
            and self.accesses[str(value.args[0])] != [()]
        )

    def _taken_out(self, call: Any, index: Any) -> fx.Node:
        """The node of one tensor in what a leaf returns."""
        node: fx.Node = self._copies[call]
        steps = self.accesses[str(call.args[0])][index]
        for number, (access, key) in enumerate(steps):
            known = (node, access, key)
            if known not in self._nodes:
                self._nodes[known] = self.graph.call_function(access, (node, key))
                last = number == len(steps) - 1
                self._nodes[known].meta[KIND] = "tensor" if last else "container"
            node = self._nodes[known]
        return node

    def _argument(self, value: Any) -> Any:
        """An argument of a node of dynamo's, for a node of ours."""
        return fx.node.map_aggregate(value, self._leaf_argument)

    def _leaf_argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            copied = self._copies[value]
            return copied if isinstance(copied, fx.Node) else self._leaf_argument(copied)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.SymInt):
            return self._expression(value.node.expr)
        return value

    def _tensor(self, value: Tensor) -> fx.Node:
        """The node of a tensor that exists before the graph runs: an input, or state."""
        path = self.example.places.get(id(value))
        if path is not None:
            return self._at(path)
        key = id(value)
        if key not in self._nodes:
            name = self._names.get(key)
            if name is None:
                name = self._constant(value)
            self._nodes[key] = self._early("get_attr", name, ())
            self._nodes[key].meta[KIND] = "tensor"
        return self._nodes[key]

    def _constant(self, value: Tensor) -> str:
        if isinstance(value, nn.Parameter):
            raise TraceError(
                "the forward uses a parameter that is no parameter of it; register the module that "
                "owns it as a child"
            )
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = value
        return name

    def _at(self, path: tuple[Any, ...]) -> fx.Node:
        """The node of what lies at `path` in the arguments."""
        if path not in self._nodes:
            holder = self._at(path[:-1])
            value = _follow(self.example.arguments, path[:-1])
            part = next(p for p in parts(value) or () if p.key == path[-1])
            self._nodes[path] = self._early("call_function", part.access, (holder, part.key))
            self._nodes[path].meta[KIND] = kind_of(part.value)
        return self._nodes[path]

    def _early(self, op: str, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """A node that later ones may use wherever they stand."""
        return self.graph.create_node(op, target, args)

    def _expression(self, expression: sympy.Basic) -> Any:
        """The node (or number) of a size."""
        if expression.is_number:
            return int(expression)
        if expression not in self._nodes:
            self._nodes[expression] = translate(expression, self._size, self._arithmetic)
        return self._nodes[expression]

    def _size(self, symbol: sympy.Symbol) -> fx.Node:
        if symbol not in self._nodes:
            size = self._first_place(symbol)
            self._nodes[symbol] = self.graph.call_method("size", (self._at(size.path), size.dim))
            self._nodes[symbol].meta[KIND] = "value"
        return self._nodes[symbol]

    def _first_place(self, symbol: sympy.Symbol) -> Size:
        """Of the sizes that are equal in every call, the first: two captures take the same one."""
        same = self.shape_env.replace(symbol)
        places = [size for s, size in self._sizes.items() if self.shape_env.replace(s) == same]
        if not places:
            raise TraceError(f"the size {symbol} follows from no argument")
        order = list(self.example.call.signature.parameters)
        return min(places, key=lambda size: (order.index(size.path[0]), str(size.path), size.dim))

    def _arithmetic(self, name: str, operands: list[Any]) -> Any:
        node = self.graph.call_function(OPERATIONS[name], tuple(operands))
        node.meta[KIND] = "value"
        return node

    # --- the result --------------------------------------------------------------------------
    def _structure(self, value: Any) -> Any:
        """The result with nodes in it."""
        if id(value) in self._results:
            return self._leaf_argument(self._results[id(value)][1])
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.Size):
            return self._shape(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            kwargs = {k: self._structure(v) for k, v in fields.items() if v is not None}
            return self._container(type(value), (), kwargs)
        if isinstance(value, Mapping):
            entries = {k: self._structure(v) for k, v in value.items()}
            if type(value) is dict:
                return entries
            return self._container(type(value), (entries,), {})
        if isinstance(value, (tuple, list)):
            items = [self._structure(v) for v in value]
            if type(value).__module__ == "torch.return_types":  # to fx a tuple like others
                return self._container(type(value), (tuple(items),), {})
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if type(value).__name__.endswith("Cache"):
            raise TraceError(CACHE_REFUSED)
        return value

    def _shape(self, value: torch.Size) -> Any:
        """A shape in the result: dynamo reads a whole one off the input, here that of the example.

        Raises
        ------
        TraceError
            If several tensors could be the one that it was read off.
        """
        if any(isinstance(size, _Number) for size in value):
            return tuple(map(self._structure, value))
        paths = [
            path
            for path in self.example.places.values()
            if _follow(self.example.arguments, path).shape == value
        ]
        fixed = any(t.shape == value for t in (*self.root.parameters(), *self.root.buffers()))
        if not paths:
            return tuple(value)
        if len(paths) > 1 or fixed:
            raise TraceError(
                "the forward returns the shape of one of several tensors that are alike in the "
                "example; return tuple(x.shape), or trace with inputs of other sizes"
            )
        node = self.graph.call_method("size", (self._at(paths[0]),))
        node.meta[KIND] = "value"
        return node

    def _container(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(kind, args, kwargs)
        node.meta[KIND] = "container"
        return node

    # --- the contract ------------------------------------------------------------------------
    def contract(self) -> CallContract:
        """What the graph may be called with; arguments that nobody looked at are free."""
        call, arguments = self.example.call, self.example.arguments
        kinds = call.signature.parameters
        seen = {
            k: constants_in(v) if kinds[k].kind is inspect.Parameter.VAR_KEYWORD else v
            for k, v in arguments.items()
            if self._is_looked_at(k)
        }
        guards: list[SizeGuard] = []
        for name, value in seen.items():
            guards += _structure_guards(value, (name,))
        pinned = [(size, number) for size, number in self.example.pinned if size.path[0] in seen]
        guards += [SizeGuard.of(("==", size, number)) for size, number in pinned]
        guards += guards_of(self.shape_env.decisions, self._sizes, self.shape_env.hints)
        states, asked = self._states()
        return CallContract(
            {k: v for k, v in call.concrete().items() if k in seen},
            frozenset(k for k, v in seen.items() if has_tensor(v)),
            tuple(guards + asked),
            None,
            self._dtype(),
            (),
            states,
        )

    def _is_looked_at(self, name: str) -> bool:
        """Whether dynamo met the argument: it guards all that it meets."""
        parameter = self.example.call.signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return True
        names = list(self.example.call.signature.parameters)
        position = names.index(name)
        if position < len(self.example.args):
            return f"L['args'][{position}]" in self._guarded
        return f"L['kwargs']['{name}']" in self._guarded or name not in self.example.kwargs

    def _dtype(self) -> torch.dtype | None:
        """That of the parameters, if Python decided by one that is not an input's."""
        if None not in self._inputs_among(self.watch.steering):
            return None
        return next((p.dtype for p in self.root.parameters() if p.is_floating_point()), None)

    def _states(self) -> tuple[dict[str, Any], list[SizeGuard]]:
        """State of the process, and kinds of inputs, that Python decided by."""
        output = self.output.graph_capture_output
        asked = states_read(output.traced_code)
        by_dtype = self._inputs_among(self.watch.steering)
        by_grad = self._inputs_among(self.watch.grad_asked)
        states: dict[str, Any] = {}
        if "grad" in asked or None in by_grad or self.watch.enables_grad:
            states["grad"] = True
        if "autocast" in asked or None in by_dtype:
            states["autocast"] = ()
        guards: list[SizeGuard] = []
        for path in self.example.places.values():
            tensor = _follow(self.example.arguments, path)
            floating = tensor.is_floating_point()
            if path in by_dtype or (None in by_dtype and floating):
                guards.append(DtypeGuard.at(path, tensor.dtype))
            if path in by_grad or (None in by_grad and floating):
                guards.append(GradGuard.at(path, tensor.requires_grad))
        return states, guards

    def _inputs_among(self, nodes: set[fx.Node]) -> set[tuple[Any, ...] | None]:
        """Where the tensors of these nodes of dynamo's lie in the arguments; None for others."""
        return {self.example.places.get(id(self._copies.get(node))) for node in nodes}

    def entered(self, candidates: set[str]) -> frozenset[str]:
        """Those of the modules at these paths whose forward has put something in the graph."""
        backend = self.output.backend_input
        nodes = backend.graph_module.graph.nodes if backend is not None else ()
        stacks = (node.meta.get("nn_module_stack", {}).values() for node in nodes)
        found = {_module_path(str(name)) for stack in stacks for name, _ in stack}
        return frozenset(candidates & found)

    def check_reads(self, changed: set[str]) -> None:
        """Refuse a forward that reads what a leaf sets on itself.

        Raises
        ------
        TraceError
            Naming the attribute.
        """
        for name in sorted(changed.intersection(map(_module_path, self._guarded))):
            owner, _, attribute = name.rpartition(".")
            raise TraceError(
                f"{owner!r} sets its attribute {attribute!r} when it is called, and the forward "
                "above reads it; return the value, or trace with flatten=True"
            )

    def reads_mode(self) -> bool:
        """Whether the forward has asked for ``training``."""
        return any(name.endswith(".training") for name in self._guarded)

    @cached_property
    def _guarded(self) -> set[str]:
        """Names of all that dynamo met outside of the forward."""
        common = self.output.graph_capture_output.output_graph
        return {guard.name for guard in common.guards}


def _module_path(source: str) -> str:
    """``L['module'].layers._slapo_items[0]._modules['fc']`` as ``layers.0.fc``."""
    text = source.removeprefix("L['module']")
    text = re.sub(r"\._slapo_items\[(\d+)\]", r".\1", text)
    text = re.sub(r"\._modules\['([^']+)'\]", r".\1", text)
    return text.lstrip(".")


def _structure_guards(value: Any, path: tuple[Any, ...]) -> list[SizeGuard]:
    """Structure of containers, rank of tensors."""
    if isinstance(value, Tensor):
        return [TensorGuard.at(path, value.dim())]
    elements = parts(value)
    if elements is None or not has_tensor(value):
        return []
    found: list[SizeGuard] = [StructureGuard.at(path, value)]
    for part in elements:
        found += _structure_guards(part.value, (*path, part.key))
    return found


def _first_names(root: nn.Module) -> dict[int, str]:
    """Id of a parameter or buffer -> its first name."""
    held = [*root.named_parameters(), *root.named_buffers()]
    return {id(tensor): name for name, tensor in reversed(held)}


def _follow(arguments: Mapping[str, Any], path: tuple[Any, ...]) -> Any:
    value = arguments[path[0]]
    for key in path[1:]:
        value = getattr(value, key) if dataclasses.is_dataclass(value) else value[key]
    return value


def _drop_unused(graph: fx.Graph) -> None:
    """Drop look-ups that nobody uses; whatever acts or draws random numbers stays."""
    lookups = (operator.getitem, getattr)
    for node in reversed(graph.nodes):
        pure = node.op == "get_attr" or node.target in lookups or node.target == "size"
        if pure and not node.users:
            graph.erase_node(node)
