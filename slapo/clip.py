"""Clip the gradient of a model that is split over tensor-parallel ranks, in loops of one's own."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor, nn

from slapo.framework_dialect.gradients import clip_factor, global_norm, scale_gradients
from slapo.sharding.state import sharding_of
from slapo.wrapper import innermost


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients so that the norm of the whole model's is at most `max_norm`, in place.

    ``torch.nn.utils.clip_grad_norm_`` would take the norm of this rank's slices, another one on
    each rank, by which parameters that all ranks hold drift apart. A collective of the ranks that
    the model is split over. Engines clip by themselves: ``build(..., clip_grad_norm=)``.

    Parameters
    ----------
    model
        What ``build(sch)`` has returned, or any module without slices.
    max_norm
        Largest 2-norm; ``math.inf`` to measure only.

    Returns
    -------
    Tensor
        The norm before, without dimensions; the same on all ranks.

    Raises
    ------
    ValueError
        If `max_norm` is not above 0.
    TypeError
        If `model` is no module.

    Examples
    --------
    >>> import torch
    >>> model = nn.Linear(1, 2, bias=False)
    >>> model.weight.grad = torch.tensor([[3.0], [4.0]])
    >>> float(clip_grad_norm_(model, 1.0)), model.weight.grad.flatten()
    (5.0, tensor([0.6000, 0.8000]))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"clip_grad_norm_: got {type(model).__name__}; pass the model itself, in the place of "
            "its parameters: the norm of slices is taken by what their modules know"
        )
    if isinstance(max_norm, bool) or not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: max_norm is {max_norm!r}; pass a number above 0")
    parameters = list(model.parameters())
    norm = global_norm(parameters, tp_group=_group_of(model))
    if max_norm != math.inf:
        scale_gradients(parameters, clip_factor(norm, max_norm))
    return norm


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that the model is split over; None for one."""
    for module in map(innermost, model.modules()):
        state = sharding_of(module)
        if state is not None and state.specs:
            return state.group.group
    return None
