"""From a schedule with cuts to a model of stages."""

from __future__ import annotations

from typing import TypeVar

from torch import fx

from slapo.errors import SlapoError
from slapo.graph.trace.module import TracedModule
from slapo.hooks import has_backward_hooks, has_forward_hooks
from slapo.node import Node
from slapo.pipeline.inline import JoinedGraph, join_containers
from slapo.pipeline.pipelined import PipelinedModule
from slapo.pipeline.split import split_graph
from slapo.pipeline.stage import Stage, make_stage
from slapo.weights.meta import allow_calls
from slapo.wrapper import innermost

_CUT = "cut_pipeline_stage"
N = TypeVar("N", bound=Node)


def cut_nodes(sch: Node) -> list[Node]:
    """The nodes after which a stage ends, in the order of the tree."""
    return [node for _, node in sch.named_schedules() if node.metadata.primitives.get(_CUT)]


def generate_pipeline_partition(sch: N) -> N:
    """Split the model at its cuts: the root becomes ``submod_0``, ``submod_1``, ...

    ``a; b; c`` with a cut after ``b`` ``-->`` ``submod_0(a; b); submod_1(c)``

    Containers above the cuts are joined to one graph, which is cut in the order of execution. Each
    stage gets the tensors that it or a later stage uses, once; sizes and other plain values are
    computed again where they are used. Parameters keep their names within a stage, and the state
    dict of the whole is that of the original.

    Parameters
    ----------
    sch
        The root schedule, traced down to the cuts by ``trace_until``. It is changed in place.

    Returns
    -------
    The same schedule.

    Raises
    ------
    ValueError
        If `sch` is not the root.
    SlapoError
        If nothing is cut, a container above a cut is not traced or carries hooks, or the graph
        cannot be split there.

    Examples
    --------
    >>> import torch, slapo
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> sch = slapo.create_schedule(model)
    >>> sch.trace_until("")
    True
    >>> _ = sch["1"].cut_pipeline_stage()
    >>> sorted(generate_pipeline_partition(sch).child)
    ['submod_0', 'submod_1']
    >>> [name for name, _ in sch["submod_1"].mod.named_parameters()]
    ['2.weight', '2.bias']
    >>> x = torch.ones(3, 2)
    >>> torch.equal(sch.mod(x), model(x))
    True
    """
    if sch.parent is not None:
        raise ValueError(f"a partition starts at the root schedule, not at {sch.path!r}")
    cuts = cut_nodes(sch)
    if not cuts:
        raise SlapoError("no stage is cut; call cut_pipeline_stage() on the modules that end one")
    allow_calls(sch.mod)
    root, containers = _containers_above(sch, cuts)
    joined = join_containers(root, containers)
    ends = [end for node in cuts for end in _ends_of(node, joined)]
    order = {node: place for place, node in enumerate(joined.graph.nodes)}
    ends.sort(key=order.__getitem__)
    stages = _make_stages(root, joined, ends)
    sch.set_module(PipelinedModule(root, stages))
    return sch


def _make_stages(root: TracedModule, joined: JoinedGraph, ends: list[fx.Node]) -> list[Stage]:
    parts = split_graph(joined.graph, ends, root.get_submodule)
    return [make_stage(index, part, root, joined) for index, part in enumerate(parts)]


def _containers_above(sch: Node, cuts: list[Node]) -> tuple[TracedModule, list[str]]:
    found: dict[str, Node] = {}
    for cut in cuts:
        below: Node = cut
        for node in cut.ancestors():
            if not _is_passed_over(node, below):
                found[node.model_path] = below = node
    for node in found.values():
        _check_container(node)
    root = sch.mod
    assert isinstance(root, TracedModule), "just checked"
    return root, list(found)


def _is_passed_over(node: Node, below: Node) -> bool:
    """Whether `node` is a mere namespace: what is above calls `below` directly, as OPT does."""
    if isinstance(innermost(node.mod), TracedModule):
        return False
    for above in node.ancestors():
        module = innermost(above.mod)
        if isinstance(module, TracedModule):
            target = below.model_path[len(above.model_path) :].lstrip(".")
            return bool(list(module.graph.find_nodes(op="call_module", target=target)))
    return False


def _check_container(node: Node) -> None:
    if not isinstance(innermost(node.mod), TracedModule):
        raise SlapoError(
            f"a stage ends below {node.where}, which is not traced; call trace_until on the root, "
            "down to the parents of all cuts"
        )
    if not isinstance(node.mod, TracedModule):
        raise SlapoError(
            f"{node.where} is checkpointed or runs under fork_rng as a whole, and a stage ends "
            "within it; apply these to the modules below it"
        )
    if has_forward_hooks(node.mod) or has_backward_hooks(node.mod):
        raise SlapoError(
            f"{node.where} carries hooks or syncs, and a stage ends within it, so it will not be "
            "called as a whole; move them to modules that stay in one stage"
        )


def _ends_of(cut: Node, joined: JoinedGraph) -> list[fx.Node]:
    """Where stages end: after the calls of a module that the cut names, else after every one."""
    calls = joined.ends_of(cut.model_path)
    if not calls:
        raise SlapoError(
            f"a stage ends after {cut.path!r}, which the traced model does not call; trace it "
            "again and cut after a module that it calls"
        )
    chosen = cut.metadata.primitives[_CUT].get("calls")
    if chosen is not None:
        wrong = [number for number in chosen if number >= len(calls)]
        if wrong:
            raise SlapoError(
                f"a stage ends after call {wrong[0]} of {cut.path!r}, which the model calls "
                f"{len(calls)} times; number them from 0 to {len(calls) - 1}"
            )
        return [calls[number] for number in sorted(chosen)]
    return calls
