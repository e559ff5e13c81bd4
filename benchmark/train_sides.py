"""The ways to train a model: ours, and each peer's own best one.

Every side has AdamW as one kernel, the same random weights and the same batch. A side is made in
all ranks of a job at once, and gives its step.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmark import train_megatron
from benchmark.train_models import Model
from benchmark.train_options import DTYPES, Refused, TrainOptions
from benchmark.train_ours import ours
from benchmark.train_plans import dtensor_plan, parallelized
from benchmark.train_side import LEARNING_RATE, Side, batch_of, device_of, zero_buckets


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
    model = options.spec.build(options.small, options.seq_len).to(device_of(mesh))
    return recomputing(model, options.checkpoint_ratio, options.spec.stacks)


def recomputing(model: nn.Module, ratio: float, stacks: str = "") -> nn.Module:
    """Turn checkpoints on for a share of the layers, the first ones.

    Parameters
    ----------
    stacks
        Lists of layers to wrap by PyTorch's own checkpoints; "" where Transformers has a switch.

    Raises
    ------
    Refused
        If the model knows all or nothing.
    """
    if not ratio:
        return model
    name = type(model).__name__
    layers: Any
    if stacks:
        lists: Any = [model.get_submodule(path) for path in stacks.split()]
        layers = [(each, index) for each in lists for index in range(len(each))]
    else:
        _enable_checkpoints(model)
        layers = [m for m in model.modules() if _is_layer_with_switch(m)]
    count = round(ratio * len(layers))
    if ratio < 1 and count in (0, len(layers)):
        raise Refused(f"{name} recomputes all layers or none; pass --checkpoint-ratio 0 or 1")
    if stacks:
        for each, index in layers[:count]:
            each[index] = checkpoint_wrapper(each[index])
    else:
        for layer in layers[count:]:
            layer.gradient_checkpointing = False
    return model


def _enable_checkpoints(model: Any) -> None:
    """By the name that it has from transformers 5.23 on, or by its older one."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _is_layer_with_switch(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def _eager(options: TrainOptions, mesh: DeviceMesh, compiled: bool = False) -> Side:
    model = _model(options, mesh)
    if compiled:
        model.compile()
    return _plain_loop(model, options, mesh)


def _plain_loop(model: nn.Module, options: TrainOptions, mesh: DeviceMesh) -> Side:
    """A script's loop: DDP for replicas, autocast for half precision, micro-batches added up."""
    module = model
    if options.dp > 1:
        module = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(_groups(model), lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler(mesh.device_type, enabled=options.dtype == "float16")
    batch, dtype = batch_of(options, mesh), DTYPES[options.dtype]
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


# --- DeepSpeed on the unmodified model -----------------------------------------------------------
def _deepspeed(options: TrainOptions, mesh: DeviceMesh) -> Side:
    from slapo.framework_dialect.deepspeed.load import import_deepspeed, quiet, quiet_warnings

    deepspeed = import_deepspeed(mesh.device_type)
    model = _model(options, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    zero = 3 if options.zero is None else options.zero
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch_size // options.parts,
        "gradient_accumulation_steps": options.parts,
        "zero_optimization": {"stage": zero, **zero_buckets(model)},
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
        for name, t in batch_of(options, mesh).items()
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
    return _plain_loop(recomputing(loaded, options.checkpoint_ratio, spec.stacks), options, mesh)


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
    step, modules = train_megatron.make(options, mesh, batch_of(options, mesh))
    return Side(step, modules)


# --- all of them -------------------------------------------------------------------------------
SIDES: dict[str, Callable[[TrainOptions, DeviceMesh], Side]] = {
    "eager": _eager,
    "compile": functools.partial(_eager, compiled=True),
    "deepspeed": _deepspeed,
    "dtensor": _dtensor,
    "tp_plan": _tp_plan,
    "megatron": _megatron,
    "slapo-torch": ours,
    "slapo-deepspeed": ours,
    "slapo-megatron": ours,
}
