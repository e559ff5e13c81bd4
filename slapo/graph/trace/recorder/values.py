"""Which node of the graph a value of the recorded run comes from, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from slapo.errors import TraceError
from slapo.graph.trace.recorder.expressions import OPERATIONS, UntranslatableError, translate
from slapo.graph.trace.trees import KIND, SYMBOLIC, Part, kind_of, parts, rebuild

#: Types that may stand in a graph as they are.
_CONSTANTS = (
    str,
    int,
    float,
    bool,
    complex,
    bytes,
    range,
    type(...),
    type(None),
    torch.dtype,
    torch.layout,
    torch.memory_format,
)


class TensorNames:
    """Parameters, buffers and other tensor attributes of a module tree, by identity.

    A tensor with several names (tied weights) goes by its first, always the same.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self._add(name, parameter)
        for name, buffer in root.named_buffers(remove_duplicate=False):
            self._add(name, buffer)
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    self._add(f"{path}.{name}" if path else name, value)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._names.setdefault(id(tensor), name)
        self._kept.append(tensor)

    def get(self, tensor: torch.Tensor) -> str | None:
        """The name of `tensor`, or None if it is no attribute of the tree."""
        return self._names.get(id(tensor))


class ValueTable:
    """Values of the run <-> nodes of the graph.

    Tensors, symbolic sizes and devices are known by identity; all that are noted are kept alive,
    so that an id is never used twice.

    Parameters
    ----------
    root
        The module being recorded.
    graph
        The graph under construction.
    fake_mode
        The mode of the run.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
        self.graph = graph
        self.constants: dict[str, torch.Tensor] = {}
        self._fake_mode = fake_mode
        self._names = TensorNames(root)
        self._root = root
        self._tensors: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._sizes: dict[int, tuple[Any, fx.Node, str, tuple[int, ...]]] = {}
        self._devices: dict[int, tuple[torch.device, torch.Tensor]] = {}
        self._carriers: dict[sympy.Symbol, tuple[fx.Node, int]] = {}
        self._attributes: dict[str, fx.Node] = {}
        self._latest: fx.Node | None = None

    # --- values that come from a node --------------------------------------------------------
    def bind(self, value: Any, node: fx.Node, mutated: bool = False) -> Any:
        """Note that `node` computes `value`; returns the value to go on with.

        A tensor that another node has already claimed, as a dropout in eval mode returns its
        input, comes back as a new alias, so that each node has a tensor of its own. With
        `mutated` the node has changed a tensor in place, and stands for it from now on.
        """
        node.meta.setdefault(KIND, kind_of(value))
        if isinstance(value, torch.Tensor):
            return self._bind_tensor(value, node, mutated)
        elements = parts(value)
        if elements is None:
            return value
        return rebuild(value, [self._bind_part(part, node, mutated) for part in elements])

    def _bind_tensor(self, value: torch.Tensor, node: fx.Node, mutated: bool) -> torch.Tensor:
        if not mutated and (self.knows(value) or not isinstance(value, FakeTensor)):
            value = torch.ops.aten.alias(value)
        self._tensors[id(value)] = (value, node)
        if isinstance(value, FakeTensor):
            self._devices[id(value.fake_device)] = (value.fake_device, value)
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                self._carriers.setdefault(size.node.expr, (node, dim))
        node.meta.setdefault("rank", value.dim())
        node.meta.setdefault("dtype", value.dtype)
        self._latest = node
        return value

    def _bind_part(self, part: Part, node: fx.Node, mutated: bool) -> Any:
        if not _needs_node(part.value):
            return part.value
        return self.bind(
            part.value, self.graph.call_function(part.access, (node, part.key)), mutated
        )

    def knows(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` comes from a node or is an attribute of the module."""
        return id(tensor) in self._tensors or self._names.get(tensor) is not None

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node that computes `tensor`, if there is one."""
        entry = self._tensors.get(id(tensor))
        return entry[1] if entry else None

    def note_sizes(
        self, result: Any, tensor: torch.Tensor, method: str, args: tuple[Any, ...]
    ) -> None:
        """Remember that ``tensor.method(*args)`` has given the symbolic numbers in `result`."""
        node = self.node_of(tensor)
        if node is None:
            return
        many = isinstance(result, tuple)
        for dim, size in enumerate(result) if many else ((None, result),):
            if isinstance(size, torch.SymInt):
                where = (dim,) if many else args
                self._sizes[id(size)] = (size, node, method, where)
                if method == "size" and isinstance(size.node.expr, sympy.Symbol):
                    self._carriers[size.node.expr] = (node, *where)

    def note_device(self, device: torch.device, tensor: torch.Tensor) -> None:
        """Remember which tensor was asked for its device (fake tensors hand out one object)."""
        self._devices.setdefault(id(device), (device, tensor))

    # --- nodes for values --------------------------------------------------------------------
    def argument(self, value: Any) -> Any:
        """`value` as it stands among the arguments of a node.

        Raises
        ------
        TraceError
            If it holds something that no node computes and that is no plain constant.
        """
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        if isinstance(value, torch.Size):
            return tuple(self.argument(size) for size in value)
        elements = parts(value)
        if elements is None:
            return self._leaf(value)
        items = [self.argument(part.value) for part in elements]
        if elements and elements[0].access is getattr:
            fields = {p.key: item for p, item in zip(elements, items, strict=True)}
            given = {key: item for key, item in fields.items() if item is not None}
            node = self.graph.call_function(type(value), (), given)
            node.meta[KIND] = "container"
            return node
        if isinstance(value, dict):
            return dict(zip(value, items, strict=True))
        return rebuild(value, items)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor_node(value)
        if isinstance(value, SYMBOLIC):
            return self._symbolic_node(value)
        if isinstance(value, torch.device):
            return self._device_node(value)
        if isinstance(value, _CONSTANTS):
            return value
        raise TraceError(_foreign_value(value))

    def _tensor_node(self, tensor: torch.Tensor) -> fx.Node:
        node = self.node_of(tensor)
        if node is not None:
            return node
        name = self._names.get(tensor)
        if name is not None:
            return self._attribute_node(name, tensor)
        if isinstance(tensor, FakeTensor):
            raise TraceError(
                f"a tensor of shape {list(map(str, tensor.shape))} was computed where the recorder "
                "cannot see it (compiled code, a thread, torch.vmap, or an earlier trace); make "
                "the module that does so a leaf: leaf_modules=[...] or traceable = False"
            )
        return self._constant_node(tensor)

    def _attribute_node(self, name: str, tensor: torch.Tensor) -> fx.Node:
        if name not in self._attributes:
            node = self.graph.create_node("get_attr", name)
            node.meta.update({"rank": tensor.dim(), "dtype": tensor.dtype, KIND: "tensor"})
            self._attributes[name] = node
        return self._attributes[name]

    def _constant_node(self, tensor: torch.Tensor) -> fx.Node:
        """A tensor from outside the module, which existed before the recording."""
        if tensor.requires_grad:
            raise TraceError(
                f"the module uses a tensor of shape {list(tensor.shape)} that requires gradients "
                "and is no parameter of it; register it on the module, or trace the module above "
                "that owns it"
            )
        for name, known in self.constants.items():
            if known is tensor:
                return self._attribute_node(name, tensor)
        taken = set(self.constants) | set(dir(self._root))
        name = next(
            n for n in map("_slapo_constant_{}".format, range(len(taken) + 1)) if n not in taken
        )
        self.constants[name] = tensor
        return self._attribute_node(name, tensor)

    def _device_node(self, device: torch.device) -> Any:
        """``x.device`` again, if it was read from a tensor, so that the graph can move."""
        _, tensor = self._devices.get(id(device), (device, None))
        if tensor is None:
            return device
        node = self.node_of(tensor) or self._latest
        if node is None:
            node = self._tensor_node(tensor)
        return self.graph.call_function(getattr, (node, "device"))

    # --- sizes -------------------------------------------------------------------------------
    def _symbolic_node(self, number: Any) -> Any:
        """A size as the call that gave it; what arithmetic made of sizes, as that arithmetic."""
        if id(number) in self._sizes:
            _, node, method, args = self._sizes[id(number)]
            return self._call_once(node, method, args)
        try:
            return translate(number.node.expr, self._symbol_node, self._operation)
        except UntranslatableError as error:
            raise TraceError(f"{error}; make the module a leaf") from error

    def _symbol_node(self, symbol: sympy.Symbol) -> fx.Node:
        if symbol not in self._carriers:
            self._find_carrier(symbol)
        node, dim = self._carriers[symbol]
        return self._call_once(node, "size", (dim,))

    def _find_carrier(self, symbol: sympy.Symbol) -> None:
        """Symbols that turned out equal go by one of them; look where that one is a size now."""
        for tensor, node in reversed(self._tensors.values()):
            for dim, size in enumerate(tensor.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    self._carriers[symbol] = (node, dim)
                    return
        raise TraceError(f"size {symbol} belongs to no tensor that is still known")

    def _call_once(self, node: fx.Node, method: str, args: tuple[int, ...]) -> fx.Node:
        for user in node.users:
            if user.op == "call_method" and user.target == method and user.args[1:] == args:
                return user
        return self.graph.call_method(method, (node, *args))

    def _operation(self, name: str, operands: list[Any]) -> Any:
        function: Callable[..., Any] = OPERATIONS[name]
        if any(isinstance(operand, fx.Node) for operand in operands):
            return self.graph.call_function(function, tuple(operands))
        return function(*operands)


def _needs_node(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or bool(parts(value))


def _foreign_value(value: Any) -> str:
    kind = type(value).__name__
    bases = {base.__name__ for base in inspect.getmro(type(value))}
    if "Cache" in bases:
        return f"a {kind} cannot be part of a graph; pass use_cache=False"
    return (
        f"an argument of type {kind} cannot be part of a graph; make the module that takes it a "
        "leaf together with the one that makes it, or pass it through concrete_args"
    )
