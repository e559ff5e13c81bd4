"""Options of the target ``"torch"``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slapo.framework_dialect.options import TrainingOptions
from slapo.framework_dialect.precision import HALVES
from slapo.framework_dialect.pytorch.placement import schedule_named

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
    shard_size
        With ``"fsdp"``: the number of neighbouring data-parallel ranks that share out the
        parameters, and of which there are replicas (HSDP). None: all of them.
    data_parallel_options
        For ``DistributedDataParallel`` or ``fully_shard``.
    autocast
        A dtype for ``torch.autocast`` around the model and the loss; parameters stay as they are.
    compile
        ``True``, or options of ``torch.compile``: the model, or each stage of it, is compiled.
    """

    pipeline_schedule: str = "1f1b"
    data_parallel: str = "ddp"
    shard_size: int | None = None
    data_parallel_options: Mapping[str, Any] | None = None
    autocast: torch.dtype | None = None
    compile: bool | Mapping[str, Any] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule_named(self.pipeline_schedule)
        if self.data_parallel not in DATA_PARALLEL:
            raise ValueError(
                f"data_parallel is {self.data_parallel!r}; known are {list(DATA_PARALLEL)}"
            )
        if not isinstance(self.compile, (bool, Mapping)):
            raise TypeError(f"compile is {self.compile!r}; pass True or options of torch.compile")
        if self.autocast not in (None, *HALVES):
            raise ValueError(
                f"autocast is {self.autocast!r}; pass torch.bfloat16, torch.float16 or None"
            )
        if self.autocast is not None and self.half is not None:
            raise ValueError(
                f"autocast={self.autocast} is for a model of torch.float32, and this one computes "
                f"in {self.half} (by dtype=, or as it was loaded); leave out autocast"
            )
        self._check_shard_size()

    def _check_shard_size(self) -> None:
        size, dp = self.shard_size, self.mesh.shape[1]
        if size is None:
            return
        if self.data_parallel != "fsdp":
            raise ValueError(f'shard_size={size} goes with data_parallel="fsdp"; pass that too')
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or dp % size:
            raise ValueError(f"shard_size is {size!r}; pass a divisor of the mesh's dp={dp}")
