"""The runtime ``"deepspeed"``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from slapo.agreement import all_ranks_or_none
from slapo.errors import SlapoError
from slapo.framework_dialect.deepspeed import config as configs
from slapo.framework_dialect.deepspeed.groups import MeshUnit, mark_sharded, topology_of
from slapo.framework_dialect.deepspeed.initialize import check_parameters, initialize
from slapo.framework_dialect.deepspeed.package import check_installed, import_deepspeed
from slapo.framework_dialect.deepspeed.plain import PlainOptions, lower_plain
from slapo.framework_dialect.optimizers import make_optimizer, trainable
from slapo.framework_dialect.options import TrainingOptions, check_names
from slapo.framework_dialect.precision import HALVES, check_traces
from slapo.framework_dialect.replicas import share_over_mesh
from slapo.framework_dialect.runtime import Lowering, Runtime, check_groups, check_stage_count
from slapo.framework_dialect.ties import SharedParameter
from slapo.mesh import current_device
from slapo.node import Node


@dataclass(frozen=True)
class DeepSpeedOptions(TrainingOptions):
    """What ``build(sch, target="deepspeed", ...)`` takes, beside :class:`TrainingOptions`.

    Parameters
    ----------
    config
        DeepSpeed's configuration: a dict, which is not changed, or the path of a JSON file.
        Arguments given to build need not be in it, and must not contradict it.
    zero
        ZeRO stage: 0 to 3, at most 1 with a pipeline. By default 0, and 1 in half precision.
    topology
        DeepSpeed's, such as ``PipeModelDataParallelTopology``; in place of a mesh, to get
        DeepSpeed's own engine.
    """

    config: Mapping[str, Any] | str | Path | None = None
    zero: int | None = None
    topology: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology is not None:
            raise ValueError("deepspeed: mesh= and topology= say the same; pass one of them")
        if self.nonfinite == "error":
            raise ValueError(
                'deepspeed: nonfinite="error" would have to look at gradients that DeepSpeed '
                'shares out before its step; pass "step", or "skip" in half precision'
            )


class DeepSpeedRuntime(Runtime):
    """``deepspeed.initialize``, with its ``PipelineModule`` where the schedule cuts stages.

    With ``mesh=``, the engine has the interface of all runtimes, and DeepSpeed's own is its
    attribute ``engine``. Without, ``config=`` and for a pipeline ``topology=`` give DeepSpeed's own
    engine and optimizer, as scripts written for DeepSpeed expect them. Options are those of
    :class:`DeepSpeedOptions`.
    """

    def __init__(self, sch: Node, **options: Any) -> None:
        check_installed()
        check_names("deepspeed", options, [field.name for field in fields(DeepSpeedOptions)])
        loaded = configs.load(options.get("config"))
        self.plain: PlainOptions | None = None
        if options.get("mesh") is None:
            self.plain = PlainOptions.check(sch, loaded, options)
            return
        given = {name: value for name, value in options.items() if value is not None}
        self.options = DeepSpeedOptions.of("deepspeed", given)
        mesh = self.options.mesh
        check_groups(sch, mesh)
        pp, dp, tp = mesh.shape
        layout = configs.Layout(pp, dp, tp, mesh.device_type)
        self.settings = configs.merge(loaded, given, layout)
        self.options = replace(
            self.options,
            config=self.settings.config,
            micro_batches=self.settings.micro_batches,
            clip_grad_norm=self.settings.clip_grad_norm or None,
            dtype=self.settings.dtype,
        )

    def described(self) -> dict[str, Any]:
        """The options, which must be alike on all ranks."""
        return {} if self.plain is not None else self.options.described()

    def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
        """The one stage of this rank's place in the pipeline."""
        if self.plain is not None:
            check_stage_count(n_stages, self.plain.layout.pp)
            return (self.plain.stage,)
        check_stage_count(n_stages, self.options.mesh.shape[0])
        return (self.options.mesh.get_local_rank("pp"),)

    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        """The engine and DeepSpeed's optimizer."""
        if self.plain is not None:
            return lower_plain(lowering, self.plain)
        mesh = self.options.mesh
        all_ranks_or_none("deepspeed", lambda: self._check(lowering.module))
        shared = share_over_mesh(lowering, mesh, self.options.sync_replicated)
        deepspeed = import_deepspeed(mesh.device_type)
        mark_sharded(lowering.module)
        lower = self._lower_pipeline if lowering.n_stages > 1 else self._lower_whole
        engine = lower(deepspeed, lowering, shared)
        return engine, engine.optimizer

    def _check(self, module: nn.Module) -> None:
        zero = self.settings.zero
        check_parameters(module, zero)
        if zero and self.settings.has_optimizer and not trainable(module):
            raise SlapoError(
                f"deepspeed: no parameter on this rank needs a gradient, and ZeRO stage {zero} "
                "wants at least one on every rank; pass zero=0, or cut the stages so that each "
                "trains something"
            )
        half = self.settings.dtype if self.settings.dtype in HALVES else None
        check_traces(module, half)

    def _lower_whole(
        self, deepspeed: Any, lowering: Lowering, shared: list[SharedParameter]
    ) -> Any:
        from slapo.framework_dialect.deepspeed.engine import ZeroEngine

        engine = ZeroEngine(lowering, self.options, self.settings)
        engine.drive(self._initialize(deepspeed, lowering.model, MeshUnit(self.options.mesh)))
        return engine

    def _lower_pipeline(
        self, deepspeed: Any, lowering: Lowering, shared: list[SharedParameter]
    ) -> Any:
        # Some of these import DeepSpeed, which may be absent until here.
        from slapo.framework_dialect.deepspeed.engine import PipeEngine
        from slapo.framework_dialect.deepspeed.pipe import StagePipelineEngine
        from slapo.framework_dialect.deepspeed.stages import make_pipeline

        engine = PipeEngine(lowering, self.options, self.settings)
        topology = topology_of(self.options.mesh)
        pipeline = make_pipeline(
            lowering, topology, engine.loss_of_labels, shared, keeps_modes=True
        )
        engine.drive(StagePipelineEngine.adopt(self._initialize(deepspeed, pipeline, None)))
        return engine

    def _initialize(self, deepspeed: Any, model: nn.Module, mpu: Any) -> Any:
        optimizer = None
        if self.options.optimizer is not None:
            device = current_device(self.options.mesh)
            optimizer = make_optimizer(self.options.optimizer, trainable(model), device)
        return initialize(
            deepspeed,
            model,
            self.settings.config,
            optimizer=optimizer,
            lr_scheduler=self.options.lr_scheduler,
            mpu=mpu,
            dp_group=self.options.mesh.get_group("dp"),
        )
