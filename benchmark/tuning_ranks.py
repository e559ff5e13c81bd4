"""Processes of the tuner's benchmark: they train one point, or measure the machine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
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


@dataclass(frozen=True)
class Run:
    """What training a point gave.

    Parameters
    ----------
    seconds
        Wall time of each step.
    others
        The share of the machine's cores that other programs took meanwhile; 0 where the system
        does not tell.
    """

    seconds: tuple[float, ...]
    others: float

    def throughput(self, work: Work) -> float:
        """Samples per second, by the median of a step."""
        return work.samples / median(self.seconds)


def train_main(
    rank: int, ranks: int, point: Mapping[str, Any], work: Work, store: str, pipe: Connection
) -> None:
    """Life of a rank that trains a point; rank 0 sends the :class:`Run`."""
    logging.getLogger("slapo").setLevel(logging.WARNING)
    _join(rank, ranks, store)
    mesh = slapo.init_mesh(pp=point["pp"], dp=point["dp"], tp=point["tp"], device="cpu")
    engine = _engine(point, work, mesh)
    batch = _batch(work, work.samples // point["dp"], mesh.get_local_rank("dp"))
    for _ in range(work.warm_up):
        engine.train_batch(iter([batch]))
    seconds = []
    dist.barrier()
    busy, own, begin = busy_seconds(), time.process_time(), time.perf_counter()
    for _ in range(work.steps):
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(iter([batch]))
        seconds.append(time.perf_counter() - start)
    dist.barrier()
    mine = torch.tensor(time.process_time() - own, dtype=torch.float64)
    dist.all_reduce(mine)
    passed = (time.perf_counter() - begin) * (os.cpu_count() or 1)
    others = max(0.0, busy_seconds() - busy - mine.item()) / passed
    _leave(rank, Run(tuple(seconds), others), pipe)


def busy_seconds() -> float:
    """Processor seconds of all programs since the system started; 0 where it does not tell."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [int(word) for word in path.read_text().split("\n")[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _batch(work: Work, samples: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(seed)
    tokens = torch.randint(work.vocabulary, (samples, work.length + 1))
    return {"input_ids": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


def _engine(point: Mapping[str, Any], work: Work, mesh: Any) -> Any:
    from transformers import GPT2LMHeadModel

    staged: dict[str, Any] = {}
    if point["pp"] > 1:
        staged = {"pipeline_cuts": point["pp"], "example_inputs": _batch(work, 2, 0)[0]}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(work.config()).train()
    slapo.set_random_seed(0, mesh=mesh)
    sch = slapo.create_schedule(model, group=mesh["tp"])
    apply_schedule(sch, "gpt2", **staged, **recipe_options(point))
    engine, _ = slapo.build(
        sch,
        mesh=mesh,
        loss_fn=token_loss,
        optimizer=torch.optim.AdamW,
        micro_batches=point["micro_batches"],
        **({"pipeline_schedule": point["schedule"]} if "schedule" in point else {}),
        **point.get("engine", {"target": "torch"}),
    )
    return engine


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
