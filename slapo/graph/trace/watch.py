"""What a forward reads and changes beside its tensors, seen while dynamo captures it.

A graph holds what is done to tensors. That a forward also counts its calls, or chooses by the
dtype of an input, is seen here: the first is refused, the second becomes a limit of the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo import output_graph
from torch._dynamo.symbolic_convert import InstructionTranslator, compare_op_handlers
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import GradModeVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from slapo.errors import TraceError
from slapo.graph.trace.contract import states_among
from slapo.graph.trace.targets import TRACELESS_METHODS, refuse_traceless

#: Questions about how a tensor lies in memory: a captured answer is that of the example.
_LAYOUT = frozenset({"is_contiguous", "stride", "storage_offset"})
#: Questions about the dtype of a tensor, as methods and as functions of torch.
_KINDS_OF_NUMBER = {name: getattr(torch, name) for name in ("is_floating_point", "is_complex")}
_TORCH = torch.__file__.rpartition("/")[0]
_IDENTITY = (
    "the forward asks whether two tensors are one object, which a graph cannot tell for other "
    "calls; make the module a leaf: leaf_modules=[...] or an attribute traceable = False"
)


@dataclass
class Watch:
    """What was seen.

    Attributes
    ----------
    effects
        Python objects that the forward changes, as ``(where, names of attributes)``.
    steering
        Nodes of the tensors by whose dtype Python has decided.
    grad_asked
        Nodes of the tensors of which Python has asked whether they require a gradient.
    enables_grad
        Whether the forward switches gradients on where they are on, of which dynamo makes no node.
    """

    effects: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    steering: set[fx.Node] = field(default_factory=set)
    grad_asked: set[fx.Node] = field(default_factory=set)
    enables_grad: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block dynamo tells what it meets."""
        outer, asked = self, TensorVariable.method_attr_requires_grad
        called = TensorVariable.call_method
        switched = GradModeVariable._call_func
        called_function = TorchInGraphFunctionVariable.call_function
        made = output_graph.OutputGraph.codegen_suffix

        def dtype(variable: TensorVariable, tx: Any) -> Any:
            return (
                None if variable.dtype is None else _Fact(variable.dtype, variable, "dtype", outer)
            )

        def device(variable: TensorVariable, tx: Any) -> Any:
            if variable.device is None:
                return None
            return _Fact(variable.device, variable, "device", None)

        def requires_grad(variable: TensorVariable, tx: Any) -> Any:
            outer.grad_asked.add(variable.as_proxy().node)
            return asked(variable, tx)

        def call_function(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if function.value in _KINDS_OF_NUMBER.values():
                outer.steering.update(
                    v.as_proxy().node for v in args if isinstance(v, TensorVariable)
                )
            return called_function(function, tx, args, kwargs)

        def switch(variable: GradModeVariable, tx: Any, values: Any) -> None:
            outer.enables_grad |= bool(values[0]) and torch.is_grad_enabled()
            switched(variable, tx, values)

        def call_method(variable: TensorVariable, tx: Any, name: str, *args: Any) -> Any:
            if name in _LAYOUT and not tx.f_code.co_filename.startswith(_TORCH):
                _refuse_layout(name)
            if name in TRACELESS_METHODS:
                refuse_traceless(name)
            if name in _KINDS_OF_NUMBER:
                outer.steering.add(variable.as_proxy().node)
            return called(variable, tx, name, *args)

        def suffix(graph: Any, *args: Any, **kwargs: Any) -> None:
            outer.effects += _effects(graph)
            made(graph, *args, **kwargs)

        with ExitStack() as stack:
            enter = stack.enter_context
            enter(mock.patch.object(TensorVariable, "method_attr_dtype", dtype))
            enter(mock.patch.object(TensorVariable, "method_attr_device", device))
            enter(mock.patch.object(TensorVariable, "method_attr_requires_grad", requires_grad))
            enter(mock.patch.object(TensorVariable, "call_method", call_method))
            enter(mock.patch.object(GradModeVariable, "_call_func", switch))
            enter(mock.patch.object(TorchInGraphFunctionVariable, "call_function", call_function))
            enter(mock.patch.dict(compare_op_handlers, _comparing(compare_op_handlers)))
            enter(mock.patch.object(output_graph.OutputGraph, "codegen_suffix", suffix))
            yield

    def check_effects(self) -> None:
        """Refuse a forward that changes Python objects.

        Raises
        ------
        TraceError
            Naming them.
        """
        for where, names in self.effects:
            if _is_harmless(where, names):
                continue
            what = f"attribute {names[0]!r} of {where}" if names else where
            raise TraceError(
                f"the forward changes {what}, which a graph cannot do; make the module that does "
                "it a leaf: leaf_modules=[...] or an attribute traceable = False"
            )


def _refuse_layout(name: str) -> None:
    raise TraceError(
        f"the forward asks for {name}() of a tensor, and a graph cannot tell how the tensors of "
        "other calls lie in memory; make the module a leaf: leaf_modules=[...] or an attribute "
        "traceable = False"
    )


def _comparing(handlers: dict[str, Any]) -> dict[str, Any]:
    """The handlers of ``is`` and ``is not``, which refuse what the example alone would answer.

    A leaf, ``contiguous()`` or ``to()`` may return what it was given. Arguments have guards.
    """

    def of(handler: Any) -> Any:
        def compare(tx: Any, values: Any, options: Any) -> Any:
            if all(isinstance(value, TensorVariable) for value in values):
                same = len({value.as_proxy().node for value in values}) == 1
                given = all(value.source is not None for value in values)
                if not (same or given or tx.f_code.co_filename.startswith(_TORCH)):
                    raise TraceError(_IDENTITY)
            return handler(tx, values, options)

        return compare

    return {name: of(handlers[name]) for name in ("is", "is not")}


class _Fact(ConstantVariable):
    """The dtype or device of a tensor.

    Handed on to an operation it stays a question to the tensor, so that the graph follows a model
    that moves; as a value of Python's it is the constant of the example, and that is noted.
    """

    def __init__(
        self, value: Any, tensor: Any = None, name: str = "", watch: Any = None, **kwargs: Any
    ) -> None:
        self._watch = None
        super().__init__(value, **kwargs)
        self.tensor, self.name, self._watch = tensor, name, watch

    @property
    def value(self) -> Any:
        """The constant; whoever reads it decides by it."""
        if self._watch is not None:
            self._watch.steering.add(self.tensor.as_proxy().node)
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value

    def as_proxy(self) -> Any:
        """A node that asks the tensor."""
        tx = InstructionTranslator.current_tx()
        arguments = (self.tensor.as_proxy(), self.name)
        proxy = tx.output.create_proxy("call_function", getattr, arguments, {})
        proxy.node.meta["example_value"] = self._value
        return proxy


def _effects(graph: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modified objects that exist outside of the captured forward."""
    effects = graph.side_effects
    for variable in effects._get_modified_vars():
        kind = type(variable.mutation_type).__name__
        if not kind.endswith("Existing") or variable.source is None:
            continue
        names = tuple(map(str, effects.store_attr_mutations.get(variable, ())))
        yield _readable(variable.source.name), names


def _readable(source: str) -> str:
    """``L['module']._modules['fc']`` as ``fc``."""
    text = re.sub(r"\._modules\['([^']+)'\]", r".\1", source)
    text = text.replace("L['module']", "the module")
    text = re.sub(r"L\['kwargs'\]\['([^']+)'\]", r"argument '\1'", text)
    text = re.sub(r"L\['args'\]\[(\d+)\]", r"positional argument \1", text)
    return re.sub(r"G\['(?:__import_)?([^']+)'\]", lambda m: m[1].replace("_dot_", "."), text)


def _is_harmless(where: str, names: tuple[str, ...]) -> bool:
    """True for Transformers' own bookkeeping.

    That is the collector of outputs, put back at the end of a forward, and the kind of its labels,
    which a head notes in its config.
    """
    notes_kind = where.endswith(".config") and set(names) <= {"problem_type"}
    return notes_kind or where.endswith(("_active_collector", ".COLLECTOR"))  # one, two names


def states_read(codes: list[CodeType]) -> frozenset[str]:
    """Which of ``"grad"`` and ``"autocast"`` the captured code asks for.

    By the names in the code that was captured, torch's own aside: asked for or not, dynamo takes
    the state of the capture for a constant.
    """
    names = {name for c in codes if not c.co_filename.startswith(_TORCH) for name in c.co_names}
    return states_among(names)
