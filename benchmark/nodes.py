"""Run the published experiments: tables of points, each a command of ``python -m benchmark train``.

    python -m benchmark nodes --small               # all of them, shrunk to a CPU with two cores
    python -m benchmark nodes single_node           # as published, on a node with eight GPUs
    python -m benchmark nodes multi_node --list     # the commands

A point that runs out of memory, is refused, fails or hangs is a row with that outcome.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmark import report, train
from benchmark.experiments import EXPERIMENTS, NODE, Experiment, Point
from benchmark.measure import Progress
from benchmark.node_plots import draw
from benchmark.train_options import IMPLS, TrainOptions
from slapo.errors import with_nearest

#: Seconds of a point, after which it has the outcome `timeout`.
PATIENCE, SMALL_PATIENCE = 1800.0, 300.0


def main(arguments: Sequence[str]) -> None:
    """Run what ``python -m benchmark nodes`` is followed by."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        chosen = _chosen(given)
        if not given.list:
            report.made_folder(given.results)
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        for name, points in chosen.items():
            print(f"# {name}: {EXPERIMENTS[name].about}")
            print("\n".join(command_of(name, point) for point in points))
        return
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    for name, points in chosen.items():
        file = f"{name}_small" if given.small else name
        if not given.plot:
            (given.results / f"{file}.csv").unlink(missing_ok=True)
            _run(file, points, given, say)
        picture = draw(file, EXPERIMENTS[name], given.results)
        if picture:
            say(f"wrote {picture}")


def _chosen(given: argparse.Namespace) -> dict[str, list[Point]]:
    names = given.names or list(EXPERIMENTS)
    for name in names:
        if name not in EXPERIMENTS:
            known = f"there are {', '.join(EXPERIMENTS)}"
            raise ValueError(
                with_nearest(name, list(EXPERIMENTS), f"no experiment {name!r}; {known}")
            )
    found = {name: list(points_of(EXPERIMENTS[name], given.small)) for name in names}
    if given.only:
        found = {n: [p for p in ps if p.options.impl in given.only] for n, ps in found.items()}
    if given.first:
        found = {name: points[: given.first] for name, points in found.items()}
    return {name: points for name, points in found.items() if points}


def points_of(experiment: Experiment, small: bool) -> Iterator[Point]:
    """Its points, at one of the two sizes."""
    for point in experiment.points:
        yield point.shrunk() if small else point


def command_of(name: str, point: Point) -> str:
    """What runs a point by itself, on each node if it needs several."""
    options = point.options
    nodes = -(-options.gpus // NODE)
    start = ["python"]
    if nodes > 1:
        start = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(NODE)]
        start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
    place = ["--experiment", name, "--place", point.panel, point.group, point.side]
    results = ["--results", "benchmark/results"]
    return shlex.join([*start, "-m", "benchmark", *options.command(), *place, *results])


# --- running -------------------------------------------------------------------------------------
def _run(file: str, points: Sequence[Point], given: argparse.Namespace, say: Progress) -> None:
    patience = given.timeout or (SMALL_PATIENCE if given.small else PATIENCE)
    say(f"{file}: {train.heading()}")
    for number, point in enumerate(points, 1):
        row = run_point(point.options, patience)
        placed = {"panel": point.panel, "group": point.group, "side": point.side, **row}
        command = shlex.join(["python", "-m", "benchmark", *point.options.command()])
        path = report.extend(file, placed, command, given.results)
        say(f"{file} ({number} of {len(points)}): {train.line(row)}")
    say(f"{file}: wrote {path}")


def run_point(options: TrainOptions, patience: float) -> dict[str, Any]:
    """A row, whatever happens."""
    there = torch.cuda.device_count()
    try:
        options.check()
        if options.device == "cuda" and there < options.gpus:
            raise ValueError(
                f"it needs {options.gpus} GPUs, and this machine has {there}; run its command, "
                "which --list shows, on enough nodes, or pass --small"
            )
    except ValueError as error:
        return {
            **options.described(),
            **train.without_figures("refused", str(error)),
            **train.peers(),
        }
    return train.run(options, patience, apart=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmark nodes", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(EXPERIMENTS)}; default: all")
    add("--small", action="store_true", help="tiny models on a CPU, at most two ranks")
    add("--list", action="store_true", help="show the commands of the points, and end")
    add("--plot", action="store_true", help="draw what the CSV files have, and end")
    add("--only", nargs="+", choices=IMPLS, help="points of these sides")
    add("--first", type=int, default=0, help="so many points of each experiment")
    add("--timeout", type=float, default=0.0, help="seconds of a point")
    add("--results", type=Path, default=report.RESULTS, help="folder to write to (%(default)s)")
    return parser
