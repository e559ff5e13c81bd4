"""Tensors compared, and two models given the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.sharding.tags import apply_tags, new_parameter
from slapo.weights.slots import Slot, compiled_parameters, exchanged, slots

#: What is larger stands for infinity.
_FILL = 1e30


@contextmanager
def other_tensors(
    model: nn.Module,
    values: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    compiled: Mapping[int, Tensor] | None = None,
    wide: torch.dtype | None = None,
) -> Iterator[None]:
    """The model with copies of its tensors, or with `values` by name, while the block runs.

    Values are this rank's slices. Gradients and changes of buffers fall on the copies.
    """

    def copied(slot: Slot) -> Tensor:
        old = slot.tensor
        data = values[slot.name] if slot.name in values else old.detach()
        dtype = wide if wide is not None and old.is_floating_point() else old.dtype
        data = data.to(dtype=dtype, copy=True)
        new = new_parameter(data, old) if isinstance(old, nn.Parameter) else data
        apply_tags(new, {}, group)
        return new

    with exchanged(slots(model), copied), _compiled_values(model, compiled or {}):
        yield


@contextmanager
def _compiled_values(model: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Parameters inside compiled modules stay the objects that they are."""
    kept = [(param, param.data, param.grad) for param in compiled_parameters(model).values()]
    try:
        for param, data, _ in kept:
            param.grad = None
            param.data = values.get(id(param), data).to(data, copy=True)
        yield
    finally:
        for param, data, grad in kept:
            param.grad = None
            param.data = data
            param.grad = grad


def difference(given: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference; infinite where shapes or NaN patterns differ."""
    if given.shape != wanted.shape:
        return float("inf")
    if given.numel() == 0:
        return 0.0
    a, b = given.detach(), wanted.detach().to(given.device)
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    apart = (a.to(wide) - b.to(wide)).abs()
    worst = apart.max().item()
    if not math.isfinite(worst):
        # Infinities of one sign, as of masked scores, and NaN on both sides.
        worst = apart.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).max().item()
    return float("inf") if worst != worst else float(worst)


def scale_of(tensor: Tensor) -> float:
    """The largest finite absolute value."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return 0.0
    values = tensor.detach().abs()
    largest = float(values.max())
    if largest < _FILL:
        return largest
    finite = values[values < _FILL]  # not the fill value of a mask
    return float(finite.max()) if finite.numel() else 0.0
