"""Data parallelism: DDP, FSDP2, or a mean of gradients after a pipeline's backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from slapo.errors import SlapoError
from slapo.mesh import extent, group_of
from slapo.weights.tags import SEQUENCE_PARALLEL, tags_of


def fsdp_units(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that FSDP2 gathers one at a time: the items of lists, outermost first.

    In a stage they are found by their numbers, since lists became plain modules there.
    """
    for name, child in module.named_children():
        if name.isdigit() and any(True for _ in child.parameters()):
            yield child
        else:
            yield from fsdp_units(child)


def _untied(module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Units that share no parameter with anything outside; others are gathered with the root."""
    within = [{id(p) for p in unit.parameters()} for unit in units]
    inner = {id(m) for unit in units for m in unit.modules()}
    outside = (m for m in module.modules() if id(m) not in inner)
    places = Counter(id(p) for m in outside for p in set(m._parameters.values()) if p is not None)
    for ids in within:
        places.update(ids)
    return [u for u, ids in zip(units, within, strict=True) if all(places[i] == 1 for i in ids)]


def shard_parameters(module: nn.Module, mesh: DeviceMesh, options: Mapping[str, Any]) -> None:
    """Share out the parameters over the data-parallel ranks (FSDP2), in place.

    What parameters carry (tags, ``orig_shape``) goes over to the new ones.
    """
    if any(isinstance(m, FSDPModule) for m in module.modules()):
        raise SlapoError(
            'this model was built with data_parallel="fsdp" before; create a new model and schedule'
        )
    carried = {n: tags_of(p) for n, p in module.named_parameters(remove_duplicate=False)}
    over = mesh["dp"]
    for unit in _untied(module, list(dict.fromkeys(fsdp_units(module)))):
        fully_shard(unit, mesh=over, **options)
    fully_shard(module, mesh=over, **options)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameter.__dict__.update(carried[name])


def replicate(module: nn.Module, mesh: DeviceMesh, options: Mapping[str, Any]) -> nn.Module:
    """The module under DDP; the module itself where there is one replica only."""
    if extent(mesh, "dp") == 1 or not any(p.requires_grad for p in module.parameters()):
        return module
    return DistributedDataParallel(module, process_group=group_of(mesh, "dp"), **options)


def without_sync(module: nn.Module) -> AbstractContextManager[Any]:
    """A context in which backward adds up gradients here only."""
    if isinstance(module, DistributedDataParallel):
        return module.no_sync()
    return _WithoutSync(module) if isinstance(module, FSDPModule) else nullcontext()


class _WithoutSync(AbstractContextManager[None]):
    def __init__(self, module: FSDPModule) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.module.set_requires_gradient_sync(False)

    def __exit__(self, *_: Any) -> None:
        self.module.set_requires_gradient_sync(True)


@torch.no_grad()
def broadcast_values(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make parameters and buffers those of the group's first rank."""
    source = dist.get_global_rank(group, 0)
    seen: set[int] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            value = tensor.detach().contiguous()
            dist.broadcast(value, source, group=group)
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)


def sequence_parallel_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters whose gradients are partial sums over the tensor-parallel ranks."""
    return [p for p in module.parameters() if getattr(p, SEQUENCE_PARALLEL, False)]
