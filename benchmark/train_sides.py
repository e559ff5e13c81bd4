"""The ways to train a model: ours, and each peer's own best one.

Every side has AdamW as one kernel, the same random weights and the same batch. A side is made in
all ranks of a job at once, and gives its step.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import slapo
from benchmark.train_models import Model
from benchmark.train_options import DTYPES, KERNELS, Refused, TrainOptions
from benchmark.train_plans import dtensor_plan, parallelized
from slapo.model_schedule import apply_schedule

#: A loss, as a number or a tensor.
Step = Callable[[], Any]
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Side:
    """A step, and what it trains.

    Parameters
    ----------
    step
        Forward, backward, optimizer.
    modules
        This rank's.
    """

    step: Step
    modules: list[nn.Module]

    @property
    def parameters(self) -> int:
        """Of this rank; of a distributed one, its share."""
        found = {id(p): p for module in self.modules for p in module.parameters()}
        return sum(_numel(p) for p in found.values())


def _numel(parameter: nn.Parameter) -> int:
    if hasattr(parameter, "ds_numel"):  # ZeRO-3 keeps a share of it, and an empty tensor
        return int(parameter.ds_tensor.numel())
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).numel()


def make_side(options: TrainOptions, mesh: DeviceMesh) -> Side:
    """The side that the options name.

    Raises
    ------
    Refused
        If it cannot do what they ask.
    """
    if not options.is_ours:
        _refuse_ours_alone(options)
    return SIDES[options.impl](options, mesh)


def _refuse_ours_alone(options: TrainOptions) -> None:
    impl = options.impl
    if options.compile:
        raise Refused(
            f"--compile is for schedules; of Transformers take --impl compile, not {impl}"
        )
    if options.schedule != "1f1b":
        raise Refused(f"--schedule {options.schedule} is one of slapo-torch; {impl} has none of it")
    if options.pp > 1 and impl != "megatron":
        raise Refused(f"{impl} has no pipeline for a model of Transformers; pass --pp 1")
    if options.tp > 1 and impl in ("eager", "compile", "deepspeed"):
        raise Refused(f"{impl} splits no layers; pass --tp 1, or --impl dtensor or tp_plan")
    zero_of = {"deepspeed": (None, 0, 1, 2, 3)}
    if options.zero not in zero_of.get(impl, (None, 0)):
        raise Refused(f"{impl} has no ZeRO stage {options.zero}; leave --zero out")


# --- Transformers as it comes --------------------------------------------------------------------
def _model(options: TrainOptions, mesh: DeviceMesh) -> nn.Module:
    model = options.spec.build(options.small, options.seq_len).to(_device(mesh))
    return recomputing(model, options.checkpoint_ratio)


def _device(mesh: DeviceMesh) -> torch.device:
    index = torch.cuda.current_device() if mesh.device_type == "cuda" else None
    return torch.device(mesh.device_type, index)


def recomputing(model: nn.Module, ratio: float) -> nn.Module:
    """Turn Transformers' own checkpoints on, for a share of the layers, the first ones.

    Raises
    ------
    Refused
        If the model has none, or knows all or nothing.
    """
    if not ratio:
        return model
    name = type(model).__name__
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise Refused(f"{name} has no checkpoints of its own; pass --checkpoint-ratio 0")
    try:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise Refused(f"{error} Pass --checkpoint-ratio 0") from error
    switches: Any = [m for m in model.modules() if _is_layer_with_switch(m)]
    if not switches and ratio < 1:
        raise Refused(f"{name} recomputes all layers or none; pass --checkpoint-ratio 0 or 1")
    for layer in switches[round(ratio * len(switches)) :]:
        layer.gradient_checkpointing = False
    return model


def _is_layer_with_switch(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def _eager(options: TrainOptions, mesh: DeviceMesh, compiled: bool = False) -> Side:
    model = _model(options, mesh)
    if compiled:
        model.compile()
    return _plain_loop(model, options, mesh)


def _plain_loop(model: nn.Module, options: TrainOptions, mesh: DeviceMesh) -> Side:
    """The loop of a script: DDP for replicas, autocast for half precision, micro-batches added up."""
    module = model
    if options.dp > 1:
        module = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(_groups(model), lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler(mesh.device_type, enabled=options.dtype == "float16")
    batch, dtype = _batch(options, mesh), DTYPES[options.dtype]
    parts = _chunks(batch, options.parts)

    def step() -> Any:
        for number, part in enumerate(parts, 1):
            keeps = options.dp > 1 and number < len(parts)
            quiet: AbstractContextManager[Any] = module.no_sync() if keeps else nullcontext()
            with quiet:
                with _autocast(mesh, dtype):
                    loss = _own_loss(options.spec, module, part) / len(parts)
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss * len(parts)

    return Side(step, [model])


def _autocast(mesh: DeviceMesh, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return torch.autocast(mesh.device_type, dtype, enabled=dtype != torch.float32)


def _own_loss(spec: Model, module: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """Transformers' own; that of images is the script's."""
    if spec.cls:
        loss: Tensor = module(**part).loss
        return loss
    return spec.loss(module(part["x"]), part["labels"])


def _chunks(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    return [
        dict(zip(batch, part, strict=True))
        for part in zip(*(tensor.chunk(count) for tensor in batch.values()), strict=True)
    ]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Distributed tensors and plain ones: one kernel does not take both."""
    parameters = list(model.parameters())
    spread = [p for p in parameters if isinstance(p, DTensor)]
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    return [{"params": group} for group in (spread, plain) if group]


def _batch(options: TrainOptions, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Every replica has its own."""
    seed = 1 + mesh.get_local_rank("dp")
    made = options.spec.batch(options.batch_size, options.seq_len, options.small, seed)
    return {name: tensor.to(_device(mesh)) for name, tensor in made.items()}


# --- DeepSpeed on the unmodified model -----------------------------------------------------------
def _deepspeed(options: TrainOptions, mesh: DeviceMesh) -> Side:
    from slapo.framework_dialect.deepspeed.package import import_deepspeed, quiet, quiet_warnings

    deepspeed = import_deepspeed(mesh.device_type)
    model = _model(options, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    zero = 3 if options.zero is None else options.zero
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch_size // options.parts,
        "gradient_accumulation_steps": options.parts,
        "zero_optimization": {"stage": zero, **_buckets(model)},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    half = {"bfloat16": "bf16", "float16": "fp16"}
    if options.dtype in half:
        config[half[options.dtype]] = {"enabled": True}
    with quiet():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dtype = DTYPES[options.dtype]
    batch = {
        name: t.to(dtype) if t.is_floating_point() else t
        for name, t in _batch(options, mesh).items()
    }
    parts = _chunks(batch, options.parts)

    def step() -> Any:
        with quiet_warnings():
            for part in parts:
                loss = _own_loss(options.spec, engine, part)
                engine.backward(loss)
                engine.step()
        return loss

    return Side(step, [model])


def _buckets(model: nn.Module) -> dict[str, int]:
    """As "auto" in Transformers' own use of DeepSpeed: by the width of the model."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return {}
    width = config.hidden_size
    return {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }


# --- tensor parallelism of others ----------------------------------------------------------------
def _dtensor(options: TrainOptions, mesh: DeviceMesh) -> Side:
    """PyTorch's own styles; replicas by DDP are not among what they go with."""
    _refuse_replicas(options)
    plan = dtensor_plan(options.spec.key)
    model = parallelized(_model(options, mesh), plan, mesh["tp"])
    return _plain_loop(model, options, mesh)


def _tp_plan(options: TrainOptions, mesh: DeviceMesh) -> Side:
    """Transformers' own tensor parallelism, which splits a model as it loads it."""
    import transformers

    _refuse_replicas(options)
    spec = options.spec
    model = spec.build(options.small, options.seq_len)
    config: Any = getattr(model, "config", None)
    if not getattr(config, "base_model_tp_plan", None):
        raise Refused(
            f"Transformers has no tensor-parallel plan for {spec.key}; take another model"
        )
    try:
        from transformers.distributed import DistributedConfig

        import_accelerate()
    except ImportError as error:
        raise Refused(
            f"Transformers' plan needs accelerate, and transformers 5: {error}"
        ) from error
    given: Any = {"distributed_config": DistributedConfig(tp_size=options.tp)}
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])  # type: ignore[operator]
    dist.barrier()
    try:
        loaded = getattr(transformers, spec.cls).from_pretrained(folder[0], **given).train()
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            _remove(Path(folder[0]))
    return _plain_loop(recomputing(loaded, options.checkpoint_ratio), options, mesh)


def import_accelerate() -> None:
    import accelerate  # noqa: F401


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def _refuse_replicas(options: TrainOptions) -> None:
    if options.dp > 1:
        raise Refused(
            f"{options.impl} is measured with one replica, and gpus={options.gpus} with "
            f"tp={options.tp} gives {options.dp}; pass --tp {options.gpus}"
        )


def _megatron(options: TrainOptions, mesh: DeviceMesh) -> Side:
    from benchmark.train_megatron import make  # an optional package

    step, modules = make(options, mesh, _batch(options, mesh))
    return Side(step, modules)


# --- ours ----------------------------------------------------------------------------------------
def _ours(options: TrainOptions, mesh: DeviceMesh) -> Side:
    spec, target = options.spec, options.impl.removeprefix("slapo-")
    model = spec.build(options.small, options.seq_len)
    slapo.set_random_seed(1, mesh=mesh)
    sch = apply_schedule(model, spec.key, group=mesh["tp"], **_recipe(options))
    engine, _ = slapo.build(
        sch,
        target=target,
        mesh=mesh,
        loss_fn=_loss_fn(options),
        optimizer=functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        micro_batches=options.parts,
        dtype=None if options.dtype == "float32" else DTYPES[options.dtype],
        **_target(options, target),
    )
    batch = _batch(options, mesh)
    labels = batch["labels"] if _has_own_loss(options) else batch.pop("labels")
    data = repeat((batch, labels))
    return Side(lambda: engine.train_batch(data), [engine.module])


def _has_own_loss(options: TrainOptions) -> bool:
    """Whether the model computes its loss; in a pipeline, and of images, the engine does."""
    return bool(options.spec.cls) and options.pp == 1


def _loss_fn(options: TrainOptions) -> Callable[[Any, Tensor], Tensor]:
    if _has_own_loss(options):
        return lambda output, labels: output.loss
    return options.spec.loss


def _recipe(options: TrainOptions) -> dict[str, Any]:
    """Options of the recipe. Kernels that a family has none of are refused by it, by name."""
    stages = options.pp * (2 if options.schedule in _LOOPED else 1)
    found = dict(KERNELS[options.kernels])
    if not options.spec.cls:
        found.pop("attn_op_name", None)
    if options.pp > 1:
        length, small = options.seq_len, options.small
        example = options.spec.batch(options.batch_size // options.parts, length, small, seed=0)
        example.pop("labels")
        found |= {"pipeline_cuts": stages, "example_inputs": example}
    elif options.tp > 1 and options.kernels == "ops" and options.spec.cls:
        found["gather_logits"] = False  # the loss of the columns that a rank has
    return {**found, "ckpt_ratio": options.checkpoint_ratio, "compile": options.compile}


_LOOPED = ("interleaved_1f1b", "zero_bubble", "zbv")


def _target(options: TrainOptions, target: str) -> dict[str, Any]:
    """Options of the runtime."""
    if target == "torch":
        if options.zero not in (None, 0, 3):
            raise Refused(
                f"slapo-torch has DDP (--zero 0) and FSDP2 (--zero 3), not {options.zero}"
            )
        way = "fsdp" if options.zero == 3 else "ddp"
        return {"pipeline_schedule": options.schedule, "data_parallel": way}
    if options.schedule != "1f1b":
        raise Refused(f"--schedule {options.schedule} is one of slapo-torch; {target} runs 1f1b")
    if target == "deepspeed":
        return {"zero": options.zero}
    if options.zero:
        raise Refused("slapo-megatron has no ZeRO stages; leave --zero out")
    return {}


SIDES: dict[str, Callable[[TrainOptions, DeviceMesh], Side]] = {
    "eager": _eager,
    "compile": functools.partial(_eager, compiled=True),
    "deepspeed": _deepspeed,
    "dtensor": _dtensor,
    "tp_plan": _tp_plan,
    "megatron": _megatron,
    "slapo-torch": _ours,
    "slapo-deepspeed": _ours,
    "slapo-megatron": _ours,
}
