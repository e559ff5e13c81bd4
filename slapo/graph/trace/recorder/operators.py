"""How a recorded call is written in the graph: the same spelling a symbolic trace would use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from slapo.graph.trace.recorder.grad_mode import REGION_FUNCTIONS


def _tensor_methods() -> dict[Any, str]:
    """What a function mode receives for ``x.name(...)`` -> name."""
    found: dict[Any, str] = {}
    for name in dir(torch.Tensor):
        method = getattr(torch.Tensor, name, None)
        if callable(method) and method.__hash__ is not None:
            found.setdefault(method, name)
    return found


def _tensor_properties() -> dict[Any, str]:
    """What a function mode receives when ``x.name`` is read -> name."""
    found: dict[Any, str] = {}
    for kind in reversed(torch.Tensor.__mro__):
        for name, value in vars(kind).items():
            if name != "__class__" and hasattr(type(value), "__get__") and not callable(value):
                found[value.__get__] = name
    return found


METHODS = _tensor_methods()
PROPERTIES = _tensor_properties()

_METADATA = (
    "size stride numel nelement storage_offset dim ndimension is_contiguous element_size "
    "is_floating_point is_complex is_signed is_same_size is_set_to is_shared is_pinned "
    "is_inference get_device has_names untyped_storage data_ptr __len__ __hash__ __repr__ "
    "__format__ __str__ __bool__ __int__ __float__ __index__ __contains__ __dlpack_device__"
)
_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"

#: Methods that only ask about a tensor; calls are not recorded, symbolic results are traced back.
METADATA = frozenset(_METADATA.split())

#: Metadata whose result may be a symbolic number that becomes a node where it is used.
SIZE_METHODS = frozenset({"size", "stride", "numel", "nelement", "storage_offset"})

#: Operations that clamp a bound to the size of their input, as ``x[:, :n]`` does.
SLICING = frozenset({"__getitem__", "__setitem__", "narrow", "slice_scatter", "split", "chunk"})

#: Methods that leave no trace in a graph.
REFUSED = {
    "register_hook": "registers a hook on a tensor",
    "register_post_accumulate_grad_hook": "registers a hook on a tensor",
    "backward": "runs a backward pass",
    "share_memory_": "moves a tensor to shared memory",
}

_BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "true_divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "__truediv__": operator.truediv,
    "__div__": operator.truediv,
    "__floordiv__": operator.floordiv,
    "__mod__": operator.mod,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "__lshift__": operator.lshift,
    "__rshift__": operator.rshift,
    "__iand__": operator.iand,
    "__ior__": operator.ior,
    "__ixor__": operator.ixor,
    "__getitem__": operator.getitem,
}
for _name in ("add", "sub", "mul", "pow", "matmul", "eq", "ne", "lt", "le", "gt", "ge"):
    _BINARY[f"__{_name}__"] = _BINARY[_name]
_REFLECTED = {f"__r{name}__": _BINARY[f"__{name}__"] for name in _OPERATORS.split()}
_REFLECTED["__rdiv__"] = operator.truediv
_UNARY = {"neg": operator.neg, "__neg__": operator.neg, "__invert__": operator.invert}
_INPLACE_OPERATORS = frozenset(getattr(operator, f"i{name}") for name in _OPERATORS.split())


@dataclass(frozen=True)
class CallForm:
    """A node in the making: its op and target, and the order of its operands."""

    op: str
    target: Any
    reflected: bool = False


def call_form(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallForm:
    """The canonical form of a call that the recorder has seen.

    Examples
    --------
    >>> call_form(torch.Tensor.add, (1, 2), {}).target is operator.add
    True
    >>> call_form(torch.Tensor.view, (1, 2), {}).target
    'view'
    """
    name = METHODS.get(function)
    if name is None:
        return CallForm("call_function", function)
    if name == "__setitem__":
        return CallForm("call_function", operator.setitem)
    if not kwargs and len(args) == 2 and name in _BINARY:
        return CallForm("call_function", _BINARY[name])
    if not kwargs and len(args) == 2 and name in _REFLECTED:
        return CallForm("call_function", _REFLECTED[name], reflected=True)
    if not kwargs and len(args) == 1 and name in _UNARY:
        return CallForm("call_function", _UNARY[name])
    return CallForm("call_method", name)


def writes_in_place(op: str, target: Any, kwargs: Mapping[str, Any]) -> bool:
    """True if a call with this target changes one of its arguments."""
    if kwargs.get("out") is not None or kwargs.get("inplace") is True:
        return True
    if op == "call_function" and (target is operator.setitem or target in _INPLACE_OPERATORS):
        return True
    name = target if op == "call_method" else getattr(target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def is_impure(node: fx.Node) -> bool:
    """True for nodes that dead-code elimination must keep although nobody uses their value.

    ``fx`` itself knows neither in-place methods nor writes of functions such as ``F.relu_``. Calls
    of modules stay too: they may draw random numbers, update statistics or run hooks.

    Examples
    --------
    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> is_impure(graph.call_method("mul_", (x, 2))), is_impure(graph.call_method("mul", (x, 2)))
    (True, False)
    """
    if node.op in ("placeholder", "output", "call_module"):
        return True
    if node.op == "get_attr":
        return False
    if writes_in_place(node.op, node.target, node.kwargs):
        return True
    if node.op == "call_method":
        return node.target in ("retain_grad",)
    return node.target in REGION_FUNCTIONS or node.is_impure()


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Drop nodes without users, from the last to the first; see :func:`is_impure`."""
    for node in reversed(graph.nodes):
        if not node.users and not is_impure(node):
            graph.erase_node(node)
