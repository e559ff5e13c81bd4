"""Shard one tensor of a module: slice it, and let the module's sizes follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from slapo.sharding.layout import Layout, check_syncs, inner_layout_of, set_layout, syncs_of
from slapo.sharding.partial import check_deferrable, defer_bias, has_bias
from slapo.sharding.rules import Effect, effect_of
from slapo.sharding.slicing import ShardSpec, make_spec
from slapo.sharding.tags import new_parameter
from slapo.sharding.vocab import check_maskable, mask_vocabulary

#: Ops that turn a partial sum into something whole.
REDUCTIONS = ("all_reduce", "reduce_scatter")
_SHARDS = "_slapo_shards"
_FULL_SIZES = "_slapo_full_sizes"


def shards_of(module: nn.Module) -> dict[str, ShardSpec]:
    """Tensor name -> spec, for the sharded tensors of `module` itself."""
    found: dict[str, ShardSpec] = module.__dict__.get(_SHARDS, {})
    return found


def full_sizes_of(module: nn.Module) -> dict[str, Any]:
    """Attribute -> its value before sharding."""
    found: dict[str, Any] = module.__dict__.get(_FULL_SIZES, {})
    return found


def tensor_named(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer called `name` of `module` itself.

    Raises
    ------
    ValueError
        Naming the tensors there are.
    """
    for table in (module._parameters, module._buffers):
        tensor = table.get(name)
        if tensor is not None:
            return tensor
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    known = [n for table in tables for n, t in table.items() if t is not None]
    raise ValueError(
        f"{type(module).__name__} has no parameter or buffer {name!r} of its own; it has {known}"
    )


class ShardPlan:
    """A checked decision to shard one tensor of one module; :meth:`carry_out` cannot fail.

    Parameters
    ----------
    module
        The module that owns the tensor.
    name
        The tensor's name there.
    axis, blocks
        As in ``Schedule.shard``.
    rank, world_size
        This process's place in the group.

    Raises
    ------
    ValueError
        If there is no such tensor or axis, it is sharded already, or sizes do not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        axis: int,
        blocks: int | Sequence[int],
        rank: int,
        world_size: int,
    ) -> None:
        tensor = tensor_named(module, name)
        if name in shards_of(module):
            raise ValueError(
                f"{name!r} is sharded already, along axis {shards_of(module)[name].axis}"
            )
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} of the lazy {type(module).__name__} has no shape yet; run the model "
                "once before you schedule it"
            )
        self.module, self.name = module, name
        self.spec: ShardSpec = make_spec(tensor.shape, axis, blocks, rank, world_size)
        self.effect: Effect = effect_of(module, name, self.spec.axis)
        self._check_effect()

    def _check_effect(self) -> None:
        module, sizes = self.module, full_sizes_of(self.module)
        present = inner_layout_of(module)
        wanted = self.effect.layout
        if present.output is not None and wanted.output not in (None, present.output):
            raise ValueError(
                f"sharding {self.name!r} along axis {self.spec.axis} would leave the output "
                f"{wanted.output}, but {', '.join(shards_of(module))} is sharded so that it is "
                f"{present.output}"
            )
        self._check_blocks()
        for attribute in self.effect.divides:
            value = getattr(module, attribute)
            if attribute not in sizes and value % self.spec.world_size:
                raise ValueError(
                    f"{attribute} {value} is not divisible by world_size {self.spec.world_size}"
                )
        if wanted.output is not None and wanted.output.kind == "partial":
            check_deferrable(module)
        if wanted.vocabulary:
            _check_table(module)
            if any(sync.op in REDUCTIONS for sync in syncs_of(module)):
                check_maskable(module)
        if wanted != Layout():
            check_syncs(module, wanted)

    def _check_blocks(self) -> None:
        """Tensors along one axis of the module, its weight and its bias, are split alike."""
        for name, other in shards_of(self.module).items():
            effect = effect_of(self.module, name, other.axis)
            shared = set(effect.sizes) & set(self.effect.sizes)
            if shared and other.blocks != self.spec.blocks:
                raise ValueError(
                    f"{self.name!r} would be split in blocks of {list(self.spec.blocks)} and "
                    f"{name!r} is split in blocks of {list(other.blocks)}, though both lie along "
                    f"{sorted(shared)}; pass the same blocks to both"
                )

    @property
    def defers_bias(self) -> bool:
        """Whether the output becomes a partial sum that the module adds a bias to."""
        output = self.effect.layout.output
        return output is not None and output.kind == "partial" and has_bias(self.module)

    def carry_out(self) -> None:
        """Slice the tensor and let the module follow."""
        module, name, spec = self.module, self.name, self.spec
        slice_tensor(module, name, spec)
        module.__dict__.setdefault(_SHARDS, {})[name] = spec
        self._set_sizes()
        layout = self.effect.layout
        if layout != Layout():
            set_layout(module, layout)
        if self.defers_bias:
            defer_bias(module, spec.world_size)
        if layout.vocabulary:
            _localise_padding(module, spec)
            if any(sync.op in REDUCTIONS for sync in syncs_of(module)):
                mask_vocabulary(module, spec.rank * spec.local_shape[0], spec.local_shape[0])

    def _set_sizes(self) -> None:
        module, full = self.module, self.module.__dict__.setdefault(_FULL_SIZES, {})
        for attribute in self.effect.sizes:
            full.setdefault(attribute, getattr(module, attribute))
            setattr(module, attribute, self.spec.local_shape[self.spec.axis])
        for attribute in self.effect.divides:
            if attribute not in full:
                full[attribute] = getattr(module, attribute)
                setattr(module, attribute, full[attribute] // self.spec.world_size)


def slice_tensor(module: nn.Module, name: str, spec: ShardSpec) -> None:
    """Put this rank's slice in the place of a tensor; its attributes come along."""
    tensor = tensor_named(module, name)
    with torch.no_grad():
        local = spec.slice(tensor.detach())
    new: Tensor = new_parameter(local, tensor) if isinstance(tensor, nn.Parameter) else local
    new.orig_shape = spec.full_shape  # type: ignore[attr-defined]
    table: dict[str, Any] = (
        module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
    )
    table[name] = new


def share_slice(plan: ShardPlan, source: nn.Module, name: str) -> None:
    """Carry out `plan` for a tied tensor: its module takes the very slice of `source`."""
    plan.carry_out()
    plan.module._parameters[plan.name] = source._parameters[name]


def _check_table(module: nn.Module) -> None:
    for attribute in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, attribute, None):
            raise ValueError(
                f"an embedding with {attribute}={getattr(module, attribute)} cannot be sharded by "
                "rows: tokens of other ranks count as row 0 here"
            )


def _localise_padding(module: nn.Module, spec: ShardSpec) -> None:
    """The padding row has another index on the rank that holds it, and none on the others."""
    padding = getattr(module, "padding_idx", None)
    if padding is None:
        return
    rows = spec.local_shape[0]
    local = padding - spec.rank * rows
    module.__dict__[_FULL_SIZES].setdefault("padding_idx", padding)
    module.__dict__["padding_idx"] = local if 0 <= local < rows else None
