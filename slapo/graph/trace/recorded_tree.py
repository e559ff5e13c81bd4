"""Trace the containers of a model by recording a run on fake tensors."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from slapo.errors import TraceError
from slapo.graph.trace.leaves import IsLeaf, default_is_leaf
from slapo.graph.trace.recorder import Recording, record
from slapo.graph.trace.run import Inputs
from slapo.graph.trace.tree import TraceResult
from slapo.graph.trace.versions import Version, all_versions
from slapo.wrapper import innermost


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
        recordings[path] = _record_into(result, path, module, inputs, default_is_leaf(False), known)
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
) -> Recording:
    """Record `module` in both modes and note its traced form under `path`."""
    fake_mode = above.fake_mode if above is not None else None
    recordings: list[Recording] = []

    def once(without: frozenset[str]) -> Version:
        found = record(module, *inputs, is_leaf=is_leaf, fake_mode=fake_mode)
        recordings.append(found)
        return Version(found.graph, found.contract, found.constants, found.entered, found.asks_mode)

    # A container's optional inputs shape what its children get (masks), so None stays refused.
    result.traced[path] = all_versions(module, once, [])
    return recordings[0]
