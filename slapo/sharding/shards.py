"""Shard one tensor of a module: slice it and adjust the module's sizes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from slapo.sharding.groups import group_rank, group_size
from slapo.sharding.layout import Layout
from slapo.sharding.partial import defer_bias, has_bias, is_deferrable
from slapo.sharding.rules import Effect, effect_of
from slapo.sharding.slicing import Cut, ShardSpec, make_spec
from slapo.sharding.state import make_sharding, sharding_of, shards_of, syncs_of
from slapo.sharding.sync import REDUCTIONS, check_syncs
from slapo.sharding.tags import PARTIAL_GRAD, tags_of
from slapo.sharding.vocab import check_maskable, mask_vocabulary


def tensor_named(module: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer called `name` of `module` itself."""
    for table in (module._parameters, module._buffers):
        tensor = table.get(name)
        if tensor is not None:
            return tensor
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    known = [n for table in tables for n, t in table.items() if t is not None]
    below = [n for n, _ in module.named_parameters() if n.endswith(f".{name}")][:3]
    whose = f"{known}; name a module below it, for {below}" if below else known
    raise ValueError(
        f"{type(module).__name__} has no parameter or buffer {name!r} of its own; it has {whose}"
    )


class ShardPlan:
    """A checked decision to shard one tensor of one module; :meth:`carry_out` cannot fail."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        cut: Cut,
        group: dist.ProcessGroup | None,
    ) -> None:
        tensor = tensor_named(module, name)
        if name in shards_of(module):
            raise ValueError(
                f"{name!r} is sharded already, along axis {shards_of(module)[name].axis}; leave "
                "the second call out"
            )
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} of the lazy {type(module).__name__} has no shape yet; run the model "
                "once before you schedule it"
            )
        self.module, self.name, self.group = module, name, group
        rank, world_size = (0, 1) if group is None else (group_rank(group), group_size(group))
        self.spec: ShardSpec = make_spec(tensor.shape, cut, rank, world_size)
        self.effect: Effect = _as_cut(effect_of(module, name, self.spec.axis), self.spec)
        self._check_effect()

    def _check_effect(self) -> None:
        module, state = self.module, sharding_of(self.module)
        sizes = {} if state is None else state.sizes
        present = Layout() if state is None else state.layout
        tags = {} if state is None else state.tags.get(self.name, {})
        if self.spec.world_size > 1 and any(map(tags.get, PARTIAL_GRAD)):
            raise ValueError(
                f"{self.name!r} is annotated as partial_grad, which would add up the gradients of "
                "different slices; keep it whole, or leave the annotation out"
            )
        wanted = self.effect.layout
        self._check_blocks()
        if present.output is not None and wanted.output not in (None, present.output):
            raise ValueError(
                f"sharding {self.name!r} along axis {self.spec.axis} would make the output "
                f"{wanted.output}, but {', '.join(shards_of(module))} is sharded so that it is "
                f"{present.output}; keep {self.name!r} whole, or shard the other along the "
                "matching axis"
            )
        # The smallest slice is on the last rank, and all ranks have to raise.
        last = replace(self.spec, rank=self.spec.world_size - 1)
        if self.effect.means_all and last.local_shape.numel() == 1 < self.spec.world_size:
            raise ValueError(
                f"a slice of one element of {self.name!r} would be applied to all channels of a "
                f"{type(module).__name__}; keep it whole, or pick a smaller group"
            )
        for attribute in self.effect.divides:
            value = getattr(module, attribute)
            if attribute not in sizes and value % self.spec.world_size:
                raise ValueError(
                    f"{attribute} {value} is not divisible by world_size {self.spec.world_size}; "
                    "pick a group whose size divides it"
                )
        is_partial = wanted.output is not None and wanted.output.kind == "partial"
        if is_partial and not is_deferrable(module):
            raise ValueError(
                f"{type(module).__name__} would add its bias to a partial sum, once per rank, and "
                "has its own forward; replace it with slapo.op.LinearWithSyncFunc or a module "
                "without bias"
            )
        if wanted.output is not None and "embedding_dim" in self.effect.sizes:
            _check_columns(module)
        if wanted.vocabulary:
            _check_table(module)
            if any(sync.op in REDUCTIONS for sync in syncs_of(module)):
                check_maskable(module)
        if wanted != Layout():
            check_syncs(syncs_of(module), wanted)

    def _check_blocks(self) -> None:
        """Raise unless tensors along the same axis (weight and bias) have the same blocks."""
        for name, other in shards_of(self.module).items():
            effect = effect_of(self.module, name, other.axis)
            shared = set(effect.sizes) & set(self.effect.sizes)
            if shared and other.blocks != self.spec.blocks:
                raise ValueError(
                    f"{self.name!r} would be split in blocks of {list(self.spec.blocks)} and "
                    f"{name!r} is split in blocks of {list(other.blocks)}, though both are along "
                    f"{sorted(shared)}; pass the same blocks to both"
                )

    @property
    def defers_bias(self) -> bool:
        """Return True if the output becomes a partial sum and the module has a bias."""
        output = self.effect.layout.output
        return output is not None and output.kind == "partial" and has_bias(self.module)

    def carry_out(self) -> None:
        """Slice the tensor and adjust the module."""
        module, name, spec = self.module, self.name, self.spec
        state = make_sharding(module, self.group)
        if spec.parts == 1 < spec.world_size:  # each rank uses the full tensor for its own heads
            state.tag(module, name, PARTIAL_GRAD[0], True)
            return
        slice_tensor(module, name, spec)
        state.specs[name] = spec
        state.attach(module, name)
        self._set_sizes(state.sizes)
        layout = self.effect.layout
        if layout != Layout():
            state.layout = layout
        if self.defers_bias:
            defer_bias(module)
        if layout.vocabulary:
            _localise_padding(module, spec, state.sizes)
            if any(sync.op in REDUCTIONS for sync in syncs_of(module)):
                mask_vocabulary(module)

    def _set_sizes(self, full: dict[str, Any]) -> None:
        module = self.module
        for attribute in self.effect.sizes:
            full.setdefault(attribute, getattr(module, attribute))
            setattr(module, attribute, self.spec.local_shape[self.spec.axis])
        # Weight and bias both divide it: only the first of them may.
        for attribute in self.effect.divides:
            if attribute not in full:
                full[attribute] = getattr(module, attribute)
                setattr(module, attribute, full[attribute] // self.spec.world_size)


def _as_cut(effect: Effect, spec: ShardSpec) -> Effect:
    """The effect with details of slices that a plain gather cannot join: blocks, uneven, copies."""
    output = effect.layout.output
    if output is None or output.kind != "shard":
        return effect
    total = sum(spec.blocks) if spec.is_uneven else None
    cut = replace(output, blocks=len(spec.blocks), total=total, copies=spec.copies)
    return replace(effect, layout=replace(effect.layout, output=cut))


def slice_tensor(module: nn.Module, name: str, spec: ShardSpec) -> None:
    """Keep this rank's slice of a tensor; a parameter remains the same object.

    Existing optimizers, tied modules and the user's hooks thus stay valid.
    """
    tensor = tensor_named(module, name)
    if tuple(tensor.shape) == tuple(spec.local_shape) != tuple(spec.full_shape):
        return  # a tied module holds the same parameter and sliced it already
    with torch.no_grad():
        local, grad = spec.slice(tensor.detach()), tensor.grad
        if not isinstance(tensor, nn.Parameter):
            local.__dict__.update(tags_of(tensor))
            module._buffers[name] = local
            return
        tensor.grad = None
        # The detour through another dtype makes autograd drop a node that stores the old shape.
        # Such a node exists while an earlier output is alive.
        tensor.data = _empty(tensor.device, tensor.dtype == torch.float64)
        tensor.data = local
        if grad is not None:
            tensor.grad = spec.slice(grad)


@functools.cache
def _empty(device: torch.device, single: bool) -> Tensor:
    return torch.empty(0, device=device, dtype=torch.float32 if single else torch.float64)


def _check_columns(module: nn.Module) -> None:
    if getattr(module, "max_norm", None):
        raise ValueError(
            f"an embedding with max_norm={module.max_norm} normalizes full rows, which would be "
            "sharded; keep it whole"
        )


def _check_table(module: nn.Module) -> None:
    for attribute, remedy in (
        ("max_norm", "keep it whole"),
        ("scale_grad_by_freq", "shard axis 1"),
    ):
        if getattr(module, attribute, None):
            raise ValueError(
                f"an embedding with {attribute}={getattr(module, attribute)} cannot be sharded by "
                f"rows: tokens of other ranks count as row 0 here; {remedy}"
            )


def _localise_padding(module: nn.Module, spec: ShardSpec, full: dict[str, Any]) -> None:
    """Move the padding index to the rank that holds the row, and unset it on the others."""
    padding = getattr(module, "padding_idx", None)
    if padding is None:
        return
    rows = spec.local_shape[0]
    local = padding - spec.start
    full.setdefault("padding_idx", padding)
    module.__dict__["padding_idx"] = local if 0 <= local < rows else None
