"""Processes of the tuner's benchmark: they train one point, or measure the machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import slapo
from benchmark.tuning_space import Work, recipe_options, token_loss
from slapo.cost import calibrate
from slapo.model_schedule import apply_schedule

PATIENCE = timedelta(minutes=2)


def calibrate_main(rank: int, ranks: int, seconds: float, store: str, pipe: Connection) -> None:
    """Life of a rank that measures the machine together with the others; rank 0 sends it."""
    _join(rank, ranks, store)
    machine = calibrate(pipe.send if rank == 0 else lambda text: None, seconds)
    _leave(rank, machine, pipe)


def train_main(
    rank: int, ranks: int, point: Mapping[str, Any], work: Work, store: str, pipe: Connection
) -> None:
    """Life of a rank that trains a point; rank 0 sends the wall seconds of each step."""
    _join(rank, ranks, store)
    mesh = slapo.init_mesh(pp=point["pp"], dp=point["dp"], tp=point["tp"], device="cpu")
    engine = _engine(point, work, mesh)
    torch.manual_seed(mesh.get_local_rank("dp"))
    samples = work.samples // point["dp"]
    tokens = torch.randint(work.vocabulary, (samples, work.length + 1))
    inputs = {
        "input_ids": tokens[:, :-1].contiguous(),
        "attention_mask": torch.ones(samples, work.length, dtype=torch.long),
    }
    batch = (inputs, tokens[:, 1:].contiguous())
    seconds = []
    for _ in range(work.warm_up + work.steps):
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(iter([batch]))
        seconds.append(time.perf_counter() - start)
    _leave(rank, seconds[work.warm_up :], pipe)


def _engine(point: Mapping[str, Any], work: Work, mesh: Any) -> Any:
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(work.config()).train()
    slapo.set_random_seed(0, mesh=mesh)
    sch = slapo.create_schedule(model, group=mesh["tp"])
    stages = point["pp"] if point["pp"] > 1 else None
    apply_schedule(sch, "gpt2", pipeline_cuts=stages, **recipe_options(point))
    engine, _ = slapo.build(
        sch,
        target="torch",
        mesh=mesh,
        loss_fn=token_loss,
        optimizer=torch.optim.AdamW,
        micro_batches=point["micro_batches"],
        **({"pipeline_schedule": point["schedule"]} if "schedule" in point else {}),
    )
    return engine


def throughput_of(seconds: list[float], work: Work) -> float:
    """Samples per second, by the median of a step."""
    return work.samples / median(seconds)


def _join(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=PATIENCE
    )


def _leave(rank: int, result: Any, pipe: Connection) -> None:
    if rank == 0:
        pipe.send(result)
    dist.barrier()
    dist.destroy_process_group()
