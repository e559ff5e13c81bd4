"""Sum gradients of whole parameters in split regions over the ranks: once for each backward pass.

Each rank has a part of such a gradient, as where it saw other tokens (a layer norm with sequence
parallelism) or other heads. Norms are many and small, so their gradients wait for the end of the
backward pass, and one collective sums all of them. Sums over these ranks and averages over replicas
may come in either order, so DDP may have averaged them by then.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from slapo.errors import SlapoError
from slapo.sharding.collectives import reduce_from_group


class _Bucket:
    """Gradients of one backward pass that wait for its end.

    It lives as long as that pass: what fails half way leaves nothing behind.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Tensor, Tensor | None, dist.ProcessGroup | None]] = []
        engine = torch.autograd.Variable._execution_engine
        # At the end, and there behind what others have put there meanwhile: DDP's averages.
        engine.queue_callback(lambda: engine.queue_callback(self.reduce))

    def reduce(self) -> None:
        """Sum what this pass has added to the gradients, and leave what was there before."""
        for _, entries in itertools.groupby(self.entries, _kind_of):
            parts = list(entries)
            added = [_added(param, before) for param, before, _ in parts]
            flat = torch.cat([grad.flatten() for grad in added])
            dist.all_reduce(flat, group=parts[0][2])
            totals = flat.split([grad.numel() for grad in added])
            for (param, before, _), total in zip(parts, totals, strict=True):
                whole = total.view_as(param)
                param.grad.copy_(whole if before is None else before + whole)  # type: ignore[union-attr]


def _kind_of(entry: tuple[Tensor, Tensor | None, dist.ProcessGroup | None]) -> Any:
    param, _, group = entry
    return param.dtype, param.device, group


def _added(param: Tensor, before: Tensor | None) -> Tensor:
    if param.grad is None:
        raise SlapoError(
            f"a gradient of shape {tuple(param.shape)}, annotated as partial_grad, was taken away "
            "within the backward pass, before it was summed over the ranks; let "
            "slapo.build(sch, target=...) make the engine, or take it after the pass"
        )
    return param.grad if before is None else param.grad - before


#: Number of a backward pass that is under way -> its bucket.
_BUCKETS: weakref.WeakValueDictionary[int, _Bucket] = weakref.WeakValueDictionary()


def sum_gradient(param: Tensor, grad: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """For a hook of `param`: have its gradient summed over the group.

    Parameters
    ----------
    param
        A leaf.
    grad
        Of the same shape: this rank's part.
    group
        The ranks.

    Returns
    -------
    Tensor
        The sum; or the part as it is, where the sum will be in ``param.grad`` after the pass.
    """
    if not _may_wait(param, grad):
        return reduce_from_group(grad, group)
    number = torch._C._current_graph_task_id()
    bucket = _BUCKETS.get(number)
    if bucket is None:
        bucket = _BUCKETS[number] = _Bucket()
    before = None if param.grad is None else param.grad.detach().clone()
    bucket.entries.append((param, before, group))
    return grad


def _may_wait(param: Tensor, grad: Tensor) -> bool:
    """Whether nobody looks at the gradient before the pass ends, and it ends in ``param.grad``."""
    if torch.is_grad_enabled() or grad.layout is not torch.strided:
        return False  # with create_graph, the sum is to be differentiated itself
    if getattr(param, "_post_accumulate_grad_hooks", None) or hasattr(param, "main_grad"):
        return False  # an optimizer within the backward pass; Megatron, which takes it away there
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(param).node))
    except RuntimeError:  # torch.autograd.grad asks for it
        return False
