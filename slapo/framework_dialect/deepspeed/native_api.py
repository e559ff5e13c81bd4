"""Scripts written for DeepSpeed: they pass its config and topology, and get its own engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo.errors import SlapoError
from slapo.framework_dialect.deepspeed import config as configs
from slapo.framework_dialect.deepspeed.initialize import initialize, topology_of
from slapo.framework_dialect.deepspeed.load import import_deepspeed, quiet
from slapo.framework_dialect.optimizers import make_optimizer, place_steps
from slapo.framework_dialect.options import FLAG
from slapo.framework_dialect.replicas import share_values, shared_parameters
from slapo.framework_dialect.runtime import Lowering
from slapo.mesh import device_of_world
from slapo.sharding.tags import is_tensor_parallel
from slapo.utils.calls import as_call

#: Argument of build that needs a mesh -> its entry in the config; None if there is none.
_WITH_MESH = {
    "micro_batches": "gradient_accumulation_steps",
    "zero": "zero_optimization.stage",
    "dtype": "bf16.enabled or fp16.enabled",
    "clip_grad_norm": "gradient_clipping",
    "nonfinite": None,
    "check_batches": None,
    "loss_mean": None,
    "batch_dims": None,
}


@dataclass(frozen=True)
class PlainOptions:
    """Validated arguments of a script. `topology` is None without a pipeline."""

    topology: Any
    config: configs.Config
    layout: configs.Layout
    stage: int
    loss_fn: Any
    optimizer: Any
    lr_scheduler: Any
    sync_replicated: bool = False

    def described(self) -> dict[str, Any]:
        """Values that must be equal on all ranks."""
        return {"config": self.config, "sync_replicated": self.sync_replicated}

    @classmethod
    def check(cls, sch: Any, config: configs.Config, given: Mapping[str, Any]) -> PlainOptions:
        """Validate the arguments; `config` is the user's, loaded."""
        if not config:
            raise ValueError(
                "deepspeed: pass mesh=slapo.init_mesh(pp=, dp=, tp=); or config=, and topology= "
                "for a pipeline, to get DeepSpeed's own engine"
            )
        for name, entry in _WITH_MESH.items():
            if given.get(name) is not None:
                instead = f"write {entry} in the config" if entry else "leave it out"
                raise ValueError(f"deepspeed: {name}= needs mesh=; without it, {instead}")
        sync = given.get("sync_replicated") or False
        FLAG.check("sync_replicated", sync)
        topology, loss_fn = given.get("topology"), given.get("loss_fn")
        if not (dist.is_available() and dist.is_initialized()):
            raise SlapoError(
                "deepspeed: torch.distributed is not initialized; call "
                "deepspeed.init_distributed() before the schedule is created"
            )
        layout = _layout(sch, topology)
        if layout.pp > 1 and loss_fn is None:
            raise ValueError(
                f"deepspeed: the topology has pipe={layout.pp}, but loss_fn is missing; the last "
                "stage computes the loss: pass loss_fn=, a function of (output, labels)"
            )
        _check_precision(config, layout)
        configs.fix_entries(config, layout)
        configs.use_torch_adam(config, layout.device)
        place = topology.get_coord(dist.get_rank()) if topology is not None else None
        others = (loss_fn, given.get("optimizer"), given.get("lr_scheduler"))
        return cls(topology, config, layout, getattr(place, "pipe", 0), *others, sync)


def _layout(sch: Any, topology: Any) -> configs.Layout:
    """Ranks along each dimension; the schedule must shard over those of the topology."""
    world, device = dist.get_world_size(), device_of_world().type
    # A schedule that shards nothing has the world as its default group, which is then irrelevant.
    shards = any(is_tensor_parallel(parameter) for parameter in sch.mod.parameters())
    if topology is None:
        tp = sch.world_size if shards else 1
        model_lists = [list(range(start, start + tp)) for start in range(0, world, tp)]
        layout = configs.Layout(1, world // tp, tp, device)
    else:
        if topology.world_size() != world:
            raise ValueError(
                f"deepspeed: the topology is for {topology.world_size()} processes, but the job "
                f"has {world}; launch that many, or change the topology"
            )
        pp, dp, tp = (max(1, topology.get_dim(axis)) for axis in ("pipe", "data", "model"))
        model_lists = topology.get_axis_comm_lists("model") or [[rank] for rank in range(world)]
        layout = configs.Layout(pp, dp, tp, device)
    if shards:
        rank = dist.get_rank()
        wanted = next(ranks for ranks in model_lists if rank in ranks)
        found = dist.get_process_group_ranks(sch.group) if sch.group is not None else [rank]
        if sorted(found) != sorted(wanted):
            raise ValueError(
                f"deepspeed: the schedule shards over the ranks {sorted(found)}, but tensor "
                f"parallelism is over {sorted(wanted)}; pass create_schedule a group of these"
            )
    return layout


def _check_precision(config: configs.Config, layout: configs.Layout) -> None:
    zero = configs.zero_of(config)
    configs.check_zero(zero, layout.pp)
    enabled = [name for name in ("fp16", "bf16") if (config.get(name) or {}).get("enabled")]
    shares = layout.tp > 1 or (layout.pp > 1 and "fp16" in enabled)
    if zero == 0 and enabled and config.get("gradient_clipping") and shares:
        raise ValueError(
            f"deepspeed: gradient_clipping with {enabled[0]} and ZeRO stage 0 clips by only part "
            "of the gradient norm when the model is spread over ranks; use ZeRO stage 1"
        )


def lower_plain(lowering: Lowering, options: PlainOptions) -> tuple[Any, Any]:
    """Return DeepSpeed's own engine and optimizer."""
    deepspeed = import_deepspeed(options.layout.device)
    pipelined, layout = lowering.n_stages > 1, options.layout
    columns = options.topology.get_axis_comm_lists("pipe") if pipelined else []
    shared = shared_parameters(lowering, columns)
    model: Any
    if pipelined:
        from slapo.framework_dialect.deepspeed.pipe import StagePipeline  # imports DeepSpeed

        model = StagePipeline(lowering, options.topology, options.loss_fn, shared)
        grid = model.mpu()
    else:
        from deepspeed.runtime.pipe.topology import PipelineParallelGrid  # optional package

        model = lowering.model
        with quiet():
            topology = options.topology or topology_of(1, layout.dp, layout.tp)
            grid = PipelineParallelGrid(topology=topology)
    groups = {"tp": grid.get_slice_parallel_group(), "dp": grid.get_data_parallel_group()}
    share_values(lowering.module, groups, shared, lowering.created, options.sync_replicated)
    optimizer = options.optimizer
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = make_optimizer(optimizer, lowering.trainable(), device_of_world())
    if optimizer is not None:
        flat = configs.flat_parameters(options.config)
        place_steps(optimizer, lowering, lambda: lowering.tp_group, flat)
    engine = initialize(
        deepspeed,
        model,
        options.config,
        optimizer=optimizer,
        lr_scheduler=options.lr_scheduler,
        mpu=None if pipelined else grid,
        dp_group=groups["dp"],
    )
    if pipelined:
        from slapo.framework_dialect.deepspeed.pipe import StagePipelineEngine

        engine = StagePipelineEngine.adopt(engine)

        def bind(inputs: Any) -> tuple[Tensor, ...]:
            training = bool(engine.module.training)
            call = as_call(inputs, "the inputs of a batch")
            return lowering.pipeline.bind(*call, training=training)

        engine.bind = bind
    return engine, engine.optimizer
