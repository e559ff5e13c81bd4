"""The function mode that writes a graph while ``forward`` runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from slapo.errors import TraceError
from slapo.graph.trace.function_calls import FunctionApply, is_checkpoint
from slapo.graph.trace.recorder.fake_inputs import RecordingMode
from slapo.graph.trace.recorder.grad_mode import GradModeRegions, enter_autocast, leave_autocast
from slapo.graph.trace.recorder.leaf_calls import LeafCalls
from slapo.graph.trace.recorder.mode_reads import ModeReads
from slapo.graph.trace.recorder.operators import (
    METADATA,
    METHODS,
    PROPERTIES,
    REFUSED,
    SIZE_METHODS,
    SLICING,
    call_form,
    writes_in_place,
)
from slapo.graph.trace.recorder.shape_env import WITHIN_OPERATION, Origin, RecordingShapeEnv
from slapo.graph.trace.recorder.values import ValueTable
from slapo.graph.trace.trees import has_tensor, tensors

CHECKPOINT_REFUSED = (
    "activation checkpointing inside a traced forward would be lost; switch it off "
    "in the model and use .checkpoint() of the schedule, or make the "
    "module a leaf"
)


COLLECTIVE_REFUSED = (
    "the forward calls the collective {}; make the module a leaf, use .sync() of the schedule, or "
    "wrap the collective in an autograd.Function, which a graph can hold"
)


class Recorder(TorchFunctionMode):
    """Appends to a graph what a module's forward does.

    Parameters
    ----------
    root
        The module being recorded.
    fake_mode
        The mode its tensors live in, with a :class:`RecordingShapeEnv`.
    is_leaf
        ``is_leaf(module, path)``: True for modules that become one call.
    """

    def __init__(
        self,
        root: nn.Module,
        fake_mode: FakeTensorMode,
        is_leaf: Callable[[nn.Module, str], bool],
    ) -> None:
        super().__init__()
        assert isinstance(fake_mode, RecordingMode)
        assert isinstance(fake_mode.shape_env, RecordingShapeEnv)
        self.graph = fx.Graph()
        # A child called `self` (BERT has one) must not take the name of the first parameter of
        # the generated forward: claim the name, then free the node.
        self.graph.erase_node(self.graph.create_node("placeholder", "self", name="self"))
        self.values = ValueTable(root, self.graph, fake_mode)
        self.shape_env = fake_mode.shape_env
        self.modes = ModeReads()
        self.leaf_calls = LeafCalls(fake_mode.templates, self.modes)
        self.dtypes_read: set[fx.Node] = set()
        self.failed_in: str | None = None
        self._root = root
        self._is_leaf = is_leaf
        self._regions = GradModeRegions(self.graph)
        self._paths = {id(module): path for path, module in root.named_modules()}
        self._stack: list[str] = []
        self._paused = 0
        self._entered: set[str] = {""}

    # --- state -------------------------------------------------------------------------------
    @property
    def entered(self) -> set[str]:
        """Paths of the modules whose forward went into the graph."""
        return self._entered

    @contextmanager
    def pause(self, origin: Origin = Origin.SETUP) -> Iterator[None]:
        """Within the block nothing is recorded."""
        self._paused += 1
        try:
            with self.shape_env.asked_by(origin):
                yield
        finally:
            self._paused -= 1

    def bind(self, value: Any, node: fx.Node, mutated: bool = False) -> Any:
        """See :meth:`ValueTable.bind`."""
        with self.pause():
            return self.values.bind(value, node, mutated)

    # --- torch functions ---------------------------------------------------------------------
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one torch call, and record it."""
        kwargs = kwargs or {}
        if self._paused:
            return self._operate(func, args, kwargs)
        if func in PROPERTIES:
            return self._read_property(func, *args)
        if getattr(func, "__name__", "") in ("__set__", "__delete__"):
            return self._write_property(func, args)
        if func is torch._C._set_grad_enabled:
            self._regions.switch(args[0])
            return func(*args)
        name = METHODS.get(func)
        if name in METADATA:
            return self._metadata(func, name, args, kwargs)
        if (getattr(func, "__module__", None) or "").startswith("torch.distributed."):
            raise TraceError(COLLECTIVE_REFUSED.format(func.__name__))
        if name in REFUSED:
            raise TraceError(
                f"the forward {REFUSED[name]}, which a graph cannot hold; make it a leaf"
            )
        return self._record_call(func, args, kwargs)

    def _operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, unrecorded; no context managers, this is called very often."""
        env = self.shape_env
        before = env.origin
        env.origin = WITHIN_OPERATION.get(before, before)
        if env.origin is Origin.OPERATION and _is_slicing(func):
            env.origin = Origin.SLICE
        self._paused += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._paused -= 1
            env.origin = before

    def _read_property(self, func: Any, tensor: torch.Tensor, *rest: Any) -> Any:
        """Only what yields a tensor (``x.T``) becomes a node; sizes and devices are noted."""
        result = func(tensor, *rest)
        name = PROPERTIES[func]
        if isinstance(result, torch.Tensor) and self.values.knows(tensor):
            if self.values.knows(result) and name == "grad":
                return result
            node = self.graph.call_function(getattr, (self.values.argument(tensor), name))
            return self.bind(result, node)
        if name == "shape":
            self.values.note_sizes(result, tensor, "size", ())
        elif name == "device":
            self.values.note_device(result, tensor)
        elif name == "dtype":
            self._note_dtype(tensor)
        return result

    def _note_dtype(self, tensor: torch.Tensor) -> None:
        node = self.values.node_of(tensor)
        if node is not None:
            self.dtypes_read.add(node)

    def _write_property(self, func: Any, args: tuple[Any, ...]) -> Any:
        if self.values.knows(args[0]):
            owner = getattr(func, "__self__", None)
            name = getattr(owner, "__name__", "an attribute")
            raise TraceError(
                f"the forward sets .{name} of a tensor, which a graph cannot hold; make the module "
                "a leaf"
            )
        return func(*args)

    def _metadata(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A question about a tensor: the answer steers Python, sizes become nodes where used."""
        result = func(*args, **kwargs)
        if name in SIZE_METHODS:
            self.values.note_sizes(result, args[0], name, (*args[1:], *kwargs.values()))
        elif name in ("is_floating_point", "is_complex", "is_signed"):
            self._note_dtype(args[0])
        return result

    def _record_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Arguments first: the call itself may pin a size, and then it would stand here as a number.
        failure, node_args, node_kwargs = self._arguments(args, kwargs)
        decided = len(self.shape_env.decisions)
        result = self._operate(func, args, kwargs)
        acts = result is None and bool(tensors([args, kwargs]))
        if not has_tensor(result) and not acts:
            self.shape_env.claim(decided)
            return result
        if failure is not None:
            raise failure
        form = call_form(func, args, kwargs)
        operands = node_args[::-1] if form.reflected else node_args
        node = self.graph.create_node(form.op, form.target, operands, node_kwargs)
        mutated = writes_in_place(form.op, form.target, kwargs)
        return self.bind(result, node, mutated)

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[TraceError | None, tuple[Any, ...], dict[str, Any]]:
        """The arguments as nodes; the failure to make them counts only if a node is needed."""
        try:
            with self.pause():
                return None, self.values.argument(tuple(args)), self.values.argument(dict(kwargs))
        except TraceError as error:
            return error, (), {}

    # --- module calls ------------------------------------------------------------------------
    def call_module(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What stands in for ``nn.Module.__call__``: a leaf becomes a node, others are entered."""
        if self._paused:
            # Within a leaf, too, equal siblings are run once: a container of 96 layers as a leaf.
            inside = self.leaf_calls.result if module._modules else self.leaf_calls.run
            return inside(call, module, args, kwargs)
        path = self._paths.get(id(module))
        if path is None or not self._is_leaf(module, path):
            return self._enter(call, module, path, args, kwargs)
        with self._located(path), self.pause():
            node_args = self.values.argument(tuple(args))
            node_kwargs = self.values.argument(dict(kwargs))
        node = self.graph.call_module(path, node_args, node_kwargs)
        self.leaf_calls.note(path, args, kwargs)
        with self._located(path), self.pause(Origin.LEAF):
            result = self.leaf_calls.result(call, module, args, kwargs)
        return self.bind(result, node)

    def _enter(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        path: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(
                f"{path or type(module).__name__} has backward hooks, which its inlined forward "
                "would lose; keep it a leaf (leaf_modules=[...])"
            )
        if path is not None:
            self._entered.add(path)
        with self._located(path if path is not None else f"a {type(module).__name__}"):
            return call(module, *args, **kwargs)

    @contextmanager
    def _located(self, path: str) -> Iterator[None]:
        """Remember the innermost module that an exception has come out of."""
        self._stack.append(path)
        try:
            yield
        except Exception:
            if self.failed_in is None:
                self.failed_in = path
            raise
        finally:
            self._stack.pop()

    # --- functions that no mode sees ---------------------------------------------------------
    def apply_function(
        self,
        apply: Callable[..., Any],
        function: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """An ``autograd.Function`` is one node, so that its own backward is kept."""
        if self._paused:
            return apply(*args, **kwargs)
        if is_checkpoint(function):
            raise TraceError(CHECKPOINT_REFUSED)
        with self.pause(Origin.LEAF):
            node_args = self.values.argument(tuple(args))
            node_kwargs = self.values.argument(dict(kwargs))
            result = apply(*args, **kwargs)
        node = self.graph.call_function(FunctionApply(function), node_args, node_kwargs)
        given = {id(tensor) for tensor in tensors([args, kwargs])}
        mutated = any(id(tensor) in given for tensor in tensors(result))
        return self.bind(result, node, mutated)

    def refuse_checkpoint(self) -> None:
        """Called where ``torch.utils.checkpoint`` starts."""
        if not self._paused:
            raise TraceError(CHECKPOINT_REFUSED)

    def enter_autocast(self, region: torch.autocast) -> fx.Node | None:
        """Record the start of ``with torch.autocast(...)``."""
        if self._paused:
            return None
        arguments = (region.device, region.fast_dtype, region._enabled, region._cache_enabled)
        return self.graph.call_function(enter_autocast, arguments)

    def leave_autocast(self, entered: fx.Node | None) -> None:
        """Record its end."""
        if entered is not None:
            self.graph.call_function(leave_autocast, (entered,))

    def check_dispatch(self, operation: Any) -> None:
        """Refuse an operation with effects that reached torch's dispatcher unseen."""
        if self._paused:
            return
        if operation.namespace in ("c10d", "_c10d_functional"):
            raise TraceError(COLLECTIVE_REFUSED.format(operation))
        if operation._schema.is_mutable:
            raise TraceError(
                f"the forward runs {operation}, which writes in place, where the recorder cannot "
                "put it in the graph; make the module a leaf"
            )


def _is_slicing(func: Any) -> bool:
    return METHODS.get(func, getattr(func, "__name__", "")) in SLICING
