"""Training steps of one model, one way: speed and peak memory.

    python -m benchmark train --model bert --impl slapo-torch --gpus 2 --tp 2 --small
    torchrun --nnodes 2 --nproc-per-node 8 ... -m benchmark train --gpus 16 --tp 8 ...

It starts its ranks itself, or is one of those that torchrun has started. What a side cannot do, and
what takes more memory than there is, are results like others, with status 1. The last line is JSON.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmark import report
from benchmark.train_options import TrainOptions, parse, parser
from benchmark.train_ranks import OK, launch, measured, without_figures
from slapo.autotune.values import report_failure

__all__ = ["heading", "line", "main", "peers", "run", "without_figures"]

#: Columns of the line that is shown, and how wide they are.
_SHOWN = {
    "model": 12,
    "impl": 15,
    "gpus": 4,
    "tp": 3,
    "pp": 3,
    "batch_size": 10,
    "throughput": 10,
    "step_ms": 10,
    "peak_mib": 10,
    "outcome": 13,
}


def main(arguments: Sequence[str]) -> None:
    """Run what ``python -m benchmark train`` is followed by."""
    try:
        options, given = parse(arguments)
        if given.results is not None:
            report.made_folder(given.results)
    except ValueError as error:
        parser().error(str(error))
    try:
        row = run(options, given.timeout)
        if not _tells(row):
            return
        show(row)
        if given.results is not None:
            command = shlex.join(["python", "-m", "benchmark", "train", *arguments])
            placed = {**dict(zip(("panel", "group", "side"), given.place, strict=True)), **row}
            path = report.extend(given.experiment or "train", placed, command, given.results)
            print(f"wrote {path}")
        # A figure that there is not is none: a tuner would read an empty one.
        print(json.dumps({name: value for name, value in row.items() if value != ""}), flush=True)
        if row["outcome"] != OK:
            if "RANK" in os.environ:
                os._exit(1)  # torchrun ends the other ranks, which may wait for this one
            sys.exit(1)
    finally:
        if dist.is_initialized() and "RANK" in os.environ:
            dist.destroy_process_group()


def _tells(row: dict[str, Any]) -> bool:
    """Whether this rank of a job is the one that says how it ended: the first to fail, if one."""
    if "RANK" not in os.environ:
        return True
    if row["outcome"] == OK or not dist.is_initialized():
        return os.environ["RANK"] == "0"
    told: int = dist.distributed_c10d._get_default_store().add("slapo/benchmark/told", 1)
    return told == 1


def run(options: TrainOptions, timeout: float, apart: bool = False) -> dict[str, Any]:
    """A point's row.

    Parameters
    ----------
    options
        Checked ones.
    timeout
        Seconds after which ranks that were started here are ended.
    apart
        In processes of its own, also if it has one rank; what they print is not shown.
    """
    if apart or ("RANK" not in os.environ and options.gpus > 1):
        found = launch(options, timeout, quiet=apart)
    else:
        found = _here(options)
    return {**options.described(), **found, **peers()}


def _here(options: TrainOptions) -> dict[str, Any]:
    was_up, disabled = dist.is_initialized(), logging.root.manager.disable
    threads = torch.get_num_threads()
    logging.disable(logging.WARNING)
    try:
        return measured(options)
    finally:
        logging.disable(disabled)
        torch.set_num_threads(threads)
        if dist.is_initialized() and not (was_up or "RANK" in os.environ):
            dist.destroy_process_group()


def peers() -> dict[str, str]:
    """Versions of the libraries that sides are of."""
    return {
        name.replace("-", "_"): report.version(name)
        for name in ("deepspeed", "megatron-core", "accelerate")
    }


def heading() -> str:
    """Of the lines that :func:`line` gives."""
    return " ".join(f"{name:>{width}}" for name, width in _SHOWN.items())


def line(row: dict[str, Any]) -> str:
    """A point as a line of a table."""
    reason = f"  {row['reason']}" if row["reason"] else ""
    return " ".join(f"{row[name]!s:>{width}}" for name, width in _SHOWN.items()) + reason


def show(row: dict[str, Any]) -> None:
    """A table of one line, and for a run that went well what readers of logs look for."""
    print(heading())
    print(line(row))
    if row["outcome"] == OK:
        print(
            f"parameters per rank: {row['parameters']:,}, samples/s: {row['throughput']}, "
            f"peak memory: {row['peak_mib']:.0f} MiB"
        )
    elif row["outcome"] == "out_of_memory":
        print("out of memory")
    if row["outcome"] in ("out_of_memory", "refused"):
        report_failure(row["outcome"], row["reason"])
    sys.stdout.flush()
