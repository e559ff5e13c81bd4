"""Scripts written for DeepSpeed: they pass its config and topology, and get its own engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slapo.errors import SlapoError
from slapo.framework_dialect.deepspeed import config as configs
from slapo.framework_dialect.options import FLAG
from slapo.mesh import device_of_world, init_mesh
from slapo.sharding.tags import is_tensor_parallel

#: Arguments of build that need no mesh.
_TAKEN = ("config", "topology", "loss_fn", "optimizer", "lr_scheduler", "sync_replicated")

#: Axes of DeepSpeed's topologies in the order of a mesh.
_AXES = ("pipe", "data", "model")


@dataclass(frozen=True)
class NativeOptions:
    """Validated arguments of a script."""

    layout: configs.Layout
    given: dict[str, Any]

    @property
    def stage(self) -> int:
        """Index of the stage of this rank: ranks are ordered as in a mesh."""
        return dist.get_rank() // (self.layout.dp * self.layout.tp)

    def described(self) -> dict[str, Any]:
        """Values that must be equal on all ranks."""
        return {name: self.given.get(name) for name in ("config", "sync_replicated")}

    def on_mesh(self) -> configs.DeepSpeedOptions:
        """Return them as those of a mesh of the same ranks. A collective of the world."""
        layout = self.layout
        mesh = init_mesh(layout.pp, layout.dp, layout.tp, layout.device)
        given = {**self.given, "topology": None, "mesh": mesh}
        optimizer = given.get("optimizer")
        if isinstance(optimizer, torch.optim.Optimizer):
            given["optimizer"] = lambda parameters: optimizer
        return configs.DeepSpeedOptions(**given)

    @classmethod
    def check(cls, sch: Any, given: dict[str, Any]) -> NativeOptions:
        """Validate the arguments."""
        config, topology = given["config"], given.get("topology")
        if not config:
            raise ValueError(
                "deepspeed: pass mesh=slapo.init_mesh(pp=, dp=, tp=); or config=, and topology= "
                "for a pipeline, to get DeepSpeed's own engine"
            )
        unread = [name for name in given if name not in _TAKEN]
        if unread:
            raise ValueError(
                f"deepspeed: {unread[0]}= needs mesh=; without it, leave it out, or write "
                "DeepSpeed's own entry into the config, such as gradient_accumulation_steps for "
                "micro_batches"
            )
        FLAG.check("sync_replicated", given.get("sync_replicated", False))
        if not (dist.is_available() and dist.is_initialized()):
            raise SlapoError(
                "deepspeed: torch.distributed is not initialized; call "
                "deepspeed.init_distributed() before the schedule is created"
            )
        layout = _layout(sch, topology)
        if layout.pp > 1 and given.get("loss_fn") is None:
            raise ValueError(
                f"deepspeed: the topology has pipe={layout.pp}, but loss_fn is missing; the last "
                "stage computes the loss: pass loss_fn=, a function of (output, labels)"
            )
        _check_precision(config, layout)
        configs.fix_entries(config, layout)
        configs.use_torch_adam(config, layout.device)
        return cls(layout, given)


def _layout(sch: Any, topology: Any) -> configs.Layout:
    """Ranks along each dimension; the schedule must shard over those of the topology."""
    world, rank = dist.get_world_size(), dist.get_rank()
    # A schedule that shards nothing has the world as its default group, which is then irrelevant.
    shards = any(is_tensor_parallel(parameter) for parameter in sch.mod.parameters())
    if topology is None:
        pp, tp = 1, sch.world_size if shards else 1
    else:
        if topology.world_size() != world:
            raise ValueError(
                f"deepspeed: the topology is for {topology.world_size()} processes, but the job "
                f"has {world}; launch that many, or change the topology"
            )
        axes = topology.get_axis_names()
        if axes != [axis for axis in _AXES if axis in axes]:
            raise ValueError(f"deepspeed: the topology has axes {axes}; pass some of {_AXES}")
        pp, tp = (max(1, topology.get_dim(axis)) for axis in ("pipe", "model"))
    wanted = [rank // tp * tp + place for place in range(tp)]
    found = [rank] if sch.group is None else dist.get_process_group_ranks(sch.group)
    if shards and sorted(found) != wanted:
        raise ValueError(
            f"deepspeed: the schedule shards over the ranks {sorted(found)}, but tensor "
            f"parallelism is over {wanted}; pass create_schedule a group of these"
        )
    return configs.Layout(pp, world // (pp * tp), tp, device_of_world().type)


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
