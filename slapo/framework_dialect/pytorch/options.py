"""Options of the target ``"torch"``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slapo.framework_dialect.pytorch.placement import schedule_named
from slapo.framework_dialect.runtime import TrainingOptions

DATA_PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True)
class TorchOptions(TrainingOptions):
    """What ``build(sch, target="torch", ...)`` takes, beside :class:`TrainingOptions`.

    Parameters
    ----------
    pipeline_schedule
        ``"1f1b"``, ``"gpipe"``, ``"interleaved_1f1b"``, ``"zero_bubble"`` or ``"zbv"``.
    data_parallel
        ``"ddp"``: every rank holds all parameters. ``"fsdp"``: FSDP2, each holds a share.
    data_parallel_options
        For ``DistributedDataParallel`` or ``fully_shard``.
    dtype
        ``torch.bfloat16``: matrix products and the like run in it (``torch.autocast``), parameters
        and the optimizer stay as they are. None: as the model is.
    """

    pipeline_schedule: str = "1f1b"
    data_parallel: str = "ddp"
    data_parallel_options: Mapping[str, Any] | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule_named(self.pipeline_schedule)
        if self.data_parallel not in DATA_PARALLEL:
            raise ValueError(
                f"data_parallel is {self.data_parallel!r}; known are {list(DATA_PARALLEL)}"
            )
        if self.dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(
                f"dtype is {self.dtype}; target 'torch' takes None, torch.float32 and "
                "torch.bfloat16. For torch.float16, which needs loss scaling, use 'deepspeed'"
            )

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of ``torch.autocast``; None for none."""
        return None if self.dtype is torch.float32 else self.dtype
