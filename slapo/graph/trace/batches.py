"""Tensors that are the same for all samples may be given for each sample, and the other way round.

Models hand positions and biases on with a first size of 1, and whoever calls them with positions of
each sample has the whole batch there. To torch's shape engine 1 is a constant, because such sizes
broadcast. So the module is captured once more with a batch in these places: if that gives the same
graph, it serves both kinds of calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from slapo.graph.trace.contract import CallContract, Guard
from slapo.graph.trace.examples import BATCH
from slapo.graph.trace.expressions import Formula, Size
from slapo.graph.trace.guards import SizeGuard
from slapo.graph.trace.modes import aligned
from slapo.graph.trace.run import Inputs
from slapo.graph.trace.trees import leaves, map_leaves
from slapo.graph.trace.versions import Version


def demands_one(contract: CallContract) -> bool:
    """Whether a graph holds only while the first size of some input is 1."""
    return any(
        type(guard) is SizeGuard and _is_one(guard.relation) for guard in contract.size_guards
    )


def _is_one(relation: Formula) -> bool:
    if not isinstance(relation, tuple) or relation[0] != "==" or relation[2] != 1:
        return False
    return isinstance(relation[1], Size) and relation[1].dim == 0


def with_batch(inputs: Inputs) -> Inputs:
    """These inputs with the size of a batch where the first size is 1."""
    first = [v.shape[0] for v in leaves(list(inputs)) if isinstance(v, Tensor) and v.dim() > 1]
    batch = next((size for size in first if size > 1), BATCH)

    def repeated(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[0] != 1:
            return value
        with torch.enable_grad():
            wide = value.expand(batch, *value.shape[1:]).clone()
        # A leaf is what a forward may not write to.
        return wide.detach().requires_grad_(value.requires_grad) if value.is_leaf else wide

    args, kwargs = (map_leaves(each, repeated) for each in inputs)
    return args, kwargs


def serve_both(narrow: Version, wide: Version) -> None:
    """Have a graph that was captured with sizes of 1 hold for a batch there, if it is the same."""
    one, other = narrow.contract, wide.contract
    guards, wide_guards = one.size_guards, other.size_guards
    only = [_others(guards, wide_guards), _others(wide_guards, guards)]
    comparable = all(type(guard) is SizeGuard for guards in only for guard in guards)
    alike = replace(one, size_guards=()) == replace(other, size_guards=())
    same_constants = narrow.constants.keys() == wide.constants.keys() and all(
        narrow.constants[name] is tensor for name, tensor in wide.constants.items()
    )
    if not (comparable and alike and same_constants and narrow.entered == wide.entered):
        return
    if not aligned(narrow.graph, wide.graph, lambda *_: False):
        return
    guards = tuple(guard for guard in guards if guard not in only[0])
    if all(only):
        demands = [_all_of(each) for each in only]
        guards += (SizeGuard.of(("or", *demands)),)
    narrow.contract = replace(one, size_guards=guards)
    narrow.reads_mode = narrow.reads_mode or wide.reads_mode


def _others(guards: Iterable[Guard], than: Iterable[Guard]) -> list[Any]:
    known = list(than)
    return [guard for guard in guards if guard not in known]


def _all_of(guards: list[SizeGuard]) -> Formula:
    return reduce(lambda left, right: ("and", left, right), (g.relation for g in guards))
