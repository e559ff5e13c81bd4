"""The tracers that run a module. Imported when first used, as what they need takes a second."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from slapo.graph.trace.captured_tree import trace_captured_containers, trace_captured_tree
from slapo.graph.trace.module import compile_graphs
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
    module = _compiled(inputs)
    flatten = flatten or tracer == "dynamo"  # one flat graph is what that name stands for
    return trace_captured_tree(module, inputs.find(), recursive, flatten, leaf_modules)


def run_and_trace_containers(inputs: RecordingInputs, containers: Collection[str]) -> TraceResult:
    """Trace the containers at these paths below the module that `inputs` are for.

    Raises
    ------
    TraceError
        If there is nothing to run it with, or a container does not fit into a graph.
    """
    return trace_captured_containers(_compiled(inputs), inputs.find(), containers)


def _compiled(inputs: RecordingInputs) -> nn.Module:
    """The module to trace; whatever graphs are run for it have their code."""
    compile_graphs(inputs.sch.get_top_schedule().mod)
    return innermost(inputs.sch.mod)


__all__ = ["RecordingInputs", "run_and_trace", "run_and_trace_containers"]
