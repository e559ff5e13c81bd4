"""The tracers that run a module. Imported when first used, as what they need takes a second."""

from __future__ import annotations

from collections.abc import Collection

from slapo.graph.trace.captured_tree import trace_captured_containers, trace_captured_tree
from slapo.graph.trace.tree import TraceResult
from slapo.primitives.example_inputs import RecordingInputs
from slapo.wrapper import innermost


def run_and_trace(
    inputs: RecordingInputs,
    tracer: str,
    recursive: bool,
    flatten: bool,
    leaf_modules: Collection[str],
) -> TraceResult:
    """Trace the module that `inputs` are for, by ``"huggingface"`` or ``"dynamo"``.

    Raises
    ------
    TraceError
        If there is nothing to run it with, or the run does not fit into graphs.
    """
    module = innermost(inputs.sch.mod)
    flatten = flatten or tracer == "dynamo"  # one flat graph is what that name stands for
    return trace_captured_tree(module, inputs.find(), recursive, flatten, leaf_modules)


def run_and_trace_containers(inputs: RecordingInputs, containers: Collection[str]) -> TraceResult:
    """Trace the containers at these paths below the module that `inputs` are for.

    Raises
    ------
    TraceError
        If there is nothing to run it with, or a container does not fit into a graph.
    """
    return trace_captured_containers(innermost(inputs.sch.mod), inputs.find(), containers)


__all__ = ["RecordingInputs", "run_and_trace", "run_and_trace_containers"]
