"""Options of the target ``"megatron"``; an ``OptimizerConfig`` may set some of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from slapo.framework_dialect.megatron.load import megatron_core
from slapo.framework_dialect.options import FLAG, Rule, TrainingOptions, check_names
from slapo.framework_dialect.precision import HALF_NAMES

#: Fields of Megatron-Core's ``DistributedDataParallelConfig`` that users may set.
DATA_PARALLEL_FIELDS = (
    "average_in_collective",
    "bucket_size",
    "grad_reduce_in_fp32",
    "pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation",
)

# These gather in module hooks, which do not run if a stage uses a parameter in its own graph.
_REFUSED_FIELDS = ("overlap_param_gather", "overlap_param_gather_with_optimizer_step")


@dataclass(frozen=True)
class MegatronOptions(TrainingOptions):
    """Arguments of ``build(sch, target="megatron", ...)``, in addition to :class:`TrainingOptions`.

    Parameters
    ----------
    optimizer
        A ``megatron.core.optimizer.OptimizerConfig`` selects Megatron-Core's own optimizers. A
        callable from a list of parameters to a torch optimizer is driven by Megatron-Core's
        ``FP32Optimizer``, or by ``Float16OptimizerWithFloat16Params`` in half precision.
    clip_grad_norm
        With an ``OptimizerConfig``, None keeps its ``clip_grad``, which is 1.0 by default.
    lr_scheduler
        ``lr_scheduler(optimizer)`` gets the torch optimizer inside Megatron-Core's.
    distributed_optimizer
        Shard the optimizer's state over the data-parallel ranks; only with an ``OptimizerConfig``
        of Adam.
    overlap_grad_reduce
        Reduce gradients during backward. All parameters must have one in every backward.
    data_parallel_options
        Fields of Megatron-Core's ``DistributedDataParallelConfig``, from `DATA_PARALLEL_FIELDS`.
    """

    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    data_parallel_options: Mapping[str, Any] | None = None

    rules: ClassVar[dict[str, Rule]] = {
        **TrainingOptions.rules,
        "distributed_optimizer": FLAG,
        "overlap_grad_reduce": FLAG,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.data_parallel_options or {}
        check_names("megatron: data_parallel_options", given, DATA_PARALLEL_FIELDS)


@dataclass(frozen=True)
class Configured:
    """Megatron-Core's own optimizer, described by a complete configuration."""

    config: Any

    def __call__(self, model: Any) -> Any:
        """Create the optimizer of a model under Megatron-Core's DDP."""
        make = megatron_core().optimizer.get_megatron_optimizer
        return make(self.config, [model], use_gloo_process_groups=False)


def resolve(options: Mapping[str, Any], model: nn.Module) -> MegatronOptions:
    """Return the options of build for a model, some of which an ``OptimizerConfig`` may set."""
    given = dict(options)
    config = given.get("optimizer")
    if not isinstance(config, megatron_core().optimizer.OptimizerConfig):
        checked = MegatronOptions.of("megatron", given, model)
        if checked.distributed_optimizer:
            name = getattr(config, "__name__", None) or type(config).__name__
            raise ValueError(
                "distributed_optimizer=True shards the state of Megatron-Core's own Adam; pass "
                f"optimizer=megatron.core.optimizer.OptimizerConfig(...) instead of {name}, or "
                "leave it out"
            )
        return checked
    half = next((half for name, half in HALF_NAMES.items() if getattr(config, name)), None)
    if half is not None and given.get("dtype") not in (None, half):
        raise ValueError(
            f"the OptimizerConfig is for {half}, but dtype is {given['dtype']}; pass one of them"
        )
    given["dtype"] = half or given.get("dtype")
    # Wrapped in a callable, since the options are validated as on other targets.
    checked = MegatronOptions.of("megatron", {**given, "optimizer": Configured(config)}, model)
    complete = _complete(config, checked)
    return replace(
        checked,
        optimizer=Configured(complete),
        distributed_optimizer=complete.use_distributed_optimizer,
        clip_grad_norm=complete.clip_grad or None,
    )


def _complete(config: Any, options: MegatronOptions) -> Any:
    """Merge the arguments of build into the configuration."""
    wrong = [name for name in _REFUSED_FIELDS if getattr(config, name)]
    if wrong:
        raise ValueError(
            f"the OptimizerConfig has {wrong}, which needs every parameter's module to be "
            "called, but stages use some directly; leave it out"
        )
    if config.lr is None:
        raise ValueError("the OptimizerConfig has no learning rate; pass OptimizerConfig(lr=...)")
    complete = copy.copy(config)
    if options.clip_grad_norm is not None:
        complete.clip_grad = options.clip_grad_norm
    complete.use_distributed_optimizer |= options.distributed_optimizer
    if complete.use_distributed_optimizer and complete.optimizer != "adam":
        raise ValueError(
            "megatron's distributed optimizer supports only Adam, but the OptimizerConfig has "
            f"optimizer={complete.optimizer!r}; change it, or leave out the distributed optimizer"
        )
    for name, dtype in HALF_NAMES.items():
        setattr(complete, name, options.half is dtype)
    complete.params_dtype = options.half or torch.float32
    return complete
