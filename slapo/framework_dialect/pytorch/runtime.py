"""The runtime of target ``"torch"``."""

from __future__ import annotations

from typing import Any

from slapo.framework_dialect.pytorch.options import TorchOptions
from slapo.framework_dialect.runtime import Lowering, MeshRuntime, check_groups
from slapo.node import Node


class TorchRuntime(MeshRuntime):
    """PyTorch's own engine: ``torch.distributed.pipelining``, DDP and FSDP2.

    Options are those of :class:`TorchOptions`.
    """

    def __init__(self, sch: Node, **options: Any) -> None:
        self.options = TorchOptions.of("torch", options, sch.mod)
        check_groups(sch, self.options.mesh)
        self.fills_shares = self.options.data_parallel == "fsdp"

    @property
    def reads_weights(self) -> bool:  # type: ignore[override]
        """With FSDP2 every rank reads its own shards; otherwise the first replica reads for all."""
        return self.fills_shares or super().reads_weights

    def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
        if n_stages == 1:
            return super().stages_of_this_rank(1)
        options = self.options
        pp = options.mesh.shape[0]
        options.schedule.check(options.pipeline_schedule, n_stages, pp, options.micro_batches)
        return options.schedule.stages_of(options.mesh.get_local_rank("pp"), n_stages, pp)

    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        # torch.distributed.pipelining and fsdp take two seconds to import.
        from slapo.framework_dialect.pytorch.engine import TorchEngine
        from slapo.framework_dialect.pytorch.pipeline import TorchPipelineEngine

        cls = TorchPipelineEngine if lowering.stages else TorchEngine
        engine = cls(lowering, self.options)
        return engine, engine.optimizer
