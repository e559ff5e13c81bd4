"""``deepspeed.initialize`` for a mesh, with corrections of its faults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import SlapoError
from slapo.framework_dialect.deepspeed.config import DeepSpeedOptions, flat_parameters
from slapo.framework_dialect.deepspeed.load import quiet
from slapo.framework_dialect.deepspeed.shares import Shares
from slapo.framework_dialect.gradients import (
    clip_factor,
    global_norm,
    is_counted_slice,
    scale_gradients,
)
from slapo.framework_dialect.optimizers import check_scheduler, make_optimizer, place_steps
from slapo.framework_dialect.runtime import Lowering
from slapo.mesh import DIMS, current_device


def mesh_unit(mesh: DeviceMesh) -> SimpleNamespace:
    """Return a mesh of one pipeline stage as the "model parallelism unit" of DeepSpeed."""
    unit = SimpleNamespace()
    # Without a pipeline, tensor parallelism is the only model parallelism.
    for kind in ("model", "tensor_model", "slice", "data"):
        name, dim = f"{kind}_parallel", "dp" if kind == "data" else "tp"
        # Read from the mesh: a group in DeepSpeed's globals would outlive the job.
        setattr(unit, f"get_{name}_rank", partial(mesh.get_local_rank, dim))
        setattr(unit, f"get_{name}_world_size", partial(mesh.size, DIMS.index(dim)))
        setattr(unit, f"get_{name}_group", partial(mesh.get_group, dim))
    unit.get_data_parallel_group_ranks = lambda: dist.get_process_group_ranks(mesh.get_group("dp"))
    return unit


def topology_of(pp: int, dp: int, tp: int) -> Any:
    """Return a mesh as DeepSpeed's topology: both order ranks by pp, then dp, then tp."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology  # optional package

    return PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)


def initialize(
    deepspeed: Any, lowering: Lowering, options: DeepSpeedOptions, model: nn.Module, mpu: Any
) -> Any:
    """Return a DeepSpeed engine of a model; `mpu` is None for a ``PipelineModule``."""
    mesh, half, config = options.mesh, options.half, options.config
    shares = Shares(config, mpu, mesh, half)
    if lowering.fill is not None:
        lowering.fill(shares=shares)
        shares.divide([p for p in model.parameters() if not hasattr(p, "ds_id")])
    optimizer = None
    if options.optimizer is not None:
        optimizer = make_optimizer(options.optimizer, lowering.trainable(), current_device(mesh))
        place_steps(optimizer, lowering, lambda: lowering.tp_group, flat_parameters(config))
    exact: dict[nn.Parameter, Tensor] = {}
    if half is not None and optimizer is not None:
        trained = (p for p in model.parameters() if p.requires_grad)
        exact = {p: p.detach().float() for p in trained if not hasattr(p, "ds_id")}
    for parameter in model.parameters():
        # In the gradient's norm, DeepSpeed counts parameters that are not shards on one rank only.
        sharded = is_counted_slice(parameter)
        parameter.model_parallel = sharded  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = sharded  # type: ignore[attr-defined]
    with quiet(), _without_broadcast(model):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            lr_scheduler=options.lr_scheduler,
            mpu=mpu,
            config=config,
        )
    if engine.lr_scheduler is not None and options.lr_scheduler is not None:
        check_scheduler(engine.lr_scheduler)
    _undo_first_step(engine.optimizer)
    engine.clip_fp32_gradients = lambda: _clip_by_whole_norm(engine)
    if mpu is not None:
        model.register_forward_hook(lambda module, args, output: check_output(output))
    # DeepSpeed has created the optimizer's float32 parameters from rounded values.
    if optimizer is not None:
        shares.put_exact(model)
    if exact:
        from deepspeed.utils import safe_set_full_fp32_param  # optional package

        for parameter, value in exact.items():
            safe_set_full_fp32_param(parameter, value)
    return engine


def check_output(output: Any) -> Any:
    """Return a model's output, in which DeepSpeed prepares the backward by hooks on tensors.

    Without them, bfloat16 gradients of one micro-batch would leak into the next.
    """
    if isinstance(output, (Tensor, tuple, list, dict)):
        return output
    raise SlapoError(
        f"the model returns a {type(output).__name__}, in which DeepSpeed finds no tensors; "
        "return a tensor, a tuple, a list or a dict"
    )


def whole_norm(engine: Any) -> Tensor:
    """Norm of the full model's gradient, for an engine without ZeRO.

    DeepSpeed's own norm omits replicated parameters of all stages but the first, counts tied ones
    in every stage, and fails on 0-dim parameters.
    """
    stages = getattr(engine.mpu, "get_pipe_parallel_group", None)
    return global_norm(
        engine.module.parameters(),
        tp_group=engine.mpu.get_slice_parallel_group(),
        pp_group=stages() if stages else None,
        counted=lambda p: not getattr(p, "ds_pipe_replicated", False),
    )


def _clip_by_whole_norm(engine: Any) -> None:
    engine._global_grad_norm = norm = whole_norm(engine)
    scale_gradients(engine.module.parameters(), clip_factor(norm, engine.gradient_clipping()))


def _undo_first_step(optimizer: Any) -> None:
    """Undo the step with zero gradients by which some of DeepSpeed's optimizers start.

    It counts in Adam's bias correction, and applies weight decay once too often.
    """
    # The two that keep full float32 copies of half-precision parameters, without ZeRO.
    if type(optimizer).__name__ not in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
        return
    optimizer.optimizer.state.clear()
    for group in optimizer.optimizer.param_groups:
        group.pop("step", None)
    optimizer.refresh_fp32_params()


@contextlib.contextmanager
def _without_broadcast(model: nn.Module) -> Iterator[None]:
    """Skip DeepSpeed's broadcast of parameters: replicas are equal, and it fails on 0-dim ones."""
    parameters: list[Any] = [p for p in model.parameters() if not hasattr(p, "ds_optim_param")]
    for parameter in parameters:
        parameter.ds_optim_param = True  # DeepSpeed's mark for "not replicated"
    try:
        yield
    finally:
        for parameter in parameters:
            del parameter.ds_optim_param
