"""Trace by capture: a module, and the modules it calls."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from torch import fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.capture import Capture, capture
from slapo.graph.trace.leaves import IsLeaf, default_is_leaf
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.run import Inputs
from slapo.graph.trace.tree import TraceResult, descend
from slapo.graph.trace.versions import Version, all_versions, maybe_none


def trace_captured_tree(
    module: nn.Module,
    inputs: Inputs,
    recursive: bool,
    flatten: bool,
    leaf_modules: Collection[str],
) -> TraceResult:
    """Capture the module, and with `recursive` the modules it calls, on the inputs it gave them.

    Raises
    ------
    TraceError
        If the module itself cannot be captured. Children that cannot stay opaque.
    """
    tracer = _Captures(default_is_leaf(flatten, leaf_modules))
    result = TraceResult({"": tracer.trace(module, "", inputs)})
    if recursive and not flatten:
        descend(result, module, "", result.traced[""], leaf_modules, tracer.trace_child)
    return result


class _Captures:
    """Captures of modules of one tree: inputs of children come from the capture above."""

    def __init__(self, is_leaf: IsLeaf) -> None:
        self.is_leaf = is_leaf
        self.inputs: dict[str, Inputs] = {}
        self._outputs: dict[Any, Any] = {}

    def trace_child(self, child: nn.Module, path: str, calls: list[fx.Node]) -> TracedModule:
        """See :data:`slapo.graph.trace.tree.TraceChild`."""
        if path not in self.inputs:
            raise TraceError("it is called several times with different constants")
        return self.trace(child, path, self.inputs[path])

    def trace(self, module: nn.Module, path: str, inputs: Inputs) -> TracedModule:
        """Capture `module` for all kinds of calls."""
        signature = inspect.signature(module.forward)
        args, kwargs = inputs

        def once(without: frozenset[str]) -> Version:
            bound = signature.bind(*args, **kwargs)
            bound.arguments.update(dict.fromkeys(without))
            given = (args, kwargs) if not without else (bound.args, bound.kwargs)
            captured = capture(module, *given, is_leaf=self.is_leaf, outputs=self._outputs)
            self._note(path, captured)
            return Version(
                captured.graph,
                captured.contract,
                captured.constants,
                captured.entered,
                captured.reads_mode,
            )

        try:
            given = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError:
            given = {}
        return all_versions(module, once, maybe_none(module, given))

    def _note(self, path: str, captured: Capture) -> None:
        for target, given in captured.child_inputs.items():
            self.inputs.setdefault(f"{path}.{target}" if path else target, given)
