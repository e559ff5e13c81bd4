"""Trace by recording a run on fake tensors: a module, the modules it calls, or containers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import replace

from torch import fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.leaves import IsLeaf, check_modes, default_is_leaf, depends_on_mode
from slapo.graph.trace.modes import merge_modes
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.optional_inputs import allow_none
from slapo.graph.trace.recorder import Recording, mode_is_a_flag, record
from slapo.graph.trace.run import Inputs
from slapo.graph.trace.symbolic import other_mode
from slapo.graph.trace.tree import TraceResult, calls_by_target, drop_demanding, may_enter
from slapo.wrapper import innermost


def trace_recorded_tree(
    module: nn.Module,
    inputs: Inputs,
    recursive: bool,
    flatten: bool,
    leaf_modules: Collection[str],
) -> TraceResult:
    """Record the module, and with `recursive` the modules it calls, on the inputs it gave them.

    Raises
    ------
    TraceError
        If the module itself cannot be recorded. Children that cannot stay opaque.
    """
    result = TraceResult()
    is_leaf = default_is_leaf(flatten, leaf_modules)
    recording = _record_into(result, "", module, inputs, is_leaf)
    if recursive and not flatten:
        _descend(module, "", recording, result.traced[""], is_leaf, leaf_modules, result)
    return result


def _descend(
    module: nn.Module,
    path: str,
    recording: Recording,
    above: TracedModule,
    is_leaf: IsLeaf,
    leaf_modules: Collection[str],
    result: TraceResult,
) -> None:
    calls = calls_by_target(above.graph)
    for target, inputs in recording.child_inputs.items():
        child = innermost(module.get_submodule(target))
        full = _join(path, target)
        if not may_enter(child, full, leaf_modules):
            continue
        try:
            below = _record_into(result, full, child, inputs, is_leaf, recording)
        except TraceError as error:
            result.skipped[full] = str(error)
            continue
        traced = result.traced[full]
        drop_demanding(result, full, child, calls.get(target, []), above)
        _descend(child, full, below, traced, is_leaf, leaf_modules, result)


def trace_recorded_containers(
    root: nn.Module, inputs: Inputs, containers: Collection[str]
) -> TraceResult:
    """Record the root and the containers below it, each with its children as calls.

    A container that is a mere name space, whose caller calls what is in it (OPT calls
    ``model.decoder``), is passed over.

    Raises
    ------
    TraceError
        If one of them cannot be recorded, or is not called by the one above it.
    """
    result = TraceResult()
    recordings: dict[str, Recording] = {}
    for path in containers:
        module = innermost(root.get_submodule(path))
        parent = _nearest(path, recordings)
        known = None if parent is None else recordings[parent]
        if known is not None:
            called = {_join(parent or "", k): given for k, given in known.child_inputs.items()}
            inside = any(c in called and c.startswith(f"{path}.") for c in containers)
            if path not in called and inside:
                continue
            if path not in called:
                raise TraceError(
                    f"{path!r} cannot be a graph: {parent or 'the root'!r} does not call it, or "
                    "calls it several times with different constants"
                )
            inputs = called[path]
        # A container's optional inputs shape what its children get (masks), so None stays refused.
        recordings[path] = _record_into(
            result, path, module, inputs, default_is_leaf(False), known, try_none=False
        )
    return result


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _nearest(path: str, recordings: dict[str, Recording]) -> str | None:
    while path:
        path = path.rpartition(".")[0]
        if path in recordings:
            return path
    return None


def _record_into(
    result: TraceResult,
    path: str,
    module: nn.Module,
    inputs: Inputs,
    is_leaf: IsLeaf,
    above: Recording | None = None,
    try_none: bool = True,
) -> Recording:
    """Record `module` in both modes and note its traced form under `path`.

    `try_none`: find out which optional tensors the graph may be called without, by a recording
    for each.
    """
    fake_mode = above.fake_mode if above is not None else None
    signature = inspect.signature(module.forward)
    args, kwargs = inputs

    def again(without: str | None = None) -> Recording:
        if without is None:
            return record(module, args, kwargs, is_leaf=is_leaf, fake_mode=fake_mode)
        bound = signature.bind(*args, **kwargs)
        bound.arguments[without] = None
        return record(module, bound.args, bound.kwargs, is_leaf=is_leaf, fake_mode=fake_mode)

    recording = again()
    check_modes(module, recording.entered)
    optional = [
        name
        for name, parameter in signature.parameters.items()
        if try_none and parameter.default is None and name in recording.contract.never_none
    ]
    contract = allow_none(
        recording.contract, recording.graph, optional, lambda name: again(name).graph
    )
    training = None
    if recording.asks_mode or not mode_is_a_flag(module):
        training = _merge_other_mode(module, recording.graph, again)
    mode_matters = depends_on_mode(recording.graph, training)
    inlined = tuple(sorted(recording.entered)) if mode_matters else ()
    contract = replace(contract, training=training, inlined=inlined)
    result.traced[path] = TracedModule.from_graph(
        module, recording.graph, contract, recording.constants
    )
    return recording


def _merge_other_mode(
    module: nn.Module, graph: fx.Graph, again: Callable[[], Recording]
) -> bool | None:
    """Make `graph` hold in both modes; returns the only mode it holds for, else None."""
    with other_mode(module):
        try:
            other = again()
        except TraceError:
            other = None
    same = other is not None and merge_modes(graph, other.graph, module.training)
    return None if same else module.training
