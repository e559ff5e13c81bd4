"""The runtime of target ``"deepspeed"``."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from slapo.framework_dialect.deepspeed import config as configs
from slapo.framework_dialect.deepspeed.config import DeepSpeedOptions
from slapo.framework_dialect.deepspeed.engine import PipeEngine, ZeroEngine
from slapo.framework_dialect.deepspeed.initialize import initialize, mesh_unit, topology_of
from slapo.framework_dialect.deepspeed.load import import_deepspeed
from slapo.framework_dialect.deepspeed.native_api import NativeOptions
from slapo.framework_dialect.options import check_names
from slapo.framework_dialect.replicas import share_over_mesh
from slapo.framework_dialect.runtime import (
    Lowering,
    MeshRuntime,
    check_groups,
    check_installed,
    check_stage_count,
)
from slapo.node import Node


class DeepSpeedRuntime(MeshRuntime):
    """``deepspeed.initialize``, with its ``PipelineModule`` if the schedule cuts stages.

    With ``mesh=``, the engine has the interface of all runtimes, and DeepSpeed's own engine is its
    attribute ``engine``. Without it, ``config=`` (and ``topology=`` for a pipeline) give
    DeepSpeed's own engine and optimizer, for scripts written for DeepSpeed. Options are those of
    :class:`DeepSpeedOptions`.
    """

    def __init__(self, sch: Node, **options: Any) -> None:
        check_installed("deepspeed", "deepspeed", "deepspeed")
        check_names("deepspeed", options, [field.name for field in fields(DeepSpeedOptions)])
        loaded = configs.load(options.get("config"))
        given = {name: value for name, value in options.items() if value is not None}
        given["config"] = loaded
        self.native: NativeOptions | None = None
        if "mesh" not in given:
            self.native = NativeOptions.check(sch, given)
            return
        given.setdefault("dtype", configs.precision_of(loaded))
        checked = DeepSpeedOptions.of("deepspeed", given, sch.mod)
        mesh = checked.mesh
        check_groups(sch, mesh)
        pp, dp, tp = mesh.shape
        layout = configs.Layout(pp, dp, tp, mesh.device_type)
        merged = configs.merge(loaded, {**given, "dtype": checked.dtype}, layout)
        # Entries of the config count as arguments of build.
        self.options = replace(
            checked,
            config=merged,
            micro_batches=merged["gradient_accumulation_steps"],
            clip_grad_norm=merged["gradient_clipping"] or None,
        )
        self.fills_shares = configs.zero_of(merged) == 3

    @property
    def reads_weights(self) -> bool:  # type: ignore[override]
        """True on all ranks of a script without a mesh."""
        return self.native is not None or super().reads_weights

    def described(self) -> dict[str, Any]:
        """Return the options, which must be equal on all ranks."""
        return super().described() if self.native is None else self.native.described()

    def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
        """Return the single stage of this rank."""
        if self.native is not None:
            check_stage_count(n_stages, self.native.layout.pp)
            return (self.native.stage,)
        return super().stages_of_this_rank(n_stages)

    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        native, pipelined = self.native, lowering.n_stages > 1
        options = self.options if native is None else native.on_mesh()
        mesh = options.mesh
        deepspeed = import_deepspeed(mesh.device_type)
        engine: Any = None
        loss_fn: Any = options.loss_fn
        if native is None:
            engine = (PipeEngine if pipelined else ZeroEngine)(lowering, options)
            shared, loss_fn = engine.shared, engine.loss_of_labels
        else:
            shared = share_over_mesh(lowering, mesh, options.sync_replicated)
        if pipelined:
            # This module imports DeepSpeed's pipeline.
            from slapo.framework_dialect.deepspeed.pipe import StagePipeline, StagePipelineEngine

            topology = topology_of(*mesh.shape)
            model = StagePipeline(lowering, topology, loss_fn, shared, keeps_modes=native is None)
            own = StagePipelineEngine.adopt(initialize(deepspeed, lowering, options, model, None))
        else:
            own = initialize(deepspeed, lowering, options, lowering.model, mesh_unit(mesh))
        if engine is not None:
            engine.drive(own)
            return engine, engine.optimizer
        if pipelined:
            own.bind_inputs_of(lowering.pipeline)
        return own, own.optimizer
