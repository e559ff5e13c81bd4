"""Megatron-Core's optimizers, and the parameter attributes that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.framework_dialect.gradients import is_counted_slice
from slapo.framework_dialect.megatron.load import megatron_core
from slapo.framework_dialect.megatron.options import Configured, MegatronOptions
from slapo.framework_dialect.optimizers import make_optimizer as make_torch_optimizer
from slapo.framework_dialect.optimizers import place_steps
from slapo.framework_dialect.precision import HALF_NAMES, INITIAL_SCALE
from slapo.framework_dialect.replicas import SharedParameter
from slapo.framework_dialect.runtime import Lowering
from slapo.sharding.state import shards_of
from slapo.wrapper import innermost


def mark_parameters(module: nn.Module, shared: Sequence[SharedParameter]) -> None:
    """Mark shards and copies; unmarked parameters count once in a norm.

    Megatron-Core's ``partition_stride`` is the number of adjacent blocks, as in a packed QKV.
    ``shared`` marks copies that count on another stage in a norm, and ``shared_embedding`` those
    that the distributed optimizer must shard equally on all stages.
    """
    blocks = {}
    for part in map(innermost, module.modules()):
        for name, spec in shards_of(part).items():
            blocks[id(part._parameters.get(name))] = len(spec.blocks)
    marks: Any
    for marks in module.parameters():
        full = getattr(marks, "orig_shape", marks.shape)
        pairs = enumerate(zip(marks.shape, full, strict=True))
        marks.tensor_model_parallel = is_counted_slice(marks)
        marks.partition_dim = next((axis for axis, (here, whole) in pairs if here != whole), -1)
        marks.partition_stride = blocks.get(id(marks), 1)
    for one in shared:
        marks = one.copies[0]
        marks.shared, marks.shared_embedding = not one.is_counted, True


def make_optimizer(
    options: MegatronOptions,
    model: Any,
    lowering: Lowering,
    device: torch.device,
) -> Any:
    """Create Megatron-Core's optimizer for a model under its DDP. A collective of the world."""
    if isinstance(options.optimizer, Configured):
        return options.optimizer(model)
    assert options.optimizer is not None, "asked before"
    inner = make_torch_optimizer(options.optimizer, lowering.trainable(), device)
    core, half = megatron_core(), options.half
    copies = half is not None and options.mesh.shape[2] > 1
    flat = "Slapo does not recognize Megatron-Core's float32 copies as shards" if copies else None
    place_steps(inner, lowering, lambda: lowering.tp_group, flat)
    config = core.optimizer.OptimizerConfig(
        clip_grad=options.clip_grad_norm or 0.0,
        params_dtype=half or torch.float32,
        # As on the other targets: the defaults would skip the first 17 steps.
        initial_loss_scale=INITIAL_SCALE,
        hysteresis=1,
        **{name: half is dtype for name, dtype in HALF_NAMES.items()},
    )
    if half is None:
        optimizer = core.optimizer.FP32Optimizer(inner, config, _leave)
    else:
        make = core.optimizer.Float16OptimizerWithFloat16Params
        optimizer = make(inner, config, _scaler(config), _leave)
    # As get_megatron_optimizer sets them: the norm and the search for NaN reduce over these groups.
    optimizer.grad_stats_parallel_group = core.parallel_state.get_model_parallel_group()
    optimizer.tp_group = core.parallel_state.get_tensor_model_parallel_group()
    # On load it looks up groups by entries that torch's groups lack.
    optimizer._filter_and_reorder_param_groups = lambda present, loaded: loaded
    return optimizer


def _leave(*_: Any) -> None:
    """No initialization: the first step creates the state."""


def _scaler(config: Any) -> Any:
    """Loss scaling as in get_megatron_optimizer; None for bfloat16, which needs none."""
    if not config.fp16:
        return None
    return megatron_core().optimizer.grad_scaler.DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def chained(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a Megatron-Core optimizer."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def range_of_share(optimizer: Any, parameter: Any) -> tuple[Tensor, int, int] | None:
    """Shard of a parameter that the distributed optimizer steps on: tensor, start, length."""
    for part in chained(optimizer):
        if parameter in part.model_param_gbuf_map:
            place = part._get_model_param_range_map(parameter)["param"]
            group, order = part.model_param_group_index_map[parameter]
            cell = part.optimizer.param_groups[group]["params"][order]
            return cell, place.start, place.size
    return None


@torch.no_grad()
def set_masters(optimizer: Any, values: Mapping[nn.Parameter, Tensor]) -> None:
    """Copy values into the float32 copies that Megatron-Core's optimizer keeps."""
    for parameter, value in values.items():
        master = getattr(parameter, "main_param", None)
        if master is None:
            continue
        if getattr(parameter, "main_param_sharded", False):
            place = range_of_share(optimizer, parameter)
            assert place is not None, "it has a copy here"
            value = value.flatten().narrow(0, *place[1:])
        master.copy_(value.view(master.shape))


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside a Megatron-Core optimizer; None if nothing is trained."""
    parts = chained(optimizer)
    if len(parts) != 1:
        raise SlapoError(
            f"lr_scheduler: megatron uses {len(parts)} optimizers here, but a scheduler takes "
            "one; step the schedulers of optimizer.chained_optimizers by hand"
        )
    inner: torch.optim.Optimizer | None = parts[0].optimizer
    return inner
