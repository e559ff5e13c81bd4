"""Options of the target ``"megatron"``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slapo.framework_dialect.options import TrainingOptions

#: Fields of Megatron-Core's ``DistributedDataParallelConfig`` that may be given.
DATA_PARALLEL_FIELDS = (
    "average_in_collective",
    "bucket_size",
    "grad_reduce_in_fp32",
    "pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation",
)


@dataclass(frozen=True)
class MegatronOptions(TrainingOptions):
    """What ``build(sch, target="megatron", ...)`` takes, beside :class:`TrainingOptions`.

    Parameters
    ----------
    optimizer
        Either ``megatron.core.optimizer.OptimizerConfig``, for Megatron-Core's own optimizers, or
        a callable from a list of parameters to a torch optimizer, which Megatron-Core's
        ``FP32Optimizer``, or in half precision ``Float16OptimizerWithFloat16Params``, then drives.
    clip_grad_norm
        With an ``OptimizerConfig``, None leaves its ``clip_grad``, which is 1.0 by default.
    lr_scheduler
        ``lr_scheduler(optimizer)`` gets the torch optimizer inside of Megatron-Core's.
    distributed_optimizer
        Share out the optimizer's state over the data-parallel ranks; with an ``OptimizerConfig`` of
        Adam only.
    overlap_grad_reduce
        Reduce gradients while backward goes on. All parameters must have one in every backward.
    data_parallel_options
        Fields of Megatron-Core's ``DistributedDataParallelConfig``: those in
        `DATA_PARALLEL_FIELDS`.
    """

    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    data_parallel_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = sorted(set(self.data_parallel_options or ()) - set(DATA_PARALLEL_FIELDS))
        if unknown:
            raise ValueError(
                f"data_parallel_options has {unknown}; target 'megatron' takes "
                f"{list(DATA_PARALLEL_FIELDS)}, and overlap_grad_reduce= and "
                "distributed_optimizer= as arguments of build"
            )
