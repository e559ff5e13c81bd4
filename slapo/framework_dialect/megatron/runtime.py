"""The runtime of target ``"megatron"``."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from slapo.framework_dialect.megatron.load import check_device, initialize_groups
from slapo.framework_dialect.megatron.options import resolve
from slapo.framework_dialect.runtime import (
    Lowering,
    MeshRuntime,
    check_groups,
    check_installed,
)
from slapo.node import Node


class MegatronRuntime(MeshRuntime):
    """Megatron-Core: its process groups, 1F1B schedule, DDP and optimizers. Requires CUDA.

    Options are those of :class:`slapo.framework_dialect.megatron.options.MegatronOptions`.
    """

    def __init__(self, sch: Node, **options: Any) -> None:
        check_installed("megatron", "megatron.core", "megatron-core")
        if isinstance(options.get("mesh"), DeviceMesh):
            check_device(options["mesh"])
        self.options = resolve(options, sch.mod)
        check_groups(sch, self.options.mesh)

    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        # It imports torch's fsdp for a helper, which takes two seconds.
        from slapo.framework_dialect.megatron.engine import MegatronEngine

        initialize_groups(self.options.mesh)
        engine = MegatronEngine(lowering, self.options)
        return engine, engine.optimizer
