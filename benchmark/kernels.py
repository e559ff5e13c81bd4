"""Training steps of recipes beside Transformers as it comes, torch.compile, and two other ways to
split a model: time and peak memory.

Sides take steps in turn, so that what else runs on the machine disturbs all alike. A figure is a
median; peaks are of processes of their own, above what the model itself takes.

    python -m benchmark kernels [--quick] [--device cuda] [--rounds N]

With ``--device cuda`` models have the published sizes (BERT-large, GPT-2 medium, T5-base, a Llama
of 1.2 billion parameters) and run in bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import slapo
from benchmark import kernel_ranks, report
from benchmark.kernel_cases import CASES, Case, check_losses
from benchmark.measure import Progress, Result, Target
from slapo.model_schedule import apply_schedule

#: Speed of ours against Transformers'.
FASTER = 1.15
#: Peak memory of ours above the model against Transformers'.
LESS_MEMORY = 0.6

Step = Callable[[], float]


# --- sides ---------------------------------------------------------------------------------------
def _as_it_comes(case: Case, model: nn.Module) -> nn.Module:
    return model


def _compiled(case: Case, model: nn.Module) -> nn.Module:
    model.compile()
    return model


def _ours(case: Case, model: nn.Module, **options: Any) -> nn.Module:
    return slapo.build(apply_schedule(model, case.key, **options))[0]


@dataclass(frozen=True)
class Side:
    """A way to run a model, and whether the optimizer is one kernel."""

    make: Callable[[Case, nn.Module], nn.Module]
    fused_optimizer: bool = False


_NO = {"kernels": False, "attn_op_name": None}
SIDES: dict[str, Side] = {
    "hf": Side(_as_it_comes),
    "hf, fused AdamW": Side(_as_it_comes, True),
    "hf, torch.compile": Side(_compiled),
    "hf, torch.compile, fused AdamW": Side(_compiled, True),
    "ours, attention": Side(functools.partial(_ours, **{**_NO, "attn_op_name": "auto"})),
    "ours, kernels": Side(functools.partial(_ours, **{**_NO, "kernels": True})),
    "ours, fused loss": Side(functools.partial(_ours, **_NO, fused_loss=True)),
    "ours, compiled layers": Side(functools.partial(_ours, **_NO, compile=True)),
    "ours, all": Side(functools.partial(_ours, fused_loss=True), True),
    "ours, all, compiled layers": Side(
        functools.partial(_ours, fused_loss=True, compile=True), True
    ),
}
OURS = ("ours, all", "ours, all, compiled layers")


def step_of(case: Case, side: Side, batch: int, device: str) -> Step:
    """Forward, backward and optimizer; returns the loss."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = side.make(case, case.build().to(device, dtype))
    inputs = case.inputs(batch, device)
    given = {"fused": True} if side.fused_optimizer else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **given)

    def step() -> float:
        loss: Tensor = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for an accelerator, too

    return step


# --- one process ---------------------------------------------------------------------------------
def measure_steps(
    cases: dict[str, Case],
    sides: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    device: str,
    say: Progress,
) -> Result:
    """Time and peak memory of every side."""
    result = Result()
    clock = time.process_time if device == "cpu" else time.perf_counter
    for name, case in cases.items():
        for batch in batches:
            steps = {side: step_of(case, SIDES[side], batch, device) for side in sides}
            losses = {side: [step() for _ in range(2)] for side, step in steps.items()}
            check_losses(losses)
            seconds: dict[str, list[float]] = {side: [] for side in steps}
            for turn in range(rounds):
                for side in rotated(list(steps), turn):
                    start = clock()
                    steps[side]()
                    seconds[side].append(clock() - start)
                say(f"{name}, batch {batch}: round {turn + 1} of {rounds}")
            del steps
            gc.collect()
            peaks = {side: _peak(name, side, batch, device, cases) for side in sides}
            _report(result, name, batch, seconds, peaks, rounds)
            for row in result.rows[-len(sides) :]:
                say(
                    f"{name}, batch {batch}, {row['side']}: {row['speed']} x, {row['peak_mib']} MiB"
                )
    return result


def rotated(sides: list[str], turn: int) -> list[str]:
    """The sides, beginning with another one in each turn."""
    first = turn % len(sides)
    return sides[first:] + sides[:first]


def _report(
    result: Result,
    name: str,
    batch: int,
    seconds: dict[str, list[float]],
    peaks: dict[str, float],
    rounds: int,
) -> None:
    base = seconds["hf"]
    speeds = {}
    for side, found in seconds.items():
        speeds[side] = median(b / own for b, own in zip(base, found, strict=True))
        result.rows.append(
            {
                "model": name,
                "batch": batch,
                "side": side,
                "rounds": rounds,
                "seconds": round(median(found), 4),
                "speed": round(speeds[side], 3),
                "peak_mib": round(peaks[side]),
                "peak": round(peaks[side] / max(peaks["hf"], 1e-9), 3),
            }
        )
    best = max((side for side in OURS if side in speeds), key=lambda side: speeds[side])
    other = max((s for s in speeds if s.startswith("hf")), key=lambda side: speeds[side])
    where = f"{name}, batch {batch}"
    result.targets += [
        Target(f"{where}: time of {best} to hf's", 1 / speeds[best], 1 / FASTER),
        Target(f"{where}: time of {best} to {other}'s", speeds[other] / speeds[best], 1.0),
    ]
    if batch >= 4:
        value = peaks["ours, all"] / max(peaks["hf"], 1e-9)
        result.targets.append(Target(f"{where}: peak memory of ours to hf's", value, LESS_MEMORY))


def _peak(name: str, side: str, batch: int, device: str, cases: dict[str, Case]) -> float:
    """MiB above the model of a forward and backward pass, in a process of its own."""
    table = next(key for key, value in CASES.items() if value is cases)
    command = [sys.executable, "-m", "benchmark.kernels", table, name, side, str(batch), device]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def peak_of(case: Case, side: Side, batch: int, device: str) -> float:
    """As `_peak`, in this process."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = side.make(case, case.build().to(device, dtype))
    inputs = case.inputs(batch, device)
    model(**case.inputs(1, device)).loss.backward()  # what is compiled and made once
    model.zero_grad()
    gc.collect()
    before = memory(device, reset=True)
    model(**inputs).loss.backward()
    return (memory(device) - before) / 2**20


def memory(device: str, reset: bool = False) -> float:
    """Bytes: what is in use now, with `reset`; else the peak since then."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return float(torch.cuda.memory_allocated())
        return float(torch.cuda.max_memory_allocated())
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    key = "VmRSS" if reset else "VmHWM"
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(key))
    return 1024.0 * float(line.split()[1])


# --- command -------------------------------------------------------------------------------------
def main(arguments: Sequence[str]) -> None:
    """Run what ``python -m benchmark kernels`` is followed by."""
    parser = argparse.ArgumentParser("python -m benchmark kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models, few sides, one round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7, help="of each side (%(default)s)")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder to write to (%(default)s)"
    )
    options = parser.parse_args(arguments)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    with _quiet(options.device):
        results = _measure(options, say)
    command = shlex.join(["python", "-m", "benchmark", "kernels", *arguments])
    for name, result in results.items():
        suffix = "_cuda" if options.device == "cuda" else ""
        for path in report.write(f"{name}{suffix}", result, command, options.results):
            say(f"wrote {path}")
        for target in result.targets:
            print(target)


@contextmanager
def _quiet(device: str) -> Iterator[None]:
    """Without the log, and on a CPU on one thread; the process is another's too."""
    disabled, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.WARNING)
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        logging.disable(disabled)
        torch.set_num_threads(threads)


def _measure(options: argparse.Namespace, say: Progress) -> dict[str, Result]:
    cases = CASES["quick" if options.quick else options.device]
    rounds = 1 if options.quick else options.rounds
    sides = ("hf", "ours, all") if options.quick else tuple(SIDES)
    batches = (4,) if options.quick else (1, 4)
    steps = measure_steps(cases, sides, batches, rounds, options.device, say)
    results = {"kernels": steps}
    if options.device == "cpu":
        results |= kernel_ranks.measure(cases["llama"], batches, rounds, options.quick, say)
    return results


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    table, model_name, side_name, size, where = sys.argv[1:]
    print(json.dumps(peak_of(CASES[table][model_name], SIDES[side_name], int(size), where)))
