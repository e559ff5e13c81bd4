"""Run benchmarks: ``python -m benchmark [name ...] [--quick]``."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmark import (
    check,
    drafts,
    dry_run,
    engines,
    families,
    gpu,
    import_time,
    kernels,
    matching,
    nodes,
    partition,
    pipeline,
    report,
    scheduling,
    step_time,
    suggest,
    train,
    tuning,
    verify,
    weights,
)
from benchmark.measure import Progress, Result

BENCHMARKS: dict[str, Callable[[bool, Progress], Result]] = {
    "import_time": import_time.run,
    "scheduling": scheduling.run,
    "matching": matching.run,
    "step_time": step_time.run,
    "partition": partition.run,
    "pipeline": pipeline.run,
    "engines": engines.run,
    "check": check.run,
    "dry_run": dry_run.run,
    "tuning": tuning.run,
    "suggest": suggest.run,
    "weights": weights.run,
}

#: These have options of their own.
COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "families": families.main,
    "drafts": drafts.main,
    "kernels": kernels.main,
    "verify": verify.main,
    "train": train.main,
    "nodes": nodes.main,
    "gpu": gpu.main,
}

#: Draw a picture from the CSV file of a benchmark.
PLOTS: dict[str, Callable[[Path], Path | None]] = {
    "scheduling": report.plot_scheduling,
    "pipeline": pipeline.plot,
    "dry_run": dry_run.plot,
    "tuning": tuning.plot,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line names, show progress, write CSV files and the plot."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        COMMANDS[given[0]](given[1:])
        return
    parser = _parser()
    options = parser.parse_args(given)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    command = shlex.join(["python", "-m", "benchmark", *given])
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    names = options.names or list(BENCHMARKS)
    # It keeps what it has measured, and goes on from there.
    runs = {**BENCHMARKS, "tuning": partial(tuning.run, folder=options.results)}
    for number, name in enumerate(names, 1):
        label = f"{name} ({number} of {len(names)})"
        result = runs[name](options.quick, lambda text, label=label: say(f"{label}: {text}"))
        for path in report.write(name, result, command, options.results):
            say(f"{label}: wrote {path}")
        if not options.quick:  # the figures are for full size
            for target in result.targets:
                say(f"{label}: {target}")
    for name in names:
        picture = PLOTS[name](options.results) if name in PLOTS else None
        if picture:
            say(f"wrote {picture}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmark",
        description="Speed of slapo.",
        epilog=f"Commands with options of their own: {', '.join(COMMANDS)}.",
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder to write to (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    main()
