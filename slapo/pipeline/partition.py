"""Conversion of a schedule with cuts to a model of stages."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import starmap
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from slapo.errors import SlapoError, TraceError
from slapo.graph.trace.module import Traced, trace_of
from slapo.graph.trace.nests import OWNER, map_leaves, size_check, tensors
from slapo.graph.trace.nodes import like_input
from slapo.graph.trace.tree import Joined, join, serves_mode
from slapo.graph.trace.views import View
from slapo.hooks import has_backward_hooks, has_forward_hooks
from slapo.logger import get_logger
from slapo.node import Node
from slapo.pipeline.pipelined import PipelinedModule
from slapo.pipeline.split import StageGraph, split_graph
from slapo.pipeline.stage import Kind, axis_of_one, make_stage
from slapo.weights.meta import allow_calls
from slapo.wrapper import in_mode, innermost

logger = get_logger()

_CUT = "cut_pipeline_stage"
N = TypeVar("N", bound=Node)


def cut_nodes(sch: Node) -> list[Node]:
    """Return the nodes after which a stage ends, in the order of the tree."""
    return [node for _, node in sch.named_schedules() if node.metadata.primitives.get(_CUT)]


def generate_pipeline_partition(sch: N) -> N:
    """Split the model at its cuts: the root becomes ``submod_0``, ``submod_1``, ...

    ``a; b; c`` with a cut after ``b`` ``-->`` ``submod_0(a; b); submod_1(c)``

    Containers above the cuts are joined to one graph, which is split in execution order. Each stage
    receives once every tensor that it or a later stage uses. Sizes and other plain values are
    recomputed where they are used. Parameters keep their names within a stage, and the state dict
    of the full model is that of the original.

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
        If nothing is cut, a container above a cut is not traced or has hooks, or the graph cannot
        be split there.

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
    joined = _join_each(root, containers)
    parts = {kind: _split(root, each, cuts) for kind, each in joined.items()}
    _check_alike(parts)
    for kind in [kind for kind in parts if not _shows_everywhere(kind, parts)]:
        del parts[kind], joined[kind]
    count = len(next(iter(parts.values())))
    # A capture has the device of its example inputs as a constant, which stages replace.
    given = [t.device for t in tensors(trace_of(root).inputs)]
    device = given[0] if given else None
    stages = [
        make_stage(k, {kind: parts[kind][k] for kind in parts}, root, device) for k in range(count)
    ]
    sch.set_module(PipelinedModule(root, stages, joined))
    return sch


def _join_each(root: Traced, containers: list[str]) -> dict[Kind, Joined]:
    """Joined graphs by kind, the present mode first; a batch of one sample may have its own."""
    trace = trace_of(root)

    def joined(inputs: Any) -> Joined:
        found = join(root, containers, inputs, trace.constants)
        for rule in trace.rules:
            rule.apply(View(root, found.graph, is_shown=False))
        return found

    # torch specializes on sizes of 1, so the graph of two or more samples may have a condition that
    # excludes a single one; then this is captured too. The other mode shares the graphs if no code
    # depends on it. If it cannot be captured, the stages refuse that mode when called.
    found: dict[Kind, Joined] = {}
    for training in (root.training, not root.training):
        try:
            with in_mode(root, training):
                if found and serves_mode(root, found[Kind(not training)]):
                    found |= {kind._replace(training=training): j for kind, j in found.items()}
                    break
                found[Kind(training)] = many = joined(_with_rows(trace.inputs, 2))
                one = _with_rows(trace.inputs, 1)
                if many.sizes is not None and not size_check(many.sizes)(*one):
                    found[Kind(training, of_one=True)] = joined(one)
        except TraceError as error:
            if Kind(root.training) not in found:
                raise
            logger.info("the stages do not support every call in %s: %s", _named(training), error)
    return found


def _with_rows(inputs: Any, least: int) -> Any:
    """Return example inputs with a batch of one sample, or of at least two."""
    batch = next((t.size(0) for t in tensors(inputs) if t.dim()), 0)
    if not batch or (least > 1 and batch > 1):
        return inputs

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.size(0) != batch:
            return value
        return value[:1] if least == 1 else torch.cat([value, value])

    return map_leaves(inputs, rows)


def _shows_everywhere(kind: Kind, parts: Mapping[Kind, list[StageGraph]]) -> bool:
    """Return whether each stage can detect a batch of one sample from its received tensors."""
    many, one = parts[Kind(kind.training)], parts[kind]
    alike = all(len(a.received) == len(b.received) for a, b in zip(many, one, strict=True))
    return not kind.of_one or (alike and all(starmap(axis_of_one, zip(many, one, strict=True))))


def _named(training: bool) -> str:
    return f"{'train' if training else 'eval'} mode"


def _split(root: Traced, joined: Joined, cuts: list[Node]) -> list[StageGraph]:
    order = {node: place for place, node in enumerate(joined.graph.nodes)}
    ends = [end for node in cuts for end in _ends_of(node, joined.graph)]
    ends.sort(key=order.__getitem__)
    return split_graph(joined.graph, ends, root.get_submodule)


def _check_alike(parts: dict[Kind, list[StageGraph]]) -> None:
    """Refuse stages that send different tensors in train and eval mode."""
    sent = {k.training: [p.sent for p in each] for k, each in parts.items() if not k.of_one}
    if len(sent) < 2 or sent[True] == sent[False]:
        return
    pairs = enumerate(zip(sent[True], sent[False], strict=False))
    index, (train, evaluation) = next((k, pair) for k, pair in pairs if pair[0] != pair[1])
    raise SlapoError(
        f"stage {index} would send {list(train)} in train mode and {list(evaluation)} in eval "
        "mode; cut where both are the same, such as after a layer"
    )


def _containers_above(sch: Node, cuts: list[Node]) -> tuple[Traced, list[str]]:
    found: dict[str, Node] = {}
    for cut in cuts:
        below: Node = cut
        for node in cut.ancestors():
            if not _is_passed_over(node, below):
                found[node.model_path] = below = node
    for node in found.values():
        _check_container(node)
    root = sch.mod
    assert isinstance(root, Traced), "just checked"
    return root, list(found)


def _is_passed_over(node: Node, below: Node) -> bool:
    """Return whether `node` is a mere namespace: the module above calls `below` directly (OPT)."""
    if isinstance(innermost(node.mod), Traced):
        return False
    for above in node.ancestors():
        module = innermost(above.mod)
        if isinstance(module, Traced):
            return trace_of(module).calls(below.model_path[len(above.model_path) :].lstrip("."))
    return False


def _check_container(node: Node) -> None:
    if not isinstance(innermost(node.mod), Traced):
        raise SlapoError(
            f"a stage ends below {node.where}, which is not traced; call trace_until on the root, "
            "down to the parents of all cuts"
        )
    if not isinstance(node.mod, Traced):
        raise SlapoError(
            f"{node.where} is checkpointed or runs under fork_rng as a whole, but a stage ends "
            "inside it; apply these to the modules below it"
        )
    trace = trace_of(node.mod)
    # Cuts capture the containers again, without such changes; only rules of the root are applied to
    # the joined graph.
    if trace.edited is not None or (trace.rules and node.parent is not None):
        raise SlapoError(
            f"operations of {node.where} were rewritten, but a stage ends inside it; rewrite the "
            "modules below it instead"
        )
    if has_forward_hooks(node.mod) or has_backward_hooks(node.mod):
        raise SlapoError(
            f"{node.where} has hooks or syncs, but a stage ends inside it, so it is never called "
            "as a whole; move them to modules that stay in one stage"
        )


def _ends_of(cut: Node, graph: fx.Graph) -> list[fx.Node]:
    """Return the ends of stages: the calls of a module that the cut selects, by default all."""
    path = cut.model_path
    calls = [_checked(call) for call in graph.find_nodes(op="call_module", target=path)]
    if not calls:  # a container that the graph has inlined ends with its last operation
        inside = [n for n in graph.nodes if f"{n.meta.get(OWNER, '')}.".startswith(f"{path}.")]
        calls = inside[-1:]
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


def _checked(call: fx.Node) -> fx.Node:
    """Return the check of a call's result if there is one, else the call."""
    return next((user for user in call.users if user.target is like_input), call)
