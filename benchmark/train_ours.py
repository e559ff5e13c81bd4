"""Our way to train a model: the recipe of its family, built for one of the runtimes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import slapo
from benchmark.train_options import DTYPES, KERNELS, Refused, TrainOptions
from benchmark.train_side import LEARNING_RATE, Side, batch_of, zero_buckets
from slapo.model_schedule import apply_schedule

#: Schedules with two stages on each rank.
_LOOPED = ("interleaved_1f1b", "zero_bubble", "zbv")


def ours(options: TrainOptions, mesh: DeviceMesh) -> Side:
    """A recipe, built for the target that the side names."""
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
        **_target(options, target, zero_buckets(model)),
    )
    batch = batch_of(options, mesh)
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


def recipe_options(options: TrainOptions) -> dict[str, Any]:
    """What is asked of the recipe, but for stages. Kernels that it has none of it refuses."""
    found = dict(KERNELS[options.kernels])
    if not options.spec.cls:
        found.pop("attn_op_name", None)
    if options.tp > 1 and options.pp == 1 and options.kernels == "ops" and options.spec.cls:
        found["gather_logits"] = False  # the loss of the columns that a rank has
    return {**found, "ckpt_ratio": options.checkpoint_ratio, "compile": options.compile}


def _recipe(options: TrainOptions) -> dict[str, Any]:
    """With stages, and what they are traced for."""
    found = recipe_options(options)
    if options.pp > 1:
        stages = options.pp * (2 if options.schedule in _LOOPED else 1)
        length, small = options.seq_len, options.small
        example = options.spec.batch(options.batch_size // options.parts, length, small, seed=0)
        example.pop("labels")
        found |= {"pipeline_cuts": stages, "example_inputs": example}
    return found


def _target(options: TrainOptions, target: str, buckets: dict[str, int]) -> dict[str, Any]:
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
        config = {"zero_optimization": buckets} if options.zero else {}
        return {"zero": options.zero, "config": config}
    if options.zero:
        raise Refused("slapo-megatron has no ZeRO stages; leave --zero out")
    return {}
