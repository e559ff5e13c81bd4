"""Calls of modules that stay opaque: their outputs, from a cache where one is right.

In a chain of 96 equal layers only the first is run; the others have outputs like it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from slapo.errors import TraceError
from slapo.graph.recorder.scripted import scripted_output
from slapo.graph.recorder.trees import SYMBOLIC, map_leaves, parts, tensors

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)

#: Fake kernels that refuse what the real kernels compute: grouped matmul in float32.
_STRICTER_FAKES = frozenset({"_meta_grouped_mm_common"})

#: Attributes that number a layer; they differ between siblings and do not shape their output.
_ORDINAL = re.compile(r"(^|_)(idx|index|layer_id|layer_number|block_id)$")


class LeafCalls:
    """Runs leaf modules on fake tensors, and keeps the inputs of their first calls."""

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}
        self._inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._inconsistent: set[str] = set()
        self._guessed = 0

    @property
    def inputs(self) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """First call of each leaf; those called with differing Python values are left out."""
        return {k: v for k, v in self._inputs.items() if k not in self._inconsistent}

    def note(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs of a call."""
        first = self._inputs.setdefault(path, (args, kwargs))
        if first[0] is not args and _plain_values(first) != _plain_values((args, kwargs)):
            self._inconsistent.add(path)

    def result(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of a leaf: that of an equal sibling if there was one, else its own."""
        key = call_key(module, args, kwargs)
        if key not in self._results:
            self._results[key] = self.run(call, module, args, kwargs)
            return self._results[key]
        return map_leaves(self._results[key], _copy)

    def run(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of a leaf, or of a module inside one.

        A module whose shapes depend on the data (experts that pick their tokens) cannot run on
        fake tensors. It is taken to return a tensor like its first tensor input, which is what
        mixtures of experts do. Only the recording relies on this, where Python asks for a shape;
        the graph calls the module itself.
        """
        guessed = self._guessed
        try:
            if isinstance(module, torch.jit.ScriptModule):
                trains = any(_trains(module, tensor) for tensor in tensors([args, kwargs]))
                return scripted_output(call, module, args, kwargs, trains)
            return call(module, *args, **kwargs)
        except TraceError:
            raise
        except Exception as error:
            guess = _cannot_be_faked(error) or self._guessed > guessed
            given = tensors([args, kwargs])
            if not guess or not given:
                raise
            self._guessed += 1
            return torch.empty_like(given[0]).requires_grad_(_trains(module, given[0]))


def _cannot_be_faked(error: Exception) -> bool:
    if isinstance(error, DATA_DEPENDENT):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name in _STRICTER_FAKES for frame, _ in frames)


def _trains(module: nn.Module, like: torch.Tensor) -> bool:
    if not torch.is_grad_enabled() or not like.is_floating_point():
        return False
    return like.requires_grad or any(p.requires_grad for p in module.parameters())


def _copy(value: Any) -> Any:
    return torch.ops.aten.alias(value) if isinstance(value, torch.Tensor) else value


# --- keys ----------------------------------------------------------------------------------------
def call_key(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls with equal keys have outputs of equal structure and shape.

    The key holds the classes, plain attributes, and parameter shapes of the whole module; shapes,
    dtypes and Python values of the arguments; and the state that steers operations (grad mode,
    autocast). Attributes that number a layer (``layer_idx``) are left out.
    """
    return (
        tuple(_module_key(child) for child in module.modules()),
        _value_key((args, kwargs)),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _module_key(module: nn.Module) -> Any:
    if isinstance(module, torch.jit.ScriptModule):
        return id(module)  # its attributes lie in C++
    attributes = vars(module)
    tensors_of = [*module._parameters.items(), *module._buffers.items()]
    return (
        type(module),
        tuple(module._modules),
        tuple((k, None if t is None else _tensor_key(t)) for k, t in tensors_of),
        tuple((k, _attribute_key(_plain(k, v))) for k, v in attributes.items() if _counts(k)),
    )


def _counts(attribute: str) -> bool:
    private_state = attribute in ("_parameters", "_buffers", "_modules")
    return not private_state and not _ORDINAL.search(attribute)


def _plain(attribute: str, value: Any) -> Any:
    """Hooks are listed under numbers that no two hooks share; only the hooks count."""
    return list(value.values()) if "_hooks" in attribute and isinstance(value, dict) else value


def _attribute_key(value: Any) -> Any:
    """Plain values by value; of other objects, which siblings seldom share, the class only."""
    if value is None or isinstance(value, (str, int, float, bool, torch.dtype, torch.device)):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor_key(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_attribute_key, value))
    if isinstance(value, dict):
        return tuple((str(k), _attribute_key(v)) for k, v in value.items())
    return getattr(value, "__qualname__", type(value))


def _tensor_key(tensor: torch.Tensor) -> Any:
    return (tuple(map(_size_key, tensor.shape)), tensor.dtype, tensor.device, tensor.requires_grad)


def _size_key(size: Any) -> Any:
    return str(size.node.expr) if isinstance(size, SYMBOLIC) else size


def _value_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor_key(value)
    if isinstance(value, torch.Size):
        return tuple(map(_size_key, value))
    if isinstance(value, SYMBOLIC):
        return _size_key(value)
    elements = parts(value)
    if elements is None:
        return repr(value)
    return (type(value), tuple((part.key, _value_key(part.value)) for part in elements))


def _plain_values(value: Any) -> Any:
    """What must be equal for two calls to be served by one graph."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dim(), value.dtype)
    if isinstance(value, SYMBOLIC):
        return "size"
    elements = parts(value)
    if elements is None:
        return repr(value)
    return (type(value), tuple((part.key, _plain_values(part.value)) for part in elements))
