"""Calls of modules that stay opaque: their outputs, from a cache where one is right.

In a chain of 96 equal layers only the first is run; the others have outputs like it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from slapo.errors import TraceError
from slapo.graph.trace.modes import other_mode
from slapo.graph.trace.recorder.call_sizes import CallSizes
from slapo.graph.trace.recorder.mode_reads import ModeReads
from slapo.graph.trace.recorder.templates import OutputTemplate, is_like_example, output_template
from slapo.graph.trace.scripted import scripted_output
from slapo.graph.trace.trees import SYMBOLIC, parts, tensors

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)

#: Fake kernels that refuse what the real kernels compute: grouped matmul in float32.
_STRICTER_FAKES = frozenset({"_meta_grouped_mm_common"})

_SLOTS = frozenset({"_parameters", "_buffers", "_modules"})

#: Attributes that number a layer; they differ between siblings and do not shape their output.
_ORDINAL = re.compile(r"(^|_)(idx|index|layer_id|layer_number|block_id)$")


class _Entry(NamedTuple):
    """What a call has yielded, and whether that may differ in the other mode, train or eval.

    The arguments are kept alive because keys may hold their addresses.
    """

    value: Any
    mode_matters: bool
    arguments: Any


#: Key of a call -> the form of its output, or None where that takes a run on symbols.
Templates = dict[Any, _Entry]


class LeafCalls:
    """Runs leaf modules on fake tensors, and keeps the inputs of their first calls.

    Parameters
    ----------
    templates
        Forms of outputs, from this recording and earlier ones.
    modes
        To be told when an output may differ between train and eval mode.
    """

    def __init__(self, templates: Templates, modes: ModeReads) -> None:
        self._templates = templates
        self._modes = modes
        self._results: dict[Any, _Entry] = {}
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
        with torch._C.DisableTorchFunction():  # a thousand attributes, none of them to be recorded
            sizes = CallSizes((args, kwargs))
            key = call_key(module, args, kwargs, sizes)
        here = (key, tuple(sizes.known))
        if here in self._results:
            known = self._results[here]
        else:
            known = self._results[here] = self._first_result(call, module, args, kwargs, sizes, key)
        if known.mode_matters:
            self._modes.note()
        return known.value

    def _first_result(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: CallSizes,
        key: Any,
    ) -> _Entry:
        if key not in self._templates:
            learnt = self._learn(call, module, args, kwargs, sizes)
            matters = learnt is not None and learnt.mode_matters
            self._templates[key] = _Entry(learnt, matters, (args, kwargs))
        template: OutputTemplate | None = self._templates[key].value
        if template is not None and template.fits(sizes):
            return _Entry(template.make(sizes), template.mode_matters, (args, kwargs))
        with self._modes.apart() as reads:
            result = self.run(call, module, args, kwargs)
        return _Entry(result, reads.asked, (args, kwargs))

    def _learn(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: CallSizes,
    ) -> OutputTemplate | None:
        """The form of the output, in this mode and compared to that in the other."""
        if isinstance(module, torch.jit.ScriptModule):
            return None

        def run(*args: Any, **kwargs: Any) -> Any:
            return self.run(call, module, args, kwargs)

        with self._modes.apart() as reads:
            template = output_template(run, args, kwargs, sizes)
        if template is None or not reads.asked:
            return template
        with self._modes.apart(), other_mode(module):
            alike = is_like_example(template, run, args, kwargs, sizes)
        return replace(template, mode_matters=not alike)

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
                self._modes.note()  # it may ask in C++
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


# --- keys ----------------------------------------------------------------------------------------
def call_key(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: CallSizes
) -> Any:
    """Calls with equal keys have outputs of equal structure and shape, up to names of sizes.

    The key holds the classes, plain attributes, and parameter shapes of the whole module; shapes,
    dtypes and Python values of the arguments; and the state that steers operations (grad mode,
    autocast). Attributes that number a layer (``layer_idx``) are left out.
    """
    return (
        tuple(_module_key(child) for child in module.modules()),
        _value_key((args, kwargs), sizes),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _module_key(module: nn.Module) -> Any:
    if isinstance(module, torch.jit.ScriptModule):
        return id(module)  # its attributes lie in C++
    tensors_of = [*module._parameters.items(), *module._buffers.items()]
    return (
        type(module),
        tuple(module._modules),
        tuple((k, None if t is None else _tensor_key(t)) for k, t in tensors_of),
        tuple((k, _attribute_key(_plain(k, v))) for k, v in vars(module).items() if _counts(k, v)),
    )


def _counts(attribute: str, value: Any) -> bool:
    """Most attributes of a module are empty tables of hooks."""
    empty = isinstance(value, dict) and not value
    return not (empty or attribute in _SLOTS or _is_ordinal(attribute))


@lru_cache(maxsize=4096)
def _is_ordinal(attribute: str) -> bool:
    return _ORDINAL.search(attribute) is not None


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


def _tensor_key(tensor: torch.Tensor, size_key: Callable[[Any], Any] = int) -> Any:
    shape = tuple(map(size_key, tensor.shape))
    return (shape, tensor.dtype, tensor.device, tensor.requires_grad)


def _value_key(value: Any, sizes: CallSizes) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor_key(value, sizes.name)
    if isinstance(value, torch.Size):
        return tuple(map(sizes.name, value))
    if isinstance(value, torch.SymInt):
        return sizes.name(value)
    if isinstance(value, SYMBOLIC):
        return str(value.node.expr)
    elements = parts(value)
    if elements is None:
        return repr(value)
    return (type(value), tuple((part.key, _value_key(part.value, sizes)) for part in elements))


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
