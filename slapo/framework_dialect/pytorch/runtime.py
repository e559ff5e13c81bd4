"""The runtime's front: options checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slapo.framework_dialect.pytorch.placement import schedule_named
from slapo.framework_dialect.registry import register_framework_dialect
from slapo.framework_dialect.runtime import Lowering, Runtime, TrainingOptions, check_groups, check_stage_count
from slapo.mesh import coordinate, extent
from slapo.node import Node

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


@register_framework_dialect("torch")
class TorchRuntime(Runtime):
    """PyTorch's own engine: ``torch.distributed.pipelining``, DDP and FSDP2.

    Options are those of :class:`TorchOptions`.
    """

    def __init__(self, sch: Node, **options: Any) -> None:
        if "mesh" not in options:
            raise TypeError(
                "target 'torch' needs mesh=; pass slapo.init_mesh(pp=, dp=, tp=), also for one "
                "process"
            )
        self.options = TorchOptions(**options)
        check_groups(sch, self.options.mesh)

    def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
        """As the pipeline schedule places them."""
        options = self.options
        schedule = schedule_named(options.pipeline_schedule)
        pp = extent(options.mesh, "pp")
        schedule.check(options.pipeline_schedule, n_stages, pp, options.micro_batches)
        return schedule.stages_of(coordinate(options.mesh, "pp"), n_stages, pp)

    def check_unpipelined(self) -> None:
        """One rank along pp runs the whole model."""
        check_stage_count(1, extent(self.options.mesh, "pp"))

    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        """The engine and the optimizer."""
        # torch.distributed.pipelining and fsdp take two seconds to import.
        from slapo.framework_dialect.pytorch.engine import TorchEngine
        from slapo.framework_dialect.pytorch.pipeline import TorchPipelineEngine

        cls = TorchPipelineEngine if lowering.stages else TorchEngine
        engine = cls(lowering, self.options)
        return engine, engine.optimizer
