"""Modules that stay calls while dynamo captures the forward above them.

For the time of a capture each such module is an instance of a subclass of its class whose
``__call__`` goes to :func:`call_leaf`, a function that dynamo puts into its graph as it is. So
dynamo never looks inside, ``isinstance`` answers as before, and the module's hooks stay its own.
While dynamo asks what such a call returns, the module itself runs on the fake tensors; siblings
that are equal in all that counts share one run, so a chain of 96 layers costs one layer.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
)

from slapo.errors import TraceError
from slapo.graph.trace.flat_outputs import access_paths, flattened, put_together
from slapo.graph.trace.guesses import Guesses, trains
from slapo.graph.trace.leaf_keys import has_values, ordinal_reads, state_key
from slapo.graph.trace.leaf_outputs import CallForm, CapturedForm, OutputForm
from slapo.graph.trace.leaf_runs import Runs, learn, settle_equal_sizes
from slapo.graph.trace.leaves import is_torch_leaf
from slapo.graph.trace.modes import other_mode
from slapo.graph.trace.on_meta import data_of_its_own, on_meta, tensors_replaced
from slapo.graph.trace.output_capture import (
    COLLECTOR,
    capturing_hooks,
    inner_keys,
    refuse_inner,
)
from slapo.graph.trace.scripted import scripted_output
from slapo.graph.trace.state import ModuleState
from slapo.graph.trace.trees import SYMBOLIC, parts, tensors

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)

#: Fake kernels that refuse what the real kernels compute: grouped matmul in float32.
_STRICTER_FAKES = frozenset({"_meta_grouped_mm_common"})


class _DataDependentError(Exception):
    """The sizes of an output follow from the data."""


_ACTIVE: ContextVar[LeafCalls | None] = ContextVar("slapo_leaf_calls", default=None)


@torch._dynamo.allow_in_graph
def call_leaf(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stand for the call of the module at `path`, in dynamo's graph and while it is captured."""
    active = _ACTIVE.get()
    assert active is not None, "only a capture calls leaves this way"
    return active.flat_output(path, args, kwargs)


@torch._dynamo.assume_constant_result
def _structure_of(path: str) -> Any:
    """How to put together what the last call of a leaf has returned."""
    active = _ACTIVE.get()
    assert active is not None, "only a capture calls leaves this way"
    return active.structures[path]


@dataclass
class _Known:
    """A form that has been learnt, None where each call must be run by itself.

    The module is kept alive: the key of this holds addresses of what belongs to it.
    """

    form: OutputForm | None
    module: nn.Module
    guessed: bool = False


@dataclass
class LeafCalls:
    """The leaves of one capture.

    Parameters
    ----------
    root
        The captured module.
    leaves
        Path -> module, for all modules below it that are not entered.
    outputs
        Forms of outputs by what decides them; share it between captures of one model.
    device
        Where the model is.
    containers
        Path -> the form of what a leaf returns that has been captured; None for one that has yet
        to be, at whose call the capture ends: see :attr:`reached`.
    """

    root: nn.Module
    leaves: dict[str, nn.Module]
    outputs: dict[Any, _Known] = field(default_factory=dict)
    device: torch.device | None = None
    containers: Mapping[str, CapturedForm | None] = field(default_factory=dict)
    reached: str | None = None
    inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    structures: dict[str, Any] = field(default_factory=dict)
    accesses: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    mode_matters: bool = False
    changed: set[str] = field(default_factory=set)
    _settled: dict[Any, _Known] = field(default_factory=dict)
    _keys: dict[str, Any] = field(default_factory=dict)
    _classes: dict[str, type[nn.Module]] = field(default_factory=dict)
    _inconsistent: set[str] = field(default_factory=set)
    _depth: int = 0
    _on_data: bool = False

    def __post_init__(self) -> None:
        self._guesses = Guesses(self._run_on_data, self.device)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Within the block calls of the leaves go to :func:`call_leaf`."""
        lists = [m for m in self.root.modules() if type(m) is nn.ModuleList]
        scripted: list[tuple[nn.Module, str]] = []
        token = _ACTIVE.set(self)
        try:
            for path, module in self.leaves.items():
                if isinstance(module, torch.jit.ScriptModule):
                    scripted.append(self._shadow(path, module))
                    continue
                self._classes[path] = type(module)
                kind: Any = type(module)
                stand_in = _stand_in(kind, capturing_hooks(module), inner_keys(module))
                vars(module)["_slapo_leaf"] = path
                module.__class__ = stand_in
            for each in lists:
                vars(each)["_slapo_items"] = list(each._modules.values())
                each.__class__ = _ListStandIn
            yield
        finally:
            _ACTIVE.reset(token)
            for each in lists:
                each.__class__ = nn.ModuleList
                vars(each).pop("_slapo_items", None)
            for path, kind in self._classes.items():
                self.leaves[path].__class__ = kind
                vars(self.leaves[path]).pop("_slapo_leaf", None)
            for owner, name in scripted:
                vars(owner).pop(name, None)
            self._classes.clear()

    def _shadow(self, path: str, module: torch.jit.ScriptModule) -> tuple[nn.Module, str]:
        """TorchScript's classes lie in C++: a function in front of the child instead."""
        owner, _, name = path.rpartition(".")
        holder = self.root.get_submodule(owner)
        vars(holder)[name] = _ScriptStandIn(path)
        return holder, name

    @property
    def child_inputs(self) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """First call of each leaf; those called with differing Python values are left out."""
        return {k: v for k, v in self.inputs.items() if k not in self._inconsistent}

    # --- outputs -----------------------------------------------------------------------------
    def flat_output(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor, or the tensors and sizes in what the leaf returns.

        Dynamo's graphs hold nothing else; :attr:`structures` says what they are parts of.
        """
        if self._on_data:
            self.structures[path] = None
            return self._called(path, args, kwargs)
        result = self.output(path, args, kwargs)
        if self._depth:  # within another leaf, which is run and not captured
            self.structures[path] = None
            return result
        flat: list[Any] = []
        structure = None if isinstance(result, torch.Tensor) else flattened(result, flat)
        self.structures[path] = structure
        accesses = access_paths(result)
        if self.accesses.setdefault(path, accesses) != accesses:
            raise TraceError(f"{path!r} returns other things in one call than in another")
        return result if structure is None else tuple(flat)

    def output(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the leaf returns for arguments without data."""
        module = self.leaves[path]
        if self._depth == 0:
            self._note(path, args, kwargs)
        elif not _is_repeated(path):
            return self._run(path, module, args, kwargs)
        if path in self.containers:
            return self._captured(path, args, kwargs)
        known, call = self._form_of(path, module, args, kwargs)
        if known.form is None:
            result = self._run(path, module, args, kwargs)
        else:
            self.mode_matters = self.mode_matters or known.form.mode_matters
            with torch._C.DisableTorchFunction():
                result = known.form.make(call)
        self._guesses.count += known.guessed
        if self._depth == 0:
            self._check_guesses()
        return result

    def _form_of(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Known, CallForm]:
        """The form of what the leaf returns, learnt if a sibling has not told it, and its sizes."""
        if isinstance(module, torch.jit.ScriptModule):
            return _Known(None, module), CallForm.of(args, kwargs)
        with torch._C.DisableTorchFunction():  # a mode would see every look at a size
            if path not in self._keys:
                self._keys[path] = self._module_key(path, module)
            call = CallForm.of(args, kwargs)
            known = self._known(path, module, call)
        if known is None:
            guessed = self._guesses.count
            with ordinal_reads(module) as read:
                runs = self._runs(path, module, call)
                if settle_equal_sizes(runs, call):
                    call = CallForm.of(args, kwargs)
                known = self._known(path, module, call) or self._learn(path, module, runs, call)
            known.guessed = known.guessed or self._guesses.count > guessed
            if read or (known.guessed and has_values(module)):
                known.form = None
        return known, call

    def _captured(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form = self.containers[path]
        if form is None:
            self.reached = path
            raise TraceError(f"{path!r} has to be captured first")
        self.mode_matters = self.mode_matters or form.form.mode_matters
        return form.make(args, kwargs)

    def _key(self, path: str, module: nn.Module, call: CallForm) -> Any:
        return (self._keys[path], call.key, module.training)

    def _known(self, path: str, module: nn.Module, call: CallForm) -> _Known | None:
        key = self._key(path, module, call)
        return self.outputs.get(key) or self._settled.get(key)

    def _learn(self, path: str, module: nn.Module, runs: Runs, call: CallForm) -> _Known:
        """The form of what equal calls return; None if each must be run by itself."""
        is_stack = any(isinstance(each, nn.ModuleList) for each in module.modules())
        form = learn(runs, call, is_stack)
        if form is not None and not is_torch_leaf(module):
            if self._depth == 0:
                self._check_guesses()
            with other_mode(module):
                holds = self._runs(path, module, call).confirm(form, call)
                is_true = self._depth > 0 or self._guesses.refuted() is None
                form.mode_matters = not (holds and is_true)
        only_here = form is not None and call.names and not form.from_meta
        known = _Known(form, module)
        (self._settled if only_here else self.outputs)[self._key(path, module, call)] = known
        return known

    def _runs(self, path: str, module: nn.Module, call: CallForm) -> Runs:
        def on_fakes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._run(path, module, args, kwargs)

        def without_data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with on_meta(module):
                return self._run(path, module, args, kwargs)

        return Runs(on_fakes, without_data, call.device or self.device)

    def _check_guesses(self) -> None:
        """Refuse what rests on a guess that data refute."""
        found = self._guesses.refuted()
        if found is not None:
            raise TraceError(found)

    def _run_on_data(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.leaves[path]
        state, self._on_data = ModuleState(module), True
        try:
            with data_of_its_own(module), torch.no_grad():
                return self._called(path, args, kwargs)
        finally:
            self._on_data = False
            self._put_back(path, state)

    def _called(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module itself returns."""
        kind: Any = self._classes.get(path, type(self.leaves[path]))
        return kind.__call__(self.leaves[path], *args, **kwargs)

    def _note(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = self.inputs.setdefault(path, (args, kwargs))
        if first[0] is not args and _plain_values(first) != _plain_values((args, kwargs)):
            self._inconsistent.add(path)

    def _run(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the module itself.

        A module whose shapes depend on the data (experts that pick their tokens) cannot run on
        fake tensors; see :mod:`slapo.graph.trace.guesses`.
        """
        mode = detect_fake_mode()
        guessed = self._guesses.count
        state = ModuleState(module) if self._depth == 0 else None
        self._depth += 1
        try:
            with _real_tensors_allowed(mode), _values_concealed(module, mode):
                if isinstance(module, torch.jit.ScriptModule):
                    given = tensors([args, kwargs])
                    grad = any(trains(module, tensor) for tensor in given)
                    return scripted_output(type(module).__call__, module, args, kwargs, grad)
                result = self._called(path, args, kwargs)
            if any(_is_data_dependent(tensor) for tensor in tensors(result)):
                raise _DataDependentError
            return result
        except TraceError:
            raise
        except Exception as error:
            cannot = _cannot_be_faked(error) or self._guesses.count > guessed
            guess = self._guesses.make(path, module, args, kwargs) if cannot else None
            if guess is None:
                raise
            return guess
        finally:
            self._depth -= 1
            if state is not None:
                self._put_back(path, state)

    def _put_back(self, path: str, state: ModuleState) -> None:
        """What the leaf notes on itself it notes when the graph calls it."""
        for inner, name in state.changes():
            self.changed.add(".".join(filter(None, (path, inner, name))))
        state.restore()

    def _module_key(self, path: str, module: nn.Module) -> Any:
        if isinstance(module, torch.jit.ScriptModule):
            return id(module)  # its attributes lie in C++
        prefix = f"{path}." if path else ""
        return tuple(
            (self._classes.get((prefix + name).rstrip("."), type(each)), state_key(each))
            for name, each in module.named_modules()
        )


class _ScriptStandIn:
    """In place of a TorchScript module."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = call_leaf(self.path, args, kwargs)
        structure = _structure_of(self.path)
        return result if structure is None else put_together(structure, result)


class _ListStandIn(nn.ModuleList):
    """A ``ModuleList`` whose slices are lists: dynamo would build a module for each."""

    _slapo_items: list[nn.Module]

    def __iter__(self) -> Any:
        return iter(self._slapo_items)

    def __len__(self) -> int:
        return len(self._slapo_items)

    def __getitem__(self, index: Any) -> Any:
        return self._slapo_items[index]


@lru_cache(maxsize=1024)
def _stand_in(kind: Any, hooks: tuple[Any, ...], keys: frozenset[str]) -> type[nn.Module]:
    """The subclass of `kind` whose calls stay calls."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = call_leaf(self._slapo_leaf, args, kwargs)
        if not isinstance(result, torch.Tensor):
            structure = _structure_of(self._slapo_leaf)
            result = result if structure is None else put_together(structure, result)
        if COLLECTOR.value:
            for hook in hooks:  # those of Transformers that collect what it returns
                hook(self, args, result)
            for key in keys:
                if key in COLLECTOR.value:
                    refuse_inner(self._slapo_leaf, key)
        return result

    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        """What dynamo calls of graph modules, and their own ``__call__`` does."""
        if torch.compiler.is_dynamo_compiling():
            return __call__(self, *args, **kwargs)
        return kind._call_impl(self, *args, **kwargs)

    members: dict[str, Any] = {
        "__call__": __call__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    if issubclass(kind, fx.GraphModule):
        members["_call_impl"] = _call_impl
    subclass: type[nn.Module] = type(kind)(kind.__name__, (kind,), members)
    return subclass


def _is_repeated(path: str) -> bool:
    """True for an element of a list of layers."""
    return path.rpartition(".")[2].isdigit()


@contextmanager
def _real_tensors_allowed(mode: FakeTensorMode | None) -> Iterator[None]:
    """Parameters of a leaf are real, and meet fake inputs."""
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    env = mode.shape_env
    fresh = contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
    try:
        with fresh:
            yield
    finally:
        mode.allow_non_fake_inputs = before


@contextmanager
def _values_concealed(module: nn.Module, mode: FakeTensorMode | None) -> Iterator[None]:
    """Within the block tensors of one element are fake.

    Others become so when they are first used. Of these, fake tensors would remember the real one,
    and ``self.count.add_(1)`` would change it.
    """

    def concealed(tensor: torch.Tensor) -> torch.Tensor:
        assert mode is not None, "without a mode nothing is asked"
        if tensor.numel() > 1 or mode.is_our_fake(tensor):
            return tensor
        fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
        return fake

    with contextlib.nullcontext() if mode is None else tensors_replaced(module, concealed):
        yield


def _is_data_dependent(tensor: torch.Tensor) -> bool:
    sizes: list[Any] = [size for size in tensor.shape if isinstance(size, torch.SymInt)]
    return any(not size.node.has_hint() for size in sizes)


def _cannot_be_faked(error: Exception) -> bool:
    if isinstance(error, (_DataDependentError, *DATA_DEPENDENT)):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name in _STRICTER_FAKES for frame, _ in frames)


def _plain_values(value: Any) -> Any:
    """What must be equal for two calls to be served by one graph."""
    if isinstance(value, torch.Tensor):
        # Numbers among the sizes are the model's own, and the graph of a child has them built in.
        fixed = tuple(size if isinstance(size, int) else None for size in value.shape)
        return ("tensor", fixed, value.dtype)
    if isinstance(value, SYMBOLIC):
        return "size"
    elements = parts(value)
    if elements is None:
        return repr(value)
    return (type(value), tuple((part.key, _plain_values(part.value)) for part in elements))
