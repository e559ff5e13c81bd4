"""Process state during a capture, restored afterwards."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import isfunction
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from slapo.graph.trace.hf import as_captured
from slapo.graph.trace.leaves import generators_kept, tensor_slots
from slapo.graph.trace.torch_private import (
    DeviceContext,
    ShapeEnv,
    builder,
    dynamo_config,
    dynamo_utils,
    fake_tls,
    modes_off,
    output_graph,
    overrides,
    shape_config,
    side_effects,
    trace_rules,
)

_CALL = nn.Module._wrapped_call_impl

#: A change of an existing object by the forward: its source, and the attributes.
Effect = tuple[str, tuple[str, ...]]
#: Source of the effect of a draw from Python's generator.
RANDOM = "random"


@contextmanager
def surroundings(root: nn.Module, any_batch: bool) -> Iterator[list[Effect]]:
    """Configure dynamo in this thread for a capture of `root` within the block.

    With `any_batch` sizes 0 and 1 stay symbolic, so that a graph is valid for a batch of one too.
    Yields the changes that the forward makes to objects, filled in during the capture.
    """
    settings: dict[str, Any] = {
        # Only the graph runs later, so effects cannot be replayed; `refuse_effects` refuses them.
        "replay_side_effects": False,
        "side_effect_replay_policy": "silent",
        # Which sizes are dynamic follows from the example alone, not from captures of the same code
        # before.
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "specialize_int": True,
        "verbose": False,
        "suppress_errors": False,
        "ignore_logging_functions": _logging_functions(),
        "allow_rnn": True,
        "skip_nnmodule_hook_guards": False,  # hooks of entered modules are part of the graph
        # With symbolic sizes, making a cache entry takes as long as running the operation.
        "fake_tensor_cache_enabled": False,
    }
    effects: list[Effect] = []
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's warnings about itself
        enter(generators_kept())
        enter(modes_off())
        enter(_function_modes_off())
        enter(_plain_calls())
        # dynamo frees few objects, and garbage collection took a third of the time
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        # The cache would pass real tensors to a run on fake ones.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        enter(one_device(root))
        enter(as_captured(root))
        enter(dynamo_config.patch(**settings))
        enter(shape_config.patch(backed_size_oblivious=any_batch))  # type: ignore[attr-defined]
        enter(mock.patch.object(output_graph, "ShapeEnv", _shape_env(any_batch)))
        enter(_effects_noted(effects))
        # Dynamo marks the addresses of parameters as static, for CUDA graphs.
        addresses = ("og_module_named_parameters_fn_ptr", "og_module_named_buffers_fn_ptr")
        for home, name in itertools.product((builder, output_graph), addresses):
            enter(mock.patch.object(home, name, None, create=True))
        # The kernel that a convolution would choose for some sizes is not a condition on them.
        for name in ("_select_conv_backend", "_conv_determine_backend_memory_format"):
            ask = partial(_unconditionally, getattr(torch._C, name))
            enter(mock.patch.object(torch._C, name, ask))
        enter(_functions_kept())
        enter(quiet_fake_kernels())
        # Dynamo would log a copy of its settings, which may start CUDA.
        metrics = dynamo_utils.get_metrics_context()
        enter(mock.patch.object(metrics, "_on_exit", _nothing))
        enter(metrics)
        yield effects


def _shape_env(any_batch: bool) -> Callable[..., ShapeEnv]:
    def make(**kwargs: Any) -> ShapeEnv:
        # By default, equal sizes in the example share a symbol, and the graph would be valid for
        # equal ones only.
        kwargs |= {"duck_shape": False, "specialize_zero_one": not any_batch}
        return ShapeEnv(**kwargs)

    return make


def _nothing(*_: Any) -> None:
    return None


def _logging_functions() -> set[Any]:
    found: set[Any] = {getattr(logging.Logger, n) for n in ("debug", "info", "warning", "error")}
    home = sys.modules.get("transformers.utils.logging")
    names = ("warning_once", "info_once", "warning_advice")
    return found | {getattr(home, name) for name in names if hasattr(home, name)}


@contextmanager
def _function_modes_off() -> Iterator[None]:
    """Disable function modes except devices: they apply to the graph's runs, not its capture."""
    popped = []
    while overrides._len_torch_function_stack():
        popped.append(overrides._pop_mode())
    devices = [mode for mode in popped if isinstance(mode, DeviceContext)]
    try:
        for mode in reversed(devices):
            overrides._push_mode(mode)
        yield
    finally:
        for _ in devices:
            overrides._pop_mode()
        for mode in reversed(popped):
            overrides._push_mode(mode)


@contextmanager
def _plain_calls() -> Iterator[None]:
    """Remove functions that tracers and checks put in front of all module calls."""
    if nn.Module.__call__ is _CALL:  # assigning it makes Python visit every module class
        yield
        return
    with mock.patch.object(nn.Module, "__call__", _CALL):
        yield


@contextmanager
def _effects_noted(effects: list[Effect]) -> Iterator[None]:
    # Here dynamo writes the bytecode that would replay the mutations, so all of them are known.
    suffix = output_graph.OutputGraph.codegen_suffix

    def codegen_suffix(graph: Any, *args: Any, **kwargs: Any) -> None:
        found = graph.side_effects
        if graph.random_calls:
            effects.append((RANDOM, ()))
        for variable in found._get_modified_vars():
            exists = type(variable.mutation_type).__name__.endswith("Existing")
            if exists and variable.source is not None:
                names = tuple(map(str, found.store_attr_mutations.get(variable, ())))
                effects.append((variable.source.name, names))
        suffix(graph, *args, **kwargs)

    with mock.patch.object(output_graph.OutputGraph, "codegen_suffix", codegen_suffix):
        yield


def _unconditionally(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tensor: Any = next(iter((*args, *kwargs.values())))
    with tensor.fake_mode.shape_env.suppress_guards():
        return ask(*args, **kwargs)


@contextmanager
def _functions_kept() -> Iterator[None]:
    """Keep every ``autograd.Function``, and functions with side effects for fx, as one node."""
    # Otherwise dynamo traces into ``forward`` and ``backward`` and makes a higher-order operator,
    # which a graph here cannot hold.
    known = trace_rules._allowed_callable_ids
    impure = [f for f in side_effects if isfunction(f) and not f.__module__.startswith("torch.")]
    kept = [*set(_subclasses(torch.autograd.Function)), *impure]
    added = [each for each in kept if id(each) not in known]
    for cls in added:
        known.add(id(cls))
    try:
        yield
    finally:
        for cls in added:
            known.remove(id(cls))


def _subclasses(cls: Any) -> Iterator[Any]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


@contextmanager
def quiet_fake_kernels() -> Iterator[None]:
    """Silence logged errors of fake kernels within the block, as torch raises them too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def keep(entry: logging.LogRecord) -> bool:
        return "run meta" not in str(entry.msg)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@contextmanager
def one_device(root: nn.Module) -> Iterator[None]:
    """Move the full model to meta within the block if part of it is there.

    Models made by ``init_empty_weights`` have real CPU buffers, which no operation could combine
    with meta parameters.
    """
    if not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        yield
        return
    made: dict[int, Tensor] = {}
    replaced = [slot for slot in tensor_slots(root) if not slot[2].is_meta]
    # torch.tensor(..., device="meta") is not a fake tensor, even in fake mode.
    name = "allow_non_fake_inputs_override"
    try:
        for table, key, tensor in replaced:
            if id(tensor) not in made:
                made[id(tensor)] = _on_meta(tensor)
            table[key] = made[id(tensor)]
        with mock.patch.object(fake_tls, name, True, create=True):
            yield
    finally:
        for table, key, tensor in replaced:
            table[key] = tensor


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
