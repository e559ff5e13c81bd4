"""All that is open for one model on one node, as a configuration of the tuner.

From the root of the repository::

    python -m slapo.autotune.tune --config benchmark/train_space.py --db trials.db

A trial is a command of ``python -m benchmark train``; a point has values of its options. All points
train on the same number of samples a step. Without GPUs it is the small form on two ranks.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# The tuner loads this file by its path.
sys.path.append(str(Path(__file__).parent.parent))

from benchmark.train_options import DTYPES, TrainOptions
from benchmark.train_ours import recipe_options
from slapo.cost import dryrun

_GPUS = torch.cuda.device_count()
_NODE = TrainOptions("gpt2", gpus=_GPUS or 2, seq_len=1024, dtype="bfloat16", device="cuda")
#: What is trained, on how many ranks; change it to what you have.
JOB = _NODE if _GPUS else _NODE.shrunk()
#: Samples of a step, of all replicas: their number divides it.
SAMPLES = (8 if _GPUS else 4) * JOB.gpus
#: Of ``slapo.cost.MACHINES``; its figures only rank the points.
MACHINE = "h100-80gb" if _GPUS else "cpu"

#: Package of each engine.
_ENGINES = {"slapo-torch": "torch", "slapo-deepspeed": "deepspeed"}
if _GPUS:
    _ENGINES["slapo-megatron"] = "megatron"


def space(choose: Callable[[str, list[Any]], Any]) -> dict[str, Any]:
    """Ranks of each kind, engine, ZeRO stage, order, micro-batches, kernels and recomputation."""
    tp = choose("tp", _divisors(JOB.gpus))
    pp = choose("pp", _divisors(JOB.gpus // tp))
    dp = JOB.gpus // (tp * pp)
    batch = SAMPLES // dp
    engines = [name for name, package in _ENGINES.items() if importlib.util.find_spec(package)]
    impl = choose("impl", engines)
    point = {
        "tp": tp,
        "pp": pp,
        "impl": impl,
        "batch_size": batch,
        "micro_batches": choose("micro_batches", [n for n in _divisors(batch) if n >= pp]),
        "kernels": choose("kernels", ["none", "ops", "fused"]),
        "checkpoint_ratio": choose("checkpoint_ratio", [0.0, 0.5, 1.0]),
    }
    if impl == "slapo-torch" and pp > 1:
        point["schedule"] = choose("schedule", ["1f1b", "gpipe"])
    stages = _stages_of_zero(impl, pp) if dp > 1 else []
    if stages:
        point["zero"] = choose("zero", stages)
    return point


def predict(point: dict[str, Any]) -> Any:
    """The dry run of a point."""
    options = replace(JOB, **point)
    target, zero = options.impl.removeprefix("slapo-"), options.zero or 0
    is_torch = target == "torch"
    return dryrun(
        options.spec.key,
        options.spec.config(options.small, options.seq_len),
        mesh={"pp": options.pp, "dp": options.dp, "tp": options.tp},
        machine=MACHINE,
        batch=options.batch_size,
        seq_len=options.seq_len,
        micro_batches=options.parts,
        schedule=options.schedule,
        target=target,
        data_parallel="fsdp" if is_torch and zero == 3 else "ddp",
        zero=0 if is_torch else zero,
        dtype=None if options.dtype == "float32" else DTYPES[options.dtype],
        optimizer=functools.partial(torch.optim.AdamW, fused=True),
        **recipe_options(options),
    )


def command(point: dict[str, Any]) -> list[str]:
    """A trial, or the best point again."""
    return [sys.executable, "-m", "benchmark", *replace(JOB, **point).command()]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _stages_of_zero(impl: str, pp: int) -> list[int]:
    """Those that an engine has: of PyTorch 3 is FSDP2."""
    if impl == "slapo-torch":
        return [0, 3]
    if impl == "slapo-deepspeed":
        return [0, 1, 2, 3] if pp == 1 else [0, 1]
    return []
