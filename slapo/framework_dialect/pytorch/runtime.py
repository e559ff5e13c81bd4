"""The runtime's front: options checked before anything starts."""

from __future__ import annotations

from typing import Any

from slapo.framework_dialect.pytorch.options import TorchOptions
from slapo.framework_dialect.pytorch.placement import schedule_named
from slapo.framework_dialect.runtime import Lowering, Runtime, check_groups, check_stage_count
from slapo.mesh import coordinate, extent
from slapo.node import Node


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
        if n_stages == 1:
            check_stage_count(1, extent(options.mesh, "pp"))
            return (0,)
        schedule = schedule_named(options.pipeline_schedule)
        pp = extent(options.mesh, "pp")
        schedule.check(options.pipeline_schedule, n_stages, pp, options.micro_batches)
        return schedule.stages_of(coordinate(options.mesh, "pp"), n_stages, pp)

    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        """The engine and the optimizer."""
        # torch.distributed.pipelining and fsdp take two seconds to import.
        from slapo.framework_dialect.pytorch.engine import TorchEngine
        from slapo.framework_dialect.pytorch.pipeline import TorchPipelineEngine

        cls = TorchPipelineEngine if lowering.stages else TorchEngine
        engine = cls(lowering, self.options)
        return engine, engine.optimizer
