"""What both sides of a verification share: inputs, copies, modes, random states, a loss."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.schedule import Schedule
from slapo.sharding.tags import apply_tags, tags_of
from slapo.utils.outputs import tensors_in
from slapo.weights.slots import slots

SEED = 20131


def copy_model(sch: Schedule) -> nn.Module:
    """A copy whose parameters carry the tags of the originals."""
    memo: dict[int, Any] = {id(sch.group): sch.group} if sch.group is not None else {}
    copied = copy.deepcopy(sch.mod, memo)
    for mine, new in zip(slots(sch.mod), slots(copied), strict=True):
        new.tensor.__dict__.update(tags_of(mine.tensor))
        apply_tags(new.tensor, {}, sch.group)
        new.tensor.grad = None
    return copied


@dataclass(frozen=True)
class Outcome:
    """What a run gave, and the floating point inputs it was given, whose gradients tell."""

    output: Any
    inputs: list[Tensor]


def fresh_input(tensor: Tensor, inputs: list[Tensor], wide: torch.dtype | None) -> Tensor:
    """A copy to run on; of a floating point tensor the gradient can be asked for afterwards."""
    if not tensor.is_floating_point():
        return tensor.clone()
    value = tensor.detach().to(wide or tensor.dtype, copy=True)
    leaf = value.requires_grad_()
    inputs.append(leaf)
    return leaf.clone()  # no leaf, so the model may change it in place


def full_tensors(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Every tensor by name, shards put together."""
    with torch.no_grad():
        return {
            p.name: p.spec.gather(p.tensor.detach(), group) if p.spec else p.tensor.detach().clone()
            for p in slots(model)
        }


def local_tensors(model: nn.Module, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's slices of full tensors by name."""
    with torch.no_grad():
        return {
            p.name: p.spec.slice(full[p.name]) if p.spec else full[p.name] for p in slots(model)
        }


def gradient_of(tensor: Tensor) -> Tensor:
    """None counts as zero; those of sparse embeddings are compared as any."""
    grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    return grad if grad.layout is torch.strided else grad.to_dense()


def gathered_gradients(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Gradients by name, shards put together; none counts as zero."""
    found: dict[str, Tensor] = {}
    for slot in slots(model):
        tensor = slot.tensor
        if not (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
            continue
        grad = gradient_of(tensor)
        found[slot.name] = slot.spec.gather(grad, group) if slot.spec is not None else grad
    return found


def weighed(output: Any) -> Tensor | None:
    """All outputs against fixed random numbers; None where none needs a gradient."""
    generator = torch.Generator().manual_seed(SEED)
    terms = []
    for _, tensor in tensors_in(output):
        if not tensor.is_floating_point():
            continue
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        if tensor.requires_grad:
            usable = tensor.masked_fill(~tensor.detach().isfinite(), 0.0)
            usable = usable if tensor.dtype == torch.float64 else usable.float()
            terms.append((usable * weights.to(tensor.device)).sum().double())
    return torch.stack(terms).sum() if terms else None
