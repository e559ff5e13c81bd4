"""The runtime ``"deepspeed"``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.framework_dialect.agreement import all_ranks_or_none, same_on_all_ranks
from slapo.framework_dialect.deepspeed import config as configs
from slapo.framework_dialect.deepspeed.groups import MeshUnit, mark_sharded, topology_of
from slapo.framework_dialect.deepspeed.initialize import (
    check_parameters,
    initialize,
    make_optimizer,
)
from slapo.framework_dialect.deepspeed.package import check_installed, import_deepspeed
from slapo.framework_dialect.deepspeed.plain import PlainOptions, lower_plain
from slapo.framework_dialect.runtime import (
    WATCH_SECONDS,
    LossFn,
    Lowering,
    Runtime,
    TrainingOptions,
    check_groups,
    check_stage_count,
)
from slapo.mesh import coordinate, extent, group_of
from slapo.node import Node


class DeepSpeedRuntime(Runtime):
    """``deepspeed.initialize``, with its ``PipelineModule`` where the schedule cuts stages.

    With ``mesh=``, the engine has the interface of all runtimes, and DeepSpeed's own is its
    attribute ``engine``. Without, ``config=`` and for a pipeline ``topology=`` give DeepSpeed's own
    engine and optimizer, as scripts written for DeepSpeed expect them.

    Parameters
    ----------
    sch
        The root schedule.
    mesh
        What :func:`slapo.init_mesh` returns.
    topology
        DeepSpeed's, such as ``PipeModelDataParallelTopology``; instead of `mesh`.
    config
        DeepSpeed's configuration: a dict, which is not changed, or the path of a JSON file.
        Arguments given here need not be in it, and must not contradict it.
    loss_fn
        ``loss_fn(output, targets)``: the mean loss of a micro-batch.
    optimizer
        Callable from a list of parameters to a torch optimizer. None if the config has one.
    micro_batches
        Number of micro-batches of a batch; 1 unless the config says otherwise.
    zero
        ZeRO stage: 0 to 3, at most 1 with a pipeline. By default 0, and 1 in half precision.
    dtype
        ``torch.float32``, ``torch.bfloat16`` or, on accelerators, ``torch.float16``.
    clip_grad_norm
        Largest norm of the whole gradient.
    lr_scheduler
        Callable from the optimizer to a learning-rate scheduler.
    watch, check_batches
        See :class:`slapo.framework_dialect.runtime.TrainingOptions`.
    """

    def __init__(
        self,
        sch: Node,
        *,
        mesh: DeviceMesh | None = None,
        topology: Any = None,
        config: Mapping[str, Any] | str | Path | None = None,
        loss_fn: LossFn | None = None,
        optimizer: Any = None,
        micro_batches: int | None = None,
        zero: int | None = None,
        dtype: torch.dtype | None = None,
        clip_grad_norm: float | None = None,
        lr_scheduler: Any = None,
        watch: float | None = WATCH_SECONDS,
        check_batches: bool = True,
    ) -> None:
        check_installed()
        self.mesh, self.optimizer, self.lr_scheduler = mesh, optimizer, lr_scheduler
        loaded = configs.load(config)
        request = configs.Request(
            *(micro_batches, zero, dtype, clip_grad_norm),
            has_optimizer=optimizer is not None,
            has_lr_scheduler=lr_scheduler is not None,
        )
        if mesh is None:
            self.loss_fn = loss_fn
            self.plain = PlainOptions.check(sch, topology, loaded, request, loss_fn)
            return
        if topology is not None:
            raise ValueError("deepspeed: mesh= and topology= say the same; pass one of them")
        self.options = TrainingOptions(
            *(mesh, loss_fn, optimizer, micro_batches or 1, clip_grad_norm, lr_scheduler),
            watch=watch,
            check_batches=check_batches,
        )
        check_groups(sch, mesh)
        self.settings = configs.merge(loaded, request, _layout(mesh))
        self.options = replace(self.options, micro_batches=self.settings.micro_batches)

    def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
        """The one stage of this rank's place in the pipeline."""
        pp = self.plain.layout.pp if self.mesh is None else extent(self.mesh, "pp")
        check_stage_count(n_stages, pp)
        return (self.plain.stage if self.mesh is None else coordinate(self.mesh, "pp"),)

    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        """The engine and DeepSpeed's optimizer."""
        if self.mesh is None:
            return lower_plain(
                lowering, self.plain, self.loss_fn, self.optimizer, self.lr_scheduler
            )
        all_ranks_or_none("deepspeed", lambda: check_parameters(lowering.module, self.settings))
        same_on_all_ranks("deepspeed: the config", self.settings.config)
        deepspeed = import_deepspeed(self.mesh.device_type)
        mark_sharded(lowering.module)
        lower = self._lower_pipeline if lowering.n_stages > 1 else self._lower_whole
        engine = lower(deepspeed, lowering, self.mesh)
        return engine, engine.optimizer

    def _lower_whole(self, deepspeed: Any, lowering: Lowering, mesh: DeviceMesh) -> Any:
        from slapo.framework_dialect.deepspeed.engine import ZeroEngine

        engine = self._initialize(deepspeed, lowering.model, MeshUnit(mesh), mesh)
        return ZeroEngine(engine, lowering, self.options, self.settings)

    def _lower_pipeline(self, deepspeed: Any, lowering: Lowering, mesh: DeviceMesh) -> Any:
        # Some of these import DeepSpeed, which may be absent until here.
        from slapo.framework_dialect.deepspeed.engine import PipeEngine, loss_of_labels
        from slapo.framework_dialect.deepspeed.pipe import StagePipelineEngine
        from slapo.framework_dialect.deepspeed.stages import make_pipeline

        assert self.options.loss_fn is not None, "checked"
        pipeline = make_pipeline(
            lowering, topology_of(mesh), loss_of_labels(self.options.loss_fn), keeps_modes=True
        )
        engine = StagePipelineEngine.adopt(self._initialize(deepspeed, pipeline, None, mesh))
        return PipeEngine(engine, lowering, self.options, self.settings)

    def _initialize(self, deepspeed: Any, model: nn.Module, mpu: Any, mesh: DeviceMesh) -> Any:
        wants_optimizer = self.settings.has_optimizer
        return initialize(
            deepspeed,
            model,
            self.settings.config,
            optimizer=make_optimizer(self.optimizer, model) if wants_optimizer else None,
            lr_scheduler=self.lr_scheduler,
            mpu=mpu,
            dp_group=group_of(mesh, "dp"),
        )


def _layout(mesh: DeviceMesh) -> configs.Layout:
    pp, dp, tp = (extent(mesh, dim) for dim in ("pp", "dp", "tp"))
    return configs.Layout(pp, dp, tp, mesh.device_type)
