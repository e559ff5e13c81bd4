"""Schedule a small GPT-2 and a small BERT, prove that nothing changed, and train them.

Each model is trained three times from the same seed on the same text, each time in processes of
its own: as Transformers defines it, with a schedule in one process, and with the same schedule in
two processes that share every layer (tensor parallelism). The loss curves must agree.

    python examples/quickstart.py [--steps N] [--models gpt2 bert] [--device cuda]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# One thread per process: two processes of two threads each would fight for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

BATCH, LENGTH = 8, 128
#: Largest relative difference of two losses. Sums over ranks are taken in another order, which
#: changes the last bits (1e-7) of float32; AdamW's division by small second moments amplifies that.
TOLERANCE = 1e-4
COLUMNS = (
    "run",
    "first loss",
    "last loss",
    "max. difference",
    "tokens/s",
    "peak MiB",
    "parameters",
)


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: str
    scheduled: bool
    processes: int
    device: str = "cpu"

    @property
    def title(self) -> str:
        """What the table calls it."""
        how = "scheduled" if self.scheduled else "as defined"
        return f"{self.model}, {how}, {self.processes} process{'es' * (self.processes > 1)}"


@dataclass
class Result:
    """What a run measured; memory is that of its largest process, in MiB."""

    losses: list[float]
    tokens_per_second: float
    peak_memory: float
    parameters: int


# --- one run, in processes of its own ------------------------------------------------------------
def work(run: Run, steps: int, output: Path) -> None:
    """Train in this process, which may be one of several."""
    # Imported here: the parent process only starts others and needs no models.
    from examples.small_models import MODELS
    from examples.text import Batches, standard_library

    rank, device = start(run)
    define, _ = MODELS[run.model]
    torch.manual_seed(0)
    model = define().to(device)
    text, masked = standard_library().to(device), run.model == "bert"
    if run.scheduled:
        example = Batches(text, BATCH, LENGTH, masked)()
        model = schedule(model, run, example, show=rank == 0 and run.processes == 1)
    result = train(model, Batches(text, BATCH, LENGTH, masked), steps, run, rank)
    if run.processes > 1:
        result.peak_memory = largest(result.peak_memory)
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        output.write_text(json.dumps(asdict(result)))


def start(run: Run) -> tuple[int, torch.device]:
    """This process's rank and device; several processes without a GPU each talk over gloo."""
    rank = int(os.environ.get("RANK", "0"))
    own_gpu = run.device != "cpu" and run.processes <= torch.accelerator.device_count()
    device = torch.device(run.device, rank if own_gpu else None)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    if run.processes > 1:
        backend = dist.get_default_backend_for_device(run.device) if own_gpu else "gloo"
        dist.init_process_group(backend)
    return rank, device


def schedule(model: nn.Module, run: Run, example: dict[str, torch.Tensor], show: bool) -> nn.Module:
    """Create the schedule, apply the primitives under verification, and build."""
    import slapo
    from examples.small_models import MODELS

    _, primitives = MODELS[run.model]
    slapo.get_logger().setLevel("WARNING")
    sch = slapo.create_schedule(model)
    example = {name: tensor[:2, :31] for name, tensor in example.items()}
    with slapo.Verify(sch, example_inputs=example):
        primitives(sch)
    if show:
        Console(soft_wrap=True).print(f"\n[bold]{run.model}: the schedule, verified[/bold]")
        print(sch, flush=True)
    built, _ = slapo.build(sch)
    return built


def train(model: nn.Module, batches: Callable[[], dict], steps: int, run: Run, rank: int) -> Result:
    """AdamW for some steps."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    forget_peak(run.device)
    with progress(disable=rank != 0) as bar:
        task = bar.add_task(run.title, total=steps, loss="")
        for _ in range(steps):
            start = time.perf_counter()
            loss = model(**batches()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            bar.update(task, advance=1, loss=f"loss {losses[-1]:.3f}")
    return Result(
        losses,
        BATCH * LENGTH / statistics.median(seconds),
        peak_memory(run.device),
        sum(p.numel() for p in model.parameters()),
    )


def progress(disable: bool) -> Progress:
    """A bar with the loss beside it."""
    return Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.fields[loss]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=disable,
    )


def peak_memory(device: str) -> float:
    """MiB at most since :func:`forget_peak`: of tensors on a GPU, else of the whole process.

    On a CPU 0 where the system has no ``/proc``.
    """
    if device != "cpu":
        return torch.accelerator.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def forget_peak(device: str) -> None:
    """Start a new measurement of the peak: imports and verification are not training."""
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def largest(value: float) -> float:
    """The maximum over all processes."""
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


# --- all runs ------------------------------------------------------------------------------------
def launch(run: Run, steps: int) -> Result:
    """Start the processes of a run and wait for its result."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        worker = [__file__, "--worker", json.dumps(asdict(run)), str(steps), str(output)]
        command = [sys.executable, *worker]
        if run.processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--no-python"]
            launcher += ["--nproc-per-node", str(run.processes)]
            command = [sys.executable, *launcher, *command]
        subprocess.run(command, check=True)
        return Result(**json.loads(output.read_text()))


def compare(results: dict[Run, Result]) -> tuple[Table, bool]:
    """The table, and whether all losses agree with those of the model as defined."""
    table = Table(
        title="AdamW on the source of the standard library",
        caption="memory and parameters are those of one process",
    )
    for column in COLUMNS:
        side = "left" if column == "run" else "right"
        table.add_column(column, justify=side, no_wrap=True)
    agree = True
    for run, result in results.items():
        base = next(r for other, r in results.items() if other.model == run.model)
        pairs = zip(result.losses, base.losses, strict=True)
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        agree &= worst <= TOLERANCE
        table.add_row(
            run.title,
            f"{result.losses[0]:.4f}",
            f"{result.losses[-1]:.4f}",
            f"{worst:.1e}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.peak_memory:,.0f}",
            f"{result.parameters:,}",
        )
    return table, agree


def main() -> int:
    """Run everything; 0 when all loss curves agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run")
    parser.add_argument("--models", nargs="+", choices=["gpt2", "bert"], default=["gpt2", "bert"])
    parser.add_argument("--device", default="cpu", help="cpu, or an accelerator such as cuda")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run, steps, output = options.worker
        work(Run(**json.loads(run)), int(steps), Path(output))
        return 0
    results = {}
    for model in options.models:
        for scheduled, processes in ((False, 1), (True, 1), (True, 2)):
            run = Run(model, scheduled, processes, options.device)
            results[run] = launch(run, options.steps)
    table, agree = compare(results)
    console = Console(width=max(120, Console().width))
    console.print(table)
    if not agree:
        console.print(f"[red]losses differ by more than {TOLERANCE}[/red]")
        return 1
    console.print(f"loss curves agree within {TOLERANCE} (relative) over {options.steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
