"""Leaves: modules that stay calls while dynamo captures the forward above them.

During a capture each leaf has a subclass whose ``__call__`` is one function that dynamo copies into
its graph (``allow_in_graph``). Dynamo never looks inside, ``isinstance`` is unaffected, and hooks
stay the module's own. The leaf runs on fake tensors to give dynamo its result. Equal siblings with
equal arguments share one run, so 96 layers cost as much as one.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.hf import COLLECTOR, collecting_hooks, collects, inner_keys, refuse_inner
from slapo.graph.trace.leaves import attributes_kept, syncs_replaced, tensor_slots
from slapo.graph.trace.nests import (
    SYMBOLIC,
    accesses,
    assemble,
    flatten,
    map_leaves,
    parts,
    tensors,
)
from slapo.graph.trace.torch_private import BY_VALUE, FakeTensorMode, ShapeEnv, detect_fake_mode
from slapo.hooks import MODE_ATTRIBUTE

_ACTIVE: ContextVar[LeafCalls | None] = ContextVar("slapo_leaf_calls", default=None)

#: Attributes that differ between siblings but do not affect shapes.
_ORDINALS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_id", "idx"})
#: Fake kernels that are stricter than the real ones, such as grouped products in float32.
_STRICTER_FAKES = frozenset({"_meta_grouped_mm_common"})

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _active() -> LeafCalls:
    active = _ACTIVE.get()
    assert active is not None, "only a capture calls leaves this way"
    return active


@torch._dynamo.allow_in_graph
def call_leaf(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Represent the call of the module at `path` in dynamo's graph."""
    return _active().flat_result(path, args, kwargs)


@torch._dynamo.assume_constant_result
def _structure_of(path: str) -> Any:
    return _active().structures[path]


@torch._dynamo.allow_in_graph
def call_sync(number: int, tensor: Tensor) -> Any:
    """Represent the collective of a sync in dynamo's graph."""
    return _active().syncs[number](tensor)


class _SyncCall:
    """Substitute for the collective in a sync's hook."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, tensor: Tensor) -> Any:
        return call_sync(self.number, tensor)


class LeafCalls:
    """Leaves of one capture: all modules below its root that are not entered, by path."""

    def __init__(self, root: nn.Module, leaves: dict[str, nn.Module], any_batch: bool) -> None:
        self.root, self.leaves, self._any_batch = root, leaves, any_batch
        #: path -> structure to assemble the last result
        self.structures: dict[str, Any] = {}
        #: path -> steps to each tensor in the result
        self.accesses: dict[str, list[tuple[Any, ...]]] = {}
        #: path -> arguments of the first call, with fake tensors
        self.inputs: dict[str, Call] = {}
        #: path -> structure of the first result, and its fake tensors and sizes
        self.results: dict[str, tuple[Any, list[Any]]] = {}
        #: leaves whose results were assumed to be like their first input
        self.assumed: set[str] = set()
        #: collectives of syncs on entered modules
        self.syncs: list[Any] = []
        #: (path, attribute) of everything that leaves set while they ran
        self.left_behind: list[tuple[str, str]] = []
        self._classes: dict[str, Any] = {}
        self._known: dict[Any, tuple[Any, bool]] = {}
        self._keys: dict[str, Any] = {}
        self._depth = 0

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Redirect calls of the leaves to :func:`call_leaf` within the block."""
        token = _ACTIVE.set(self)
        lists = [m for m in self.root.modules() if type(m) is nn.ModuleList]
        scripts: list[tuple[dict[str, Any], str]] = []
        try:
            for path, module in self.leaves.items():
                if isinstance(module, torch.jit.ScriptModule):  # its class is in C++
                    holder, _, name = path.rpartition(".")
                    scripts.append((vars(self.root.get_submodule(holder)), name))
                    scripts[-1][0][name] = _ScriptCall(path)
                    continue
                self._classes[path] = type(module)
                vars(module)["_slapo_leaf"] = path
                kind: Any = type(module)
                module.__class__ = _stand_in(kind, collecting_hooks(module), inner_keys(module))
            for each in lists:
                each.__class__ = _PlainList
            with syncs_replaced(self.root, self._sync_call):
                yield
        finally:
            _ACTIVE.reset(token)
            for each in lists:
                each.__class__ = nn.ModuleList
            for path, kind in self._classes.items():
                self.leaves[path].__class__ = kind
                vars(self.leaves[path]).pop("_slapo_leaf", None)
            for attributes, name in scripts:
                attributes.pop(name, None)

    def _sync_call(self, collective: Any) -> _SyncCall:
        self.syncs.append(collective)
        return _SyncCall(len(self.syncs) - 1)

    def flat_result(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the tensors and sizes in a leaf's result, all that dynamo's graphs can hold."""
        if self._depth:  # called by another leaf that runs on fake tensors
            result = self._run(path, args, kwargs)
            self.structures[path] = ("leaf", 0)
            return (result,)
        self.inputs.setdefault(path, (args, kwargs))
        result = self._result(path, args, kwargs)
        flat: list[Any] = []
        self.structures[path] = flatten(result, flat)
        self.results.setdefault(path, (self.structures[path], flat))
        found = accesses(result)
        if self.accesses.setdefault(path, found) != found:
            raise TraceError(
                f"{path!r} returns results of different structure in different calls; trace the "
                "modules below it instead"
            )
        return tuple(flat)

    def _result(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():
            # An active function mode, such as a default device, would see each look at a size.
            if path not in self._keys:
                self._keys[path] = signature(self.leaves[path], path, self._classes)
            key = (self._keys[path], _shape_key((args, kwargs)), torch.is_grad_enabled())
        given = tensors([args, kwargs])
        if key not in self._known:
            run = self._run_unpinned if self._any_batch else self._run
            result = run(path, args, kwargs)
            with torch._C.DisableTorchFunction():
                self._known[key] = _without_history(result, given), path in self.assumed
        result, assumed = self._known[key]
        if assumed:
            self.assumed.add(path)
        with torch._C.DisableTorchFunction():
            return map_leaves(
                result, lambda v: given[v] if isinstance(v, _Given) else _copy_of_fake(v)
            )

    def _run_unpinned(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a leaf so that its loops over a size do not fix that size in the graph."""
        mode, given = detect_fake_mode(), tensors([args, kwargs])
        env = None if mode is None else mode.shape_env
        if env is None or not given:
            return self._run(path, args, kwargs)
        try:
            # The shape engine calls this before it records a condition, with the value that it
            # assumes. A plain number means that a size itself is fixed, as by ``range(x.size(1))``.
            with mock.patch.object(env, "_check_frozen", _refuse_pin):
                return self._run(path, args, kwargs)
        except _PinnedError:
            pass
        # Assume a result like the first input, if it is so here; the graph checks each call.
        with env.suppress_guards():
            result = self._run(path, args, kwargs)
            if isinstance(result, Tensor) and _form(result) == _form(given[0]):
                return self._assume(path, args, kwargs)
        return self._run(path, args, kwargs)

    def _run(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the leaf itself on fake tensors."""
        module, mode = self.leaves[path], detect_fake_mode()
        state: Any = attributes_kept(module) if self._depth == 0 else contextlib.nullcontext([])
        self._depth += 1
        try:
            with (
                _real_parameters_allowed(mode),
                _fake_counters(module, mode),
                _plain_booleans(),
                state as changed,
            ):
                kind = self._classes.get(path, type(module))
                result = kind.__call__(module, *args, **kwargs)
            self._note(path, changed)
            # Experts take as many rows as were routed to them; the leaf around them takes all.
            is_outermost = self._depth == 1
            if is_outermost and any(_follows_from_values(tensor) for tensor in tensors(result)):
                return self._assume(path, args, kwargs)
            return result
        except Exception as error:
            if isinstance(error, TraceError):
                raise
            if isinstance(error, RuntimeError) and _has_slices(module):
                # Stubs of modules removed by a rewrite have full tensors here.
                with _whole(module):
                    return self._run(path, args, kwargs)
            if not _cannot_be_faked(error):
                raise
            return self._assume(path, args, kwargs)
        finally:
            self._depth -= 1

    def _note(self, path: str, changed: list[tuple[Any, str]]) -> None:
        for owner, name in changed:
            inner = next((p for p, m in self.leaves[path].named_modules() if m is owner), None)
            if inner is not None:
                self.left_behind.append((f"{path}.{inner}".rstrip("."), name))

    def _assume(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return a tensor like the first input, as for expert routing; the graph checks it."""
        given = tensors([args, kwargs])
        if not given:
            raise TraceError(f"the sizes of the result of {path!r} depend on values")
        self.assumed.add(path)
        result = torch.empty_like(given[0])
        trains = torch.is_grad_enabled() and result.is_floating_point()
        return result.requires_grad_() if trains else result


def returns_alike(
    root: nn.Module, inputs: Mapping[str, Call], results: Mapping[str, tuple[Any, list[Any]]]
) -> bool:
    """Return whether leaves of `root` now return equal results, and set no attributes."""
    calls = LeafCalls(root, {path: root.get_submodule(path) for path in inputs}, any_batch=False)
    with FakeTensorMode(shape_env=ShapeEnv()):
        for path, call in inputs.items():
            args, kwargs = map_leaves(call, _of_numbers)
            try:
                calls.flat_result(path, args, kwargs)
            except Exception:  # a new capture will report the error
                return False
            pair = [
                (s, list(map(_numbers, flat))) for s, flat in (calls.results[path], results[path])
            ]
            if calls.left_behind or pair[0] != pair[1]:
                return False
    return True


def _of_numbers(value: Any) -> Any:
    """Replace the symbols of a fake tensor or symbolic value by integers."""
    if not isinstance(value, Tensor):
        return number_of(value)
    sizes, strides = ([*map(number_of, each)] for each in (value.shape, value.stride()))
    new = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return new.requires_grad_().clone() if value.requires_grad else new


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.device, *map(number_of, value.shape)
    return number_of(value)


def number_of(value: Any) -> Any:
    """Return the example value of a symbol; other values are unchanged."""
    return value.node.hint if isinstance(value, SYMBOLIC) else value


@lru_cache(maxsize=1024)
def _stand_in(kind: Any, hooks: tuple[Any, ...], keys: frozenset[str]) -> type[nn.Module]:
    """Return the subclass of `kind` whose calls stay calls."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        flat = call_leaf(self._slapo_leaf, args, kwargs)
        result = assemble(_structure_of(self._slapo_leaf), flat)
        if COLLECTOR.value and torch.compiler.is_dynamo_compiling():  # not within another leaf
            for hook in hooks:  # Transformers' hooks that collect results
                hook(self, args, result)
            for key in keys:
                if key in COLLECTOR.value:
                    refuse_inner(self._slapo_leaf, key)
        return result

    members = {"__call__": __call__, "__module__": kind.__module__}
    if issubclass(kind, fx.GraphModule):  # dynamo calls this method of graph modules

        def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return __call__(self, *args, **kwargs)
            return kind._call_impl(self, *args, **kwargs)

        members["_call_impl"] = _call_impl
    made: type[nn.Module] = type(kind)(kind.__name__, (kind,), members)
    return made


class _ScriptCall:
    """Replaces a TorchScript module."""

    def __init__(self, path: str) -> None:
        self._slapo_leaf = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat = call_leaf(self._slapo_leaf, args, kwargs)
        return assemble(_structure_of(self._slapo_leaf), flat)


class _PlainList(nn.ModuleList):
    """ModuleList whose slices are lists: dynamo would build a module for each slice."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self._modules.values())[index]
        return super().__getitem__(index)


# --- runs on fake tensors ------------------------------------------------------------------------
@contextmanager
def _real_parameters_allowed(mode: FakeTensorMode | None) -> Iterator[None]:
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    env = mode.shape_env
    try:
        with contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols():
            yield
    finally:
        mode.allow_non_fake_inputs = before


@contextmanager
def _plain_booleans() -> Iterator[None]:
    """Decide whether attention is causal, as the kernel takes no symbolic boolean."""
    attention: Any = nn.functional.scaled_dot_product_attention

    def decided(*args: Any, **kwargs: Any) -> Any:
        if "is_causal" in kwargs:
            kwargs["is_causal"] = bool(kwargs["is_causal"])
        return attention(*args, **kwargs)

    with mock.patch.object(nn.functional, "scaled_dot_product_attention", decided):
        yield


def _is_slice(tensor: Tensor) -> bool:
    return getattr(tensor, "orig_shape", tensor.shape) != tensor.shape


def _has_slices(module: nn.Module) -> bool:
    return any(_is_slice(tensor) for _, _, tensor in tensor_slots(module))


@contextmanager
def _whole(module: nn.Module) -> Iterator[None]:
    """Replace sharded tensors by fake tensors of their full shapes."""
    slots = [slot for slot in tensor_slots(module) if _is_slice(slot[2])]
    try:
        for table, name, tensor in slots:
            shape: Any = getattr(tensor, "orig_shape", None)
            whole: Any = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            is_parameter = isinstance(tensor, nn.Parameter)
            table[name] = nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole
        yield
    finally:
        for table, name, tensor in slots:
            table[name] = tensor


@contextmanager
def _fake_counters(module: nn.Module, mode: FakeTensorMode | None) -> Iterator[None]:
    """Make one-element buffers fake, as a fake made from them would write to the real ones."""
    replaced = []
    for table, name, buffer in tensor_slots(module) if mode is not None else ():
        one = buffer.numel() == 1 and not isinstance(buffer, nn.Parameter)
        if mode is not None and one and not mode.is_our_fake(buffer):
            replaced.append((table, name, buffer))
            table[name] = mode.from_tensor(buffer, static_shapes=True)
    try:
        yield
    finally:
        for table, name, buffer in replaced:
            table[name] = buffer


class _PinnedError(Exception):
    pass


def _refuse_pin(_condition: Any, value: Any) -> None:
    if value.is_number:  # the size itself is used, not only a condition on it
        raise _PinnedError


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, *map(int, tensor.shape))


def _follows_from_values(tensor: Tensor) -> bool:
    return any(isinstance(s, torch.SymInt) and not s.node.has_hint() for s in tensor.shape)


def _cannot_be_faked(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, BY_VALUE) or any(
        frame.f_code.co_name in _STRICTER_FAKES for frame, _ in frames
    )


class _Given(int):
    """Index of one of the tensors that a leaf was called with."""


def _without_history(result: Any, given: list[Tensor]) -> Any:
    """Return a leaf's result without autograd history, which would keep parameters alive."""
    places = {id(tensor): _Given(index) for index, tensor in enumerate(given)}
    return map_leaves(result, lambda v: places[id(v)] if id(v) in places else _copy_of_fake(v))


def _copy_of_fake(value: Any) -> Any:
    """Return a fake tensor like one that the leaf or a sibling has returned."""
    if not isinstance(value, Tensor):
        return value
    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if value.requires_grad:
        # The clone has a history, as a module's result: Python may write to it in place.
        new = new.requires_grad_() if value.is_leaf else new.requires_grad_().clone()
    return new


# --- keys ----------------------------------------------------------------------------------------
def signature(module: nn.Module, path: str = "", classes: Mapping[str, type] | None = None) -> Any:
    """Return a key of equal siblings, from their classes, shapes, attributes and hooks.

    `classes` has the original classes of modules that have another one during a capture.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return id(module)
    found: list[Any] = []
    for name, each in module.named_modules():
        full = f"{path}.{name}".strip(".")
        if isinstance(each, torch.jit.ScriptModule):
            found.append(id(each))
            continue
        held = (*each._parameters.items(), *each._buffers.items())
        shapes = tuple(
            (k, None if t is None else (tuple(t.shape), t.dtype, t.device, t.requires_grad))
            for k, t in held
        )
        plain = tuple(
            (k, _by_value(v))
            for k, v in vars(each).items()
            if k[:1] != "_" and not (type(v) is int and k in _ORDINALS)
        )
        hooks = [h for h in each._forward_hooks.values() if not collects(h)]
        hooks += each._forward_pre_hooks.values()
        kind = type(each) if classes is None else classes.get(full, type(each))
        # Syncs of siblings compare equal; hooks of users are compared by identity.
        acts = tuple(h.op if hasattr(h, MODE_ATTRIBUTE) else id(h) for h in hooks)
        found.append((name, kind, shapes, plain, acts))
    return tuple(found)


def _shape_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Sizes by their symbols: with equal expressions, a sibling's result has the same symbols
        # too.
        shape = tuple(map(_size, (*value.shape, *value.stride())))
        return (shape, value.dtype, value.device, value.requires_grad)
    elements = parts(value)
    if elements is None:
        return _size(value) if isinstance(value, (int, *SYMBOLIC)) else repr(value)
    return (type(value), tuple((part.key, _shape_key(part.value)) for part in elements))


def _size(size: Any) -> Any:
    return str(size.node.expr) if isinstance(size, SYMBOLIC) else size


def _by_value(value: Any) -> Any:
    """Return a container's content: sets such as ``pruned_heads`` differ between layers by id."""
    if isinstance(value, dict):
        return (dict, tuple((k, _by_value(v)) for k, v in value.items()))
    if isinstance(value, (tuple, list, set, frozenset)):
        return (type(value), tuple(map(_by_value, value)))
    plain = (str, int, float, bool, type(None), torch.dtype, torch.device)
    return (type(value), value) if isinstance(value, plain) else id(value)
