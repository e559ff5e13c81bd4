"""Megatron-Core's optimizers, from its own configuration or around a torch optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.framework_dialect.megatron.load import megatron_core
from slapo.framework_dialect.megatron.options import MegatronOptions
from slapo.framework_dialect.optimizers import make_optimizer as make_torch_optimizer
from slapo.framework_dialect.precision import INITIAL_SCALE

_HALF_FIELDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Configured:
    """Megatron-Core's own optimizer, as a configuration describes it.

    Parameters
    ----------
    config
        Megatron-Core's, complete.
    """

    config: Any

    def __call__(self, model: Any) -> Any:
        """The optimizer of a model under Megatron-Core's DDP."""
        make = megatron_core().optimizer.get_megatron_optimizer
        return make(self.config, [model], use_gloo_process_groups=False)


def resolve(options: Mapping[str, Any], model: nn.Module) -> MegatronOptions:
    """The options of build for a model, of which an ``OptimizerConfig`` may have said some.

    Raises
    ------
    ValueError, TypeError
        If they do not fit together.
    """
    given = dict(options)
    config = given.get("optimizer")
    if not isinstance(config, megatron_core().optimizer.OptimizerConfig):
        checked = MegatronOptions.of("megatron", given, model)
        if checked.distributed_optimizer:
            raise ValueError(
                "distributed_optimizer=True shares out the state of Megatron-Core's own Adam; pass "
                "optimizer=megatron.core.optimizer.OptimizerConfig(...) in place of "
                f"{_name(config)}, or leave it out"
            )
        return checked
    given["dtype"] = _agreed_dtype(config, given.get("dtype"))
    # Not a callable, which all other options are checked with.
    checked = MegatronOptions.of("megatron", {**given, "optimizer": Configured(config)}, model)
    complete = _complete(config, checked)
    return replace(
        checked,
        optimizer=Configured(complete),
        distributed_optimizer=complete.use_distributed_optimizer,
        clip_grad_norm=complete.clip_grad or None,
    )


def _name(optimizer: Any) -> str:
    return getattr(optimizer, "__name__", None) or type(optimizer).__name__


def _agreed_dtype(config: Any, dtype: torch.dtype | None) -> torch.dtype | None:
    half = next((half for name, half in _HALF_FIELDS.items() if getattr(config, name)), None)
    if half is not None and dtype not in (None, half):
        raise ValueError(
            f"the OptimizerConfig is for {half} and dtype is {dtype}; pass one of them"
        )
    return half or dtype


def _complete(config: Any, options: MegatronOptions) -> Any:
    """The configuration with what build was told besides."""
    _refuse_fields(config)
    complete = copy.copy(config)
    if options.clip_grad_norm is not None:
        complete.clip_grad = options.clip_grad_norm
    complete.use_distributed_optimizer |= options.distributed_optimizer
    if complete.use_distributed_optimizer and complete.optimizer != "adam":
        raise ValueError(
            "megatron's distributed optimizer is for Adam only, and the OptimizerConfig has "
            f"optimizer={complete.optimizer!r}; change it, or leave out the distributed optimizer"
        )
    for name, dtype in _HALF_FIELDS.items():
        setattr(complete, name, options.half is dtype)
    complete.params_dtype = options.half or torch.float32
    return complete


# Gathered in hooks of modules, which a stage that uses a parameter in its own graph does not call.
_REFUSED = ("overlap_param_gather", "overlap_param_gather_with_optimizer_step")


def _refuse_fields(config: Any) -> None:
    wrong = [name for name in _REFUSED if getattr(config, name)]
    if wrong:
        raise ValueError(
            f"the OptimizerConfig has {wrong}, which needs a call of a module for each parameter, "
            "and stages use some directly; leave it out"
        )
    if config.lr is None:
        raise ValueError("the OptimizerConfig has no learning rate; pass OptimizerConfig(lr=...)")


def make_optimizer(
    options: MegatronOptions,
    model: Any,
    named: Sequence[tuple[str, nn.Parameter]],
    device: torch.device,
) -> Any:
    """Megatron-Core's optimizer for a model under its DDP. A collective of the world.

    Parameters
    ----------
    options
        With an optimizer.
    model
        Megatron-Core's ``DistributedDataParallel``.
    named
        Parameters that are trained, with their names in the model.
    device
        Theirs.
    """
    if isinstance(options.optimizer, Configured):
        return options.optimizer(model)
    assert options.optimizer is not None, "asked before"
    return _drive(make_torch_optimizer(options.optimizer, named, device), options)


def _drive(inner: torch.optim.Optimizer, options: MegatronOptions) -> Any:
    """Megatron-Core's optimizer around one of torch."""
    core, half = megatron_core(), options.half
    config = core.optimizer.OptimizerConfig(
        clip_grad=options.clip_grad_norm or 0.0,
        params_dtype=half or torch.float32,
        # As on the other targets: with the defaults the first 17 steps are left out.
        initial_loss_scale=INITIAL_SCALE,
        hysteresis=1,
        **{name: half is dtype for name, dtype in _HALF_FIELDS.items()},
    )
    if half is None:
        optimizer = core.optimizer.FP32Optimizer(inner, config, _leave)
    else:
        make = core.optimizer.Float16OptimizerWithFloat16Params
        optimizer = make(inner, config, _scaler(config), _leave)
    optimizer.grad_stats_parallel_group = core.parallel_state.get_model_parallel_group()
    optimizer.tp_group = core.parallel_state.get_tensor_model_parallel_group()
    # When a state is loaded it looks for groups of its own making, by entries that torch's lack.
    optimizer._filter_and_reorder_param_groups = lambda present, loaded: loaded
    return optimizer


@torch.no_grad()
def set_masters(optimizer: Any, values: Mapping[nn.Parameter, Tensor]) -> None:
    """Put values in the float32 copies of parameters.

    Parameters
    ----------
    optimizer
        Megatron-Core's.
    values
        Parameter of the model -> its value.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for parameter, value in values.items():
        master = getattr(parameter, "main_param", None)
        if master is None:
            continue
        if getattr(parameter, "main_param_sharded", False):
            (part,) = [p for p in parts if parameter in p.model_param_gbuf_map]
            place = part._get_model_param_range_map(parameter)["param"]
            value = value.flatten()[place.start : place.end]
        master.copy_(value.view(master.shape))


def _leave(*_: Any) -> None:
    """State is created by the first step."""


def _scaler(config: Any) -> Any:
    """Loss scaling as get_megatron_optimizer sets it up; None for bfloat16, which needs none."""
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


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """What one of Megatron-Core drives; None for a stage with nothing to train.

    Raises
    ------
    SlapoError
        If it drives several.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(parts) != 1:
        raise SlapoError(
            f"lr_scheduler: megatron drives {len(parts)} optimizers here, and a scheduler is for "
            "one; step the schedulers of optimizer.chained_optimizers by hand"
        )
    inner: torch.optim.Optimizer | None = parts[0].optimizer
    return inner
