"""Shared tools for both models of a verification: copies, inputs, a loss, comparisons."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.schedule import Schedule
from slapo.scripting import compiled_kept
from slapo.sharding.tags import apply_tags, new_parameter, tags_of
from slapo.utils.outputs import tensors_in
from slapo.weights.slots import Slot, compiled_parameters, exchanged, slots

SEED = 20131
#: Values above this count as infinite.
_FILL = 1e30


def copy_model(sch: Schedule) -> nn.Module:
    """A copy of the module whose parameters keep their tags."""
    # A process group cannot be copied; both models communicate over the same one.
    memo: dict[int, Any] = {id(sch.group): sch.group} if sch.group is not None else {}
    copied = copy.deepcopy(sch.mod, memo)
    for mine, new in zip(slots(sch.mod), slots(copied), strict=True):
        # ``nn.Parameter.__deepcopy__`` drops attributes and hooks: `partial_grad`, and the sum that
        # it asks for, are set again.
        new.tensor.__dict__.update(tags_of(mine.tensor))
        apply_tags(new.tensor, {}, sch.group)
        new.tensor.grad = None
    pairs = zip(*(compiled_parameters(each).values() for each in (sch.mod, copied)), strict=True)
    for mine, new in pairs:  # torch copies these by an operation with a gradient
        new.detach_().requires_grad_(mine.requires_grad)
    return copied


@dataclass(frozen=True)
class Outcome:
    """The output of a run, and its floating point inputs, whose gradients are compared."""

    output: Any
    inputs: list[Tensor]


def full_tensors(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Full tensors by name, with shards gathered."""
    with torch.no_grad():
        return {
            p.name: p.spec.gather(p.tensor.detach(), group) if p.spec else p.tensor.detach().clone()
            for p in slots(model)
        }


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient: zeros for None, and dense for a sparse embedding."""
    grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    return grad if grad.layout is torch.strided else grad.to_dense()


def gathered_gradients(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Gradients by name, with shards gathered and zeros for None."""
    found: dict[str, Tensor] = {}
    for slot in slots(model):
        tensor = slot.tensor
        if not (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
            continue
        grad = gradient_of(tensor)
        found[slot.name] = slot.spec.gather(grad, group) if slot.spec is not None else grad
    return found


def weighed(output: Any) -> Tensor | None:
    """Product of all outputs with fixed random values; None if no output requires a gradient."""
    generator = torch.Generator().manual_seed(SEED)
    terms = []
    for _, each in tensors_in(output):
        tensor = torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
        if not tensor.is_floating_point():
            continue
        # Drawn for each output, also one without a gradient, so that both models' outputs keep the
        # same weights; on the CPU in float32, so that these do not depend on the device or the
        # dtype of the run.
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        if tensor.requires_grad:
            # Masked logits are -inf, and their product with a weight would make the loss infinite
            # or NaN.
            finite = tensor.detach().isfinite()
            usable = tensor if bool(finite.all()) else tensor.masked_fill(~finite, 0.0)
            usable = usable if tensor.dtype == torch.float64 else usable.float()
            terms.append((usable * weights.to(tensor.device)).sum().double())
    return torch.stack(terms).sum() if terms else None


# --- tensors --------------------------------------------------------------------------------------
@contextmanager
def other_tensors(
    model: nn.Module,
    values: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    compiled: Mapping[int, Tensor] | None = None,
    wide: torch.dtype | None = None,
) -> Iterator[None]:
    """Run the block with copies of the model's tensors, or with `values` by name.

    Values are this rank's slices. Gradients and buffer updates affect the copies only.
    """

    def copied(slot: Slot) -> Tensor:
        old = slot.tensor
        data = values[slot.name] if slot.name in values else old.detach()
        dtype = wide if wide is not None and old.is_floating_point() else old.dtype
        data = data.to(dtype=dtype, copy=True)
        new = new_parameter(data, old) if isinstance(old, nn.Parameter) else data
        apply_tags(new, {}, group)
        return new

    with exchanged(slots(model), copied), compiled_kept(model, compiled):
        yield


def difference(given: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference; infinite if shapes or NaN patterns differ."""
    if given.shape != wanted.shape:
        return float("inf")
    if given.numel() == 0:
        return 0.0
    a, b = given.detach(), wanted.detach().to(given.device)
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    # A difference of two half-precision values may round to zero or overflow in their own dtype.
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    apart = a.to(wide) - b.to(wide)
    apart = apart.abs() if apart.is_complex() else apart.abs_()
    worst = apart.max().item()
    if not math.isfinite(worst):
        # Ignore equal infinities, as in masked scores, and NaN on both sides.
        worst = apart.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).max().item()
    return float("inf") if worst != worst else float(worst)


def scale_of(tensor: Tensor) -> float:
    """The largest finite absolute value."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    largest = max(abs(float(value)) for value in values.aminmax())  # makes no copy
    if largest < _FILL:
        return largest
    finite = values.abs()[values.abs() < _FILL]  # without the fill value of a mask
    return float(finite.max()) if finite.numel() else 0.0
