"""Options of the target ``"torch"``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from slapo.framework_dialect.options import Rule, TrainingOptions, is_whole, one_of
from slapo.framework_dialect.precision import HALVES
from slapo.framework_dialect.pytorch.placement import SCHEDULES, PipelineSchedule


@dataclass(frozen=True)
class TorchOptions(TrainingOptions):
    """Arguments of ``build(sch, target="torch", ...)``, in addition to :class:`TrainingOptions`.

    Parameters
    ----------
    pipeline_schedule
        ``"1f1b"``, ``"gpipe"``, ``"interleaved_1f1b"``, ``"zero_bubble"`` or ``"zbv"``.
    data_parallel
        ``"ddp"``: parameters are replicated. ``"fsdp"``: they are sharded by FSDP2.
    shard_size
        With ``"fsdp"``: number of adjacent data-parallel ranks that shard the parameters; groups
        of these are replicas (HSDP). None: all data-parallel ranks.
    data_parallel_options
        Options of ``DistributedDataParallel`` or ``fully_shard``.
    autocast
        Dtype of ``torch.autocast`` around the model and the loss; parameters keep their dtype.
    compile
        ``True``, or options of ``torch.compile``: the model, or each of its stages, is compiled.
    """

    pipeline_schedule: str = "1f1b"
    data_parallel: str = "ddp"
    shard_size: int | None = None
    data_parallel_options: Mapping[str, Any] | None = None
    autocast: torch.dtype | None = None
    compile: bool | Mapping[str, Any] = False

    rules: ClassVar[dict[str, Rule]] = {
        **TrainingOptions.rules,
        "pipeline_schedule": one_of(*SCHEDULES),
        "data_parallel": one_of("ddp", "fsdp"),
        "shard_size": Rule(lambda v: v is None or is_whole(v), "a whole number, or None"),
        "autocast": one_of(*HALVES, None),
        "compile": Rule(
            lambda v: isinstance(v, (bool, Mapping)), "True or options of torch.compile", TypeError
        ),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.autocast is not None and self.half is not None:
            raise ValueError(
                f"autocast={self.autocast} needs a torch.float32 model, but this one computes in "
                f"{self.half} (from dtype=, or as it was loaded); leave out autocast"
            )
        size, dp = self.shard_size, self.mesh.shape[1]
        if size is not None and self.data_parallel != "fsdp":
            raise ValueError(f'shard_size={size} needs data_parallel="fsdp"; pass that too')
        if size is not None and dp % size:
            raise ValueError(f"shard_size is {size}; pass a divisor of the mesh's dp={dp}")

    @property
    def schedule(self) -> PipelineSchedule:
        """Order of micro-batches in a pipeline."""
        return SCHEDULES[self.pipeline_schedule]
