"""The runtime's front: options checked before anything starts."""

from __future__ import annotations

from typing import Any

from slapo.framework_dialect.agreement import same_on_all_ranks
from slapo.framework_dialect.megatron.groups import initialize_groups
from slapo.framework_dialect.megatron.optimizers import resolve
from slapo.framework_dialect.megatron.package import check_device, check_installed
from slapo.framework_dialect.runtime import Lowering, Runtime, check_groups, check_stage_count
from slapo.mesh import check_mesh, coordinate, extent
from slapo.node import Node

# Ranks that differ in one of these wait for each other, or train different models.
_ALIKE = (
    "micro_batches",
    "clip_grad_norm",
    "dtype",
    "distributed_optimizer",
    "overlap_grad_reduce",
    "data_parallel_options",
    "check_batches",
)


class MegatronRuntime(Runtime):
    """Megatron-Core: its process groups, 1F1B schedule, DDP and optimizers. It needs CUDA.

    Options are those of :class:`slapo.framework_dialect.megatron.options.MegatronOptions`.
    """

    def __init__(self, sch: Node, **options: Any) -> None:
        check_installed()
        if "mesh" not in options:
            raise TypeError(
                "target 'megatron' needs mesh=; pass slapo.init_mesh(pp=, dp=, tp=), also for one "
                "process"
            )
        check_mesh(options["mesh"])
        check_device(options["mesh"])
        check_groups(sch, options["mesh"])
        self.options = resolve(options)

    def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
        """The one stage of this rank's place in the pipeline."""
        check_stage_count(n_stages, extent(self.options.mesh, "pp"))
        return (coordinate(self.options.mesh, "pp"),)

    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        """The engine and Megatron-Core's optimizer."""
        # torch's fsdp, which it imports for a helper beside, takes two seconds.
        from slapo.framework_dialect.megatron.engine import MegatronEngine

        chosen = {name: getattr(self.options, name) for name in _ALIKE}
        same_on_all_ranks("megatron: options", chosen)
        initialize_groups(self.options.mesh)
        engine = MegatronEngine(lowering, self.options)
        return engine, engine.optimizer
