"""Everything that needs a GPU, in one command of at most nine minutes on an H100.

    python -m benchmark gpu              # or: make gpu
    python -m benchmark gpu --small      # tiny models on the device that is there, a CPU too

Tests marked ``gpu``; one engine in a group of one rank (NCCL, or gloo on a CPU); training steps of
GPT-2, BERT, Llama and T5 in bfloat16 as Transformers runs them (eager, SDPA, ``torch.compile``) and
by Slapo's recipes, with peak memory; and the figures of the dry run beside the measured ones. It
writes ``gpu.csv``, ``gpu.md`` and ``gpu.png``. Parts for which the time is too short are left out.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import importlib.util
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import slapo
from benchmark import report
from benchmark.kernel_cases import CASES, Case, check_losses
from benchmark.kernels import SIDES, Side, memory, rotated, step_of
from benchmark.measure import Progress, Result

#: Seconds for all of it, and the most that one model with all of its sides takes.
LIMIT, ONE_MODEL = 540.0, 120.0
#: Samples of a step.
BATCH = 4


def _eager(case: Case, model: nn.Module) -> nn.Module:
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


WAYS: dict[str, Side] = {
    "hf": SIDES["hf, fused AdamW"],
    "hf, eager": Side(_eager, True),
    "hf, torch.compile": SIDES["hf, torch.compile, fused AdamW"],
    "ours": SIDES["ours, all"],
    "ours, compiled layers": SIDES["ours, all, compiled layers"],
}


def main(arguments: Sequence[str]) -> None:
    """Run what ``python -m benchmark gpu`` is followed by."""
    parser = argparse.ArgumentParser("python -m benchmark gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny models, on a CPU too")
    parser.add_argument("--rounds", type=int, default=7, help="of each side (%(default)s)")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder to write to (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no GPU here; --small runs the same with tiny models")
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = CASES["small" if options.small else "cuda"]
    rounds = 2 if options.small else options.rounds
    say(f"tests: {_tests()}")
    say(f"engine: {_engine(device)}")
    rows: list[dict[str, Any]] = []
    for name, case in cases.items():
        if time.perf_counter() - start > LIMIT - ONE_MODEL:
            say(f"{name}: left out, as {LIMIT:.0f} s would not be enough")
            continue
        rows += _steps(name, case, device, rounds, say)
        gc.collect()
    command = shlex.join(["python", "-m", "benchmark", "gpu", *arguments])
    paths = report.write("gpu", Result(rows), command, options.results)
    paths += [_table(rows, options.results), *_plot(rows, options.results)]
    for path in paths:
        say(f"wrote {path}")


def _tests() -> str:
    """The closing line of pytest for the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/op", "tests/utils"]
    more = ["tests/test_random.py", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        raise RuntimeError(f"tests marked gpu failed:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]


def _engine(device: str) -> str:
    """Train a model by an engine in a group of one rank, and compare with the plain model."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    batch = torch.randn(8, 64, device=device), torch.randn(8, 64, device=device)
    loss_fn = nn.functional.mse_loss
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    mesh = slapo.init_mesh(device=device)
    sch = slapo.create_schedule(copy.deepcopy(plain), mesh=mesh)
    sch["0"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    engine, _ = slapo.build(sch, target="torch", mesh=mesh, loss_fn=loss_fn, optimizer=sgd)
    optimizer = sgd(plain.parameters())
    for _ in range(5):
        loss = loss_fn(plain(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(engine.train_batch(iter([batch])), loss.detach())
    backend = dist.get_backend()
    dist.destroy_process_group()
    return f"5 steps by {backend} equal those of the plain model"


def _steps(name: str, case: Case, device: str, rounds: int, say: Progress) -> list[dict[str, Any]]:
    """Rows for one model: each way takes a step in turn."""
    # What a compiler makes of tiny models on a CPU takes minutes, and is of no interest.
    sides = {way: side for way, side in WAYS.items() if device == "cuda" or "compile" not in way}
    steps = {way: step_of(case, side, BATCH, device) for way, side in sides.items()}
    check_losses({way: [step() for _ in range(2)] for way, step in steps.items()})
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    peaks: dict[str, float] = {}
    for turn in range(rounds):
        for way in rotated(list(steps), turn):
            before = memory(device, reset=True)
            begun = time.perf_counter()
            steps[way]()  # its loss waits for the device
            seconds[way].append(time.perf_counter() - begun)
            peaks[way] = (memory(device) - before) / 2**20
        say(f"{name}: round {turn + 1} of {rounds}")
    steps.clear()
    predicted = slapo.dryrun(
        lambda sch: slapo.apply_schedule(sch, case.key, fused_loss=True),
        case.build,
        machine="h100-80gb" if device == "cuda" else "cpu",
        batch=BATCH,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        inputs=lambda samples: case.inputs(samples, "cpu"),
    )
    rows = []
    for way, found in seconds.items():
        speed = median(base / own for base, own in zip(seconds["hf"], found, strict=True))
        row = {"model": name, "way": way, "batch": BATCH, "rounds": rounds}
        row |= {"seconds": round(median(found), 5), "speed": round(speed, 3)}
        row |= {"peak_mib": round(peaks[way])}
        is_ours = way == "ours"
        row |= {"predicted_seconds": round(predicted.time.total, 5) if is_ours else ""}
        rows.append(row)
        say(f"{name}, {way}: {row['seconds']} s, {row['speed']} x, {row['peak_mib']} MiB")
    return rows


def _table(rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """A table for the README."""
    lines = ["| model | way | step | speed | peak above the model | predicted |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        predicted = row["predicted_seconds"]
        cells = [row["model"], row["way"], f"{1e3 * row['seconds']:.1f} ms", f"{row['speed']:.2f}"]
        cells += [f"{row['peak_mib']} MiB", f"{1e3 * predicted:.1f} ms" if predicted else ""]
        lines.append(f"| {' | '.join(cells)} |")
    path = folder / "gpu.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _plot(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Bars of the speed against Transformers; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    models = list(dict.fromkeys(row["model"] for row in rows))
    width = 0.8 / len(WAYS)
    for place, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
        speeds = [row["speed"] for row in rows if row["way"] == way]
        axes.bar([n + place * width for n in range(len(models))], speeds, width, label=way)
    axes.axhline(1.0, color="gray", linewidth=1)
    axes.set_xticks([n + 0.4 - width / 2 for n in range(len(models))], labels=models)
    axes.set_ylabel("speed of a training step, Transformers = 1")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    path = folder / "gpu.png"
    figure.savefig(path, dpi=120)
    return [path]
