"""``slapo.dryrun``: what a schedule costs on a cluster, without either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from slapo.cost._job import DryRunSession, InputsFn, LossFn
from slapo.cost.layout import Layout, sizes_of
from slapo.cost.machine import Machine, machine_of
from slapo.cost.memory import memory_of
from slapo.cost.models import Source
from slapo.cost.result import DryRun
from slapo.cost.state import state_of
from slapo.cost.steptime import time_of
from slapo.cost.update import Update
from slapo.errors import SlapoError
from slapo.schedule import Schedule


def dryrun(
    recipe: str | Callable[[Schedule], Any],
    model_config: Source,
    *,
    mesh: Any = None,
    machine: str | Machine = "h100-80gb",
    batch: int = 1,
    seq_len: int = 1024,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    target: str = "torch",
    data_parallel: str = "ddp",
    zero: int = 0,
    bucket: int = 500_000_000,
    dtype: torch.dtype | None = None,
    optimizer: Callable[[list[Any]], torch.optim.Optimizer] = torch.optim.AdamW,
    inputs: InputsFn | None = None,
    loss_fn: LossFn | None = None,
    pipeline_cuts: Sequence[int] | None = None,
    **options: Any,
) -> DryRun:
    """Predict memory and time of a training step, in seconds, on one process.

    The model is made without memory, with few layers in place of many, scheduled as one rank of
    its group would, and run forward and backward on tensors without numbers. From what each layer
    then takes and keeps follow the stages, and the job. A figure of time is as good as the
    machine's numbers: those of data sheets tell which layout is the faster, those of
    :func:`slapo.cost.calibrate` how fast it is.

    Parameters
    ----------
    recipe
        A key of :func:`slapo.model_schedule.apply_schedule`; or a function that schedules
        ``f(sch)``, for which all layers are run.
    model_config
        A config of Transformers, or a function without arguments that makes the model.
    mesh
        Sizes ``{"pp": .., "dp": .., "tp": ..}``, those left out 1.
    machine
        A name of ``slapo.cost.MACHINES``, or a :class:`slapo.cost.Machine`.
    batch
        Samples of a replica in a step, as an engine's ``train_batch`` gets them.
    seq_len
        Tokens of each.
    micro_batches
        Into which they are cut.
    schedule
        Of a pipeline: ``"1f1b"`` or ``"gpipe"``.
    target, data_parallel, zero
        The engine: ``"torch"`` with ``"ddp"`` or ``"fsdp"``, ``"deepspeed"`` with a stage of ZeRO,
        ``"megatron"``, with ``zero=1`` for its distributed optimizer.
    bucket
        DeepSpeed's ``reduce_bucket_size``, in elements.
    dtype
        In which the model computes; by default as it is made. In half precision the optimizer has
        float32 copies.
    optimizer
        As for :func:`slapo.build`.
    inputs
        ``f(samples)``: what the model is called with, labels included, where that is neither
        tokens nor images.
    loss_fn
        ``f(output, labels)``, as for engines; by default the loss that the model returns.
    pipeline_cuts
        Numbers of the layers that end stages; by default stages of about the same work.
    **options
        Of the recipe, such as ``ckpt_ratio=0.5`` or ``sequence_parallel=True``; ``compile`` and
        ``check`` make no difference here.

    Returns
    -------
    DryRun
        ``print`` it for a table; ``.peak``, ``.fits``, ``.throughput``, ``.data()``, ``.plot()``.

    Raises
    ------
    KeyError
        For an unknown recipe or machine.
    TypeError, ValueError
        For sizes that make no layout, and for what the recipe refuses.
    SlapoError
        Within a process group, if stages are asked for and layers do not run one after another, and
        if the model or the optimizer asks for numbers.

    Examples
    --------
    >>> import slapo
    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=8,
    ...     num_attention_heads=4, vocab_size=256)
    >>> found = slapo.dryrun("llama", config, mesh={"pp": 2, "dp": 2, "tp": 2}, batch=8,
    ...     micro_batches=4, seq_len=64, ckpt_ratio=0.5)
    >>> len(found.stages), found.layout.ranks, found.fits
    (2, 8, True)
    """
    if dist.is_initialized() and (dist.get_world_size() > 1 or sizes_of(mesh)["tp"] > 1):
        raise SlapoError(
            "slapo.dryrun plays ranks that do not exist, and this process is in a process group "
            "already; call it in a process of its own, or before init_process_group"
        )
    node = machine_of(machine)
    layout = Layout(
        **sizes_of(mesh),
        batch=batch,
        length=seq_len,
        micro_batches=micro_batches,
        schedule=schedule,
        target=target,
        data_parallel=data_parallel,
        zero=zero,
        bucket=bucket,
    )
    job = DryRunSession(recipe, model_config, layout, node, dtype, inputs, loss_fn, options)
    parts, small = job.stages(pipeline_cuts), job.small
    update = Update.of(optimizer, accelerator=node.is_asynchronous)
    any_run = parts[0].steps[0].run
    memory = tuple(
        memory_of(
            each,
            state_of(each, layout, update, small.dtype),
            layout,
            number,
            any_run.buffers,
            any_run.inputs,
        )
        for number, each in enumerate(parts)
    )
    micro = job.inputs(layout.micro)
    tokens = micro["input_ids"].numel() if "input_ids" in micro else 0
    if inputs is not None and tokens:
        layout = replace(layout, length=tokens // layout.micro)
    return DryRun(
        model=type(small.model).__name__,
        parameters=small.parameters,
        dtype=small.dtype,
        machine=node,
        layout=layout,
        stages=memory,
        time=time_of(parts, layout, node, update),
        flops=job.flops(parts) * layout.micro_batches * layout.dp,
        tokens=tokens * layout.micro_batches * layout.dp,
    )
