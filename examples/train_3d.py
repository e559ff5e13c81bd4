"""Train a model with pipeline, data and tensor parallelism; the target is one word.

    torchrun --nproc-per-node 8 examples/train_3d.py --model gpt2 --pp 2 --dp 2 --tp 2

Models of all families that have a recipe, on real text and images that need no download: the
source of Python's own standard library, and scikit-learn's handwritten digits. ``--help`` lists
the options.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One process for each core is all that a CPU run wants; more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import slapo
from examples.parallel_models import MODELS, Family, Sizes, schedule
from slapo.utils.report import report_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Schedules that run two stages on each rank.
LOOPED = ("interleaved_1f1b", "zero_bubble", "zbv")


def main() -> None:
    """What a recipe, a runtime or the batch's size refuses is one line, without a traceback."""
    args = parse()
    try:
        run(args)
        dist.barrier()
        dist.destroy_process_group()
    except (ValueError, slapo.SlapoError) as error:
        raise SystemExit(f"train_3d.py: {error}") from error


def run(args: argparse.Namespace) -> list[float]:
    """Schedule, build, train; gives the losses."""
    mesh = slapo.init_mesh(pp=args.pp, dp=args.dp, tp=args.tp, device=args.device)
    family = MODELS[args.model]
    sizes = Sizes(args.hidden, args.layers, args.heads, args.length, dropout=args.dropout)

    # The same values everywhere; from here on random numbers differ where they should.
    torch.manual_seed(args.seed)
    with slapo.init_empty_weights(enable=args.meta):
        model = family.build(sizes).train()
    slapo.set_random_seed(args.seed, mesh=mesh)
    sch = slapo.create_schedule(model, mesh=mesh)
    stages = args.pp * (2 if args.schedule in LOOPED else 1)
    schedule(sch, family, stages, args.checkpoint_ratio, **recipe_options(args))
    engine, _ = slapo.build(
        sch,
        target=args.target,
        mesh=mesh,
        loss_fn=family.token_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=args.lr, weight_decay=0.0),
        micro_batches=args.micro_batches,
        clip_grad_norm=args.clip,
        dtype=DTYPES[args.dtype],
        **target_options(args),
    )
    return train(engine, batches(family, args, mesh.get_local_rank("dp")), args)


def recipe_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line asks of the recipe; it refuses what the family cannot have."""
    names = ("sequence_parallel", "compile", "fused_loss")
    return {name: True for name in names if getattr(args, name)}


def target_options(args: argparse.Namespace) -> dict[str, Any]:
    """What only one target knows."""
    if args.target == "torch":
        return {"pipeline_schedule": args.schedule, "data_parallel": args.data_parallel}
    if args.schedule != "1f1b":
        raise ValueError(f"--schedule {args.schedule} is one of target torch; others run 1f1b")
    return {"zero": args.zero} if args.target == "deepspeed" else {}


def batches(family: Family, args: argparse.Namespace, dp: int) -> Iterator[tuple[Any, Tensor]]:
    """Text or images for one data-parallel rank: each has its own."""
    draw = family.data(args.batch, args.length, seed=args.seed + dp)
    while True:
        yield family.batch(draw(), labeled=args.fused_loss)


def train(engine: Any, data: Iterator[Any], args: argparse.Namespace) -> list[float]:
    """Some steps, with a bar on the first rank."""
    first = dist.get_rank() == 0
    console = Console(stderr=True)
    losses, seconds = [], []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not first) as bar:
        layout = f"{args.model} on {args.target}, pp {args.pp} x dp {args.dp} x tp {args.tp}"
        task = bar.add_task(layout, total=args.steps, loss=float("nan"))
        for _ in range(args.steps):
            start = time.perf_counter()
            losses.append(engine.train_batch(data).item())
            seconds.append(time.perf_counter() - start)
            bar.update(task, advance=1, loss=losses[-1])
    memory = report_memory("at the end").peak_allocated or 0
    if first:
        samples = args.batch * args.dp / statistics.median(seconds)
        tokens = f"{samples * args.length:.0f} tokens/s"
        rate = f"{samples:.0f} images/s" if MODELS[args.model].pixels else tokens
        print(f"{layout}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {rate}")
        # What slapo.framework_dialect.get_dialect_cls("log_parser", args.target) reads.
        print(
            f"parameters per rank: {sum(p.numel() for p in engine.parameters()):,}, "
            f"samples/s: {samples:.2f}, peak memory: {memory / 2**20:.0f} MiB"
        )
    return losses


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options, by default of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="gpt2")
    add("--target", choices=("torch", "deepspeed", "megatron"), default="torch")
    add("--pp", type=int, default=1, help="pipeline ranks")
    add("--dp", type=int, default=1, help="data-parallel replicas")
    add("--tp", type=int, default=1, help="tensor-parallel ranks")
    add("--micro-batches", type=int, default=4)
    add("--schedule", choices=("1f1b", "gpipe", *LOOPED), default="1f1b", help="of the pipeline")
    add("--checkpoint-ratio", type=float, default=0.0, help="share of layers to recompute")
    add("--sequence-parallel", action="store_true", help="deal tokens out between split layers")
    add("--fused-loss", action="store_true", help="never hold whole logits; without a pipeline")
    add("--compile", action="store_true", help="each layer by torch.compile")
    add("--dtype", choices=sorted(DTYPES), default="float32")
    add("--data-parallel", choices=("ddp", "fsdp"), default="ddp", help="for target torch")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=None, help="for target deepspeed")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=8, help="sequences, or images, per data-parallel rank")
    add("--length", type=int, default=128, help="tokens per sequence")
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--dropout", type=float, default=0.0)
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=2013)
    add("--device", default=None, help="cpu or cuda; the accelerator if there is one")
    add("--meta", action="store_true", help="create each rank's weights only")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
