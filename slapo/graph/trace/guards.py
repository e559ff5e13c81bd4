"""The checks under which a capture serves another call of its key.

They are torch's own: the shape engine's conditions on the sizes of arguments, and dynamo's guards
on the module and on Python's globals.
"""

from __future__ import annotations

from collections.abc import Collection
from types import FunctionType
from typing import Any

from slapo.graph.trace.torch_private import CaptureOutput, CheckFunctionManager


def size_conditions(output: CaptureOutput) -> list[str]:
    """The shape engine's conditions on sizes of arguments, as Python such as ``args[0].size()[1]``.

    Static dimensions are asked too: without them, the guard of a loop over a size is dropped.
    Offsets into a storage are not: micro-batches are slices of a batch.
    """
    graph = output.graph_capture_output.output_graph
    fakes = [f for f in graph.shape_env.tracked_fakes or () if "_slapo" not in f.source.name]
    (found,) = graph.shape_env.produce_guards_verbose(
        [f.fake for f in fakes],
        [f.source for f in fakes],
        input_contexts=[f.symbolic_context for f in fakes],
        ignore_static=False,
        langs=("python",),
    )
    asked = (e for e in dict.fromkeys(found.exprs) if "L['module']" not in e and "L[" in e)
    conditions = (e.replace("L['args']", "args").replace("L['kwargs']", "kwargs") for e in asked)
    return [condition for condition in conditions if "storage_offset" not in condition]


def state_guards(output: CaptureOutput, forward: FunctionType, leaves: Collection[str]) -> Any:
    """Dynamo's guards on the module and on Python's globals; ``.check(frame)`` asks them in C++.

    Arguments have their key. Parameters may be moved and sharded, and the modules that stay calls
    may be replaced, so nothing is asked of these.
    """
    graph = output.graph_capture_output.output_graph
    opaque = {"L['module']" + "".join(f"._modules[{n!r}]" for n in p.split(".")) for p in leaves}
    graph.guards.inner = type(graph.guards.inner)(g for g in graph.guards.inner if _kept(g, opaque))
    graph.skip_guards_check = True
    return CheckFunctionManager(forward.__code__, graph).guard_manager


def _kept(guard: Any, opaque: Collection[str]) -> bool:
    name = guard.name
    if not name.startswith(("L['module']", "G[")) or name == "L['module']":
        return False
    if "_slapo" in name or "_dot_output_capturing" in name or name in opaque:
        return False
    return guard.create_fn_name() not in ("TENSOR_MATCH", "WEAKREF_ALIVE")
