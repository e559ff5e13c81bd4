"""The way of scripts that are written for DeepSpeed: its config and topology in, its engine out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo.errors import SlapoError
from slapo.framework_dialect.deepspeed import config as configs
from slapo.framework_dialect.deepspeed.groups import mark_sharded
from slapo.framework_dialect.deepspeed.initialize import initialize
from slapo.framework_dialect.deepspeed.load import import_deepspeed, quiet
from slapo.framework_dialect.gradients import is_tensor_parallel
from slapo.framework_dialect.optimizers import make_optimizer
from slapo.framework_dialect.options import check_flag
from slapo.framework_dialect.replicas import share_values
from slapo.framework_dialect.runtime import Lowering
from slapo.framework_dialect.ties import shared_parameters
from slapo.mesh import device_of_world
from slapo.utils.calls import as_call


@dataclass(frozen=True)
class PlainOptions:
    """What a script passes, checked.

    Parameters
    ----------
    topology
        The user's; None to arrange data and tensor parallelism alone.
    config
        Its own copy.
    layout
        Ranks along each dimension.
    stage
        Number of this rank's pipeline stage.
    loss_fn, optimizer, lr_scheduler
        As ``deepspeed.initialize`` and ``PipelineModule`` take them.
    sync_replicated
        Whether replicas take the first one's values.
    """

    topology: Any
    config: configs.Config
    layout: configs.Layout
    stage: int
    loss_fn: Any
    optimizer: Any
    lr_scheduler: Any
    sync_replicated: bool = False

    def described(self) -> dict[str, Any]:
        """What must be alike on all ranks."""
        return {"config": self.config, "sync_replicated": self.sync_replicated}

    @classmethod
    def check(cls, sch: Any, config: configs.Config, given: Mapping[str, Any]) -> PlainOptions:
        """Refuse what cannot work.

        Parameters
        ----------
        sch
            The root schedule.
        config
            The user's, loaded.
        given
            Arguments of build by name.

        Raises
        ------
        ValueError
            If an argument is missing, goes with ``mesh=`` only, or does not fit the processes.
        SlapoError
            If ``torch.distributed`` is not up.
        """
        _check_arguments(config, given)
        topology, loss_fn = given.get("topology"), given.get("loss_fn")
        if not (dist.is_available() and dist.is_initialized()):
            raise SlapoError(
                "deepspeed: torch.distributed is not initialised; call "
                "deepspeed.init_distributed() before the schedule is created"
            )
        layout = _layout(sch, topology)
        if layout.pp > 1 and loss_fn is None:
            raise ValueError(
                f"deepspeed: the topology has pipe={layout.pp}, and loss_fn is missing; a pipeline "
                "computes the loss in its last stage: pass loss_fn=, from (output, labels)"
            )
        _check_config(config, layout)
        configs.fix_entries(config, layout)
        configs.use_torch_adam(config, layout.device)
        place = topology.get_coord(dist.get_rank()) if topology is not None else None
        others = (loss_fn, given.get("optimizer"), given.get("lr_scheduler"))
        sync = given.get("sync_replicated") or False
        return cls(topology, config, layout, getattr(place, "pipe", 0), *others, sync)


def lower_plain(lowering: Lowering, options: PlainOptions) -> tuple[Any, Any]:
    """DeepSpeed's own engine and optimizer.

    Parameters
    ----------
    lowering
        The checked and materialised model.
    options
        Of the script.
    """
    deepspeed = import_deepspeed(options.layout.device)
    mark_sharded(lowering.model)
    columns: list[list[int]] = []
    if lowering.n_stages > 1:
        columns = options.topology.get_axis_comm_lists("pipe")
    shared = shared_parameters(lowering, columns)
    if lowering.n_stages > 1:
        from slapo.framework_dialect.deepspeed.pipe import StagePipeline  # imports DeepSpeed

        model: Any = StagePipeline(lowering, options.topology, options.loss_fn, shared)
        mpu, grid = None, model.mpu()
    else:
        model, mpu = lowering.model, _grid(options)
        grid = mpu
    tp, dp = grid.get_slice_parallel_group(), grid.get_data_parallel_group()
    groups, sync = {"tp": tp, "dp": dp}, options.sync_replicated
    share_values(lowering.module, groups, shared, lowering.created, sync)
    optimizer = options.optimizer
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = make_optimizer(optimizer, lowering.trainable(), device_of_world())
    engine = initialize(
        deepspeed,
        model,
        options.config,
        optimizer=optimizer,
        lr_scheduler=options.lr_scheduler,
        mpu=mpu,
        dp_group=grid.get_data_parallel_group(),
    )
    if lowering.n_stages > 1:
        engine = _adopt(engine, lowering.model)
    return engine, engine.optimizer


def _adopt(engine: Any, model: Any) -> Any:
    from slapo.framework_dialect.deepspeed.pipe import StagePipelineEngine  # imports DeepSpeed

    def bind(inputs: Any) -> tuple[Tensor, ...]:
        training = bool(engine.module.training)
        return model.bind(*as_call(inputs, "the inputs of a batch"), training=training)

    engine = StagePipelineEngine.adopt(engine)
    engine.bind = bind
    return engine


def _grid(options: PlainOptions) -> Any:
    from deepspeed.runtime.pipe.topology import (  # optional package
        PipelineParallelGrid,
        PipeModelDataParallelTopology,
    )

    layout = options.layout
    topology = options.topology or PipeModelDataParallelTopology(
        num_pp=1, num_mp=layout.tp, num_dp=layout.dp
    )
    with quiet():
        return PipelineParallelGrid(topology=topology)


def _check_arguments(config: configs.Config, given: Mapping[str, Any]) -> None:
    if not config:
        raise ValueError(
            "deepspeed: pass mesh=slapo.init_mesh(pp=, dp=, tp=); or config=, and topology= for a "
            "pipeline, to get DeepSpeed's own engine"
        )
    entries = {
        "micro_batches": "gradient_accumulation_steps",
        "zero": "zero_optimization.stage",
        "dtype": "bf16.enabled or fp16.enabled",
        "clip_grad_norm": "gradient_clipping",
    }
    for name, entry in entries.items():
        if given.get(name) is not None:
            raise ValueError(
                f"deepspeed: {name}= goes with mesh=; without one, write {entry} in the config"
            )
    for name in ("nonfinite", "check_batches"):
        if given.get(name) is not None:
            raise ValueError(
                f"deepspeed: {name}= goes with mesh=; DeepSpeed's own engine has no such thing, "
                "leave it out"
            )
    check_flag("sync_replicated", given.get("sync_replicated") or False)


def _layout(sch: Any, topology: Any) -> configs.Layout:
    """Ranks along each dimension; the schedule must shard over the topology's."""
    world, device = dist.get_world_size(), device_of_world().type
    # The default group of a schedule that shards nothing is the world, and means nothing.
    shards = any(is_tensor_parallel(parameter) for parameter in sch.mod.parameters())
    if topology is None:
        tp = sch.world_size if shards else 1
        model_lists = [list(range(start, start + tp)) for start in range(0, world, tp)]
        layout = configs.Layout(1, world // tp, tp, device)
    else:
        _check_world(topology, world)
        pp, dp, tp = (max(1, topology.get_dim(axis)) for axis in ("pipe", "data", "model"))
        model_lists = topology.get_axis_comm_lists("model") or [[rank] for rank in range(world)]
        layout = configs.Layout(pp, dp, tp, device)
    if shards:
        _check_tp_group(sch, model_lists)
    return layout


def _check_world(topology: Any, world: int) -> None:
    if topology.world_size() != world:
        raise ValueError(
            f"deepspeed: the topology is for {topology.world_size()} processes, and the job has "
            f"{world}; launch as many, or change the topology"
        )


def _check_tp_group(sch: Any, model_lists: list[list[int]]) -> None:
    rank = dist.get_rank()
    wanted = next(ranks for ranks in model_lists if rank in ranks)
    found = dist.get_process_group_ranks(sch.group) if sch.group is not None else [rank]
    if sorted(found) != sorted(wanted):
        raise ValueError(
            f"deepspeed: the schedule shards over the ranks {sorted(found)}, and tensor "
            f"parallelism is over {sorted(wanted)}; pass create_schedule a group of these"
        )


def _check_config(config: configs.Config, layout: configs.Layout) -> None:
    zero = (config.get("zero_optimization") or {}).get("stage", 0)
    configs.check_zero(zero, layout.pp)
    enabled = [name for name in ("fp16", "bf16") if (config.get(name) or {}).get("enabled")]
    shares = layout.tp > 1 or (layout.pp > 1 and "fp16" in enabled)
    if zero == 0 and enabled and config.get("gradient_clipping") and shares:
        raise ValueError(
            f"deepspeed: gradient_clipping with {enabled[0]} and ZeRO stage 0 clips by the norm of "
            "a part of the gradient when the model is spread over ranks; use ZeRO stage 1"
        )
