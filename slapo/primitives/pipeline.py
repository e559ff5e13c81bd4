"""``.cut_pipeline_stage()``."""

from __future__ import annotations

from torch import fx

from slapo.errors import SlapoError
from slapo.graph.trace.module import Traced, trace_of
from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.wrapper import innermost


class CutPipelineStagePrimitive(Primitive, name="cut_pipeline_stage"):
    """End a pipeline stage after this module.

    ``a; mod; b --> stage 0: a, mod; stage 1: b``

    The primitive only records the cut. Building for a runtime with pipelines splits the model.

    Parameters
    ----------
    call
        Index, from 0, of the call that ends the stage, for a module that the model calls several
        times (ALBERT's layer). None ends a stage after every call.

    Raises
    ------
    ValueError
        At the root, where the last stage ends anyway; for an invalid `call`; or if a stage ends
        here already.
    SlapoError
        If the parent is not traced, or its graph does not call the module.

    Examples
    --------
    >>> import slapo
    >>> from torch import nn
    >>> sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    >>> sch.trace(recursive=False)
    True
    >>> sch["1"].cut_pipeline_stage().metadata.primitives["cut_pipeline_stage"]
    {'enabled': True}
    """

    changes_model = False

    @staticmethod
    def is_verifiable() -> bool:
        return False

    @staticmethod
    def apply(sch: Node, /, call: int | None = None) -> Node:
        if sch.parent is None:
            raise ValueError(
                "a stage cannot end after the whole model: the last stage ends there already; cut "
                f"after one of {list(sch.child)[:3]}"
            )
        note = sch.metadata.primitives["cut_pipeline_stage"]
        calls = note.get("calls", ())
        # A cut without an index covers every call; cuts with indices may follow one another.
        if note and (call is None or not calls or call in calls):
            raise ValueError("a stage ends after this module already; leave the second cut out")
        above, name = sch.parent, sch.name
        # Modules between a graph and this one may be inlined, or never called: an nn.ModuleDict.
        while above.parent is not None and not isinstance(innermost(above.mod), fx.GraphModule):
            above, name = above.parent, f"{above.name}.{name}"
        graph = innermost(above.mod)
        if not isinstance(graph, fx.GraphModule) or not _calls(graph, name):
            if above is sch.parent and isinstance(graph, fx.GraphModule):
                raise SlapoError(
                    f"the graph of {above.where} does not call {name!r}; trace it with its "
                    "children as calls (trace_until, or flatten=False)"
                )
            raise SlapoError(
                f"the parent, {sch.parent.where}, is not traced; call "
                f"trace_until({sch.parent.path!r}) on the root first; pass "
                'tracer="huggingface" for a Transformers model, or with example_inputs= '
                "where Python branches on values"
            )
        if call is not None:
            # The parent itself may run several times, so the number of calls has no upper bound
            # here.
            if not isinstance(call, int) or isinstance(call, bool) or call < 0:
                raise ValueError(f"call is {call!r}; pass the index of a call, from 0")
            note["calls"] = (*calls, call)
        note["enabled"] = True
        return sch


def _calls(parent: fx.GraphModule, name: str) -> bool:
    if isinstance(parent, Traced):
        return trace_of(parent).calls(name)
    return bool(parent.graph.find_nodes(op="call_module", target=name))
