"""The target ``"deepspeed"``: its options, validated before anything starts, and its runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slapo.framework_dialect.deepspeed import config as configs
from slapo.framework_dialect.deepspeed.engine import PipeEngine, ZeroEngine
from slapo.framework_dialect.deepspeed.initialize import initialize, mesh_unit, topology_of
from slapo.framework_dialect.deepspeed.load import import_deepspeed
from slapo.framework_dialect.deepspeed.native_api import PlainOptions, lower_plain
from slapo.framework_dialect.deepspeed.shares import Shares
from slapo.framework_dialect.optimizers import make_optimizer, place_steps
from slapo.framework_dialect.options import TrainingOptions, check_names
from slapo.framework_dialect.runtime import (
    Lowering,
    MeshRuntime,
    check_groups,
    check_installed,
    check_stage_count,
)
from slapo.mesh import current_device
from slapo.node import Node


@dataclass(frozen=True)
class DeepSpeedOptions(TrainingOptions):
    """Arguments of ``build(sch, target="deepspeed")``, in addition to :class:`TrainingOptions`.

    Parameters
    ----------
    config
        DeepSpeed's configuration: a dict, which is not modified, or the path of a JSON file.
        Arguments of build may be left out of it, and must not contradict it.
    zero
        ZeRO stage: 0 to 3, at most 1 with a pipeline. The default is 0, or 1 in half precision.
    topology
        DeepSpeed's, such as ``PipeModelDataParallelTopology``; instead of a mesh, to get
        DeepSpeed's own engine.
    """

    config: Mapping[str, Any] | str | Path | None = None
    zero: int | None = None
    topology: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology is not None:
            raise ValueError("deepspeed: mesh= and topology= are alternatives; pass one of them")

    def _has_optimizer(self) -> bool:
        config = self.config if isinstance(self.config, Mapping) else {}
        return super()._has_optimizer() or config.get("optimizer") is not None


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
        self.plain: PlainOptions | None = None
        if options.get("mesh") is None:
            self.plain = PlainOptions.check(sch, loaded, options)
            return
        given = {name: value for name, value in options.items() if value is not None}
        given["config"] = loaded
        given.setdefault("dtype", configs.precision_of(loaded))
        self.options = DeepSpeedOptions.of("deepspeed", given, sch.mod)
        mesh = self.options.mesh
        check_groups(sch, mesh)
        pp, dp, tp = mesh.shape
        layout = configs.Layout(pp, dp, tp, mesh.device_type)
        given["dtype"] = self.options.dtype
        self.settings = configs.merge(loaded, given, layout)
        self.options = replace(
            self.options,
            config=self.settings.config,
            micro_batches=self.settings.micro_batches,
            clip_grad_norm=self.settings.clip_grad_norm or None,
        )
        self.fills_shares = self.settings.zero == 3

    def described(self) -> dict[str, Any]:
        """Return the options, which must be equal on all ranks."""
        return super().described() if self.plain is None else self.plain.described()

    def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
        """Return the single stage of this rank."""
        if self.plain is not None:
            check_stage_count(n_stages, self.plain.layout.pp)
            return (self.plain.stage,)
        return super().stages_of_this_rank(n_stages)

    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        if self.plain is not None:
            return lower_plain(lowering, self.plain)
        mesh = self.options.mesh
        deepspeed = import_deepspeed(mesh.device_type)
        engine: Any
        if lowering.n_stages == 1:
            engine = ZeroEngine(lowering, self.options, self.settings)
            engine.drive(self._initialize(deepspeed, lowering, lowering.model, mesh_unit(mesh)))
            return engine, engine.optimizer
        # This module imports DeepSpeed's pipeline.
        from slapo.framework_dialect.deepspeed.pipe import StagePipeline, StagePipelineEngine

        engine = PipeEngine(lowering, self.options, self.settings)
        pipeline = StagePipeline(
            lowering,
            topology_of(*mesh.shape),
            engine.loss_of_labels,
            engine.shared,
            keeps_modes=True,
        )
        made = self._initialize(deepspeed, lowering, pipeline, None)
        engine.drive(StagePipelineEngine.adopt(made))
        return engine, engine.optimizer

    def _initialize(self, deepspeed: Any, lowering: Lowering, model: nn.Module, mpu: Any) -> Any:
        optimizer = None
        half = self.options.half
        shares = Shares(self.settings.config, mpu, self.options.mesh, half)
        if lowering.fill is not None:
            lowering.fill(shares=shares)
            shares.divide([p for p in model.parameters() if not hasattr(p, "ds_id")])
        if self.options.optimizer is not None:
            device = current_device(self.options.mesh)
            optimizer = make_optimizer(self.options.optimizer, lowering.trainable(), device)
            flat = configs.flat_parameters(self.settings.config)
            place_steps(optimizer, lowering, lambda: lowering.tp_group, flat)
        exact: dict[nn.Parameter, Tensor] = {}
        if half is not None and optimizer is not None:
            trained = (p for p in model.parameters() if p.requires_grad)
            exact = {p: p.detach().float() for p in trained if not hasattr(p, "ds_id")}
        engine = initialize(
            deepspeed,
            model,
            self.settings.config,
            optimizer=optimizer,
            lr_scheduler=self.options.lr_scheduler,
            mpu=mpu,
            dp_group=self.options.mesh.get_group("dp"),
        )
        # DeepSpeed has created the optimizer's float32 parameters from rounded values.
        if optimizer is not None:
            shares.put_exact(model)
        if exact:
            from deepspeed.utils import safe_set_full_fp32_param  # optional package

            for parameter, value in exact.items():
                safe_set_full_fp32_param(parameter, value)
        return engine
