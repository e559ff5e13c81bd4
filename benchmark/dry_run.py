"""What the dry run predicts, beside what steps on this processor take, and what predictions cost.

A group of large layouts runs in a process of its own, so that imports count and its memory can be
told from that of others: ``python -m benchmark.dry_run llama_70b 1024`` is one, and prints JSON.
"""

from __future__ import annotations

import csv
import gc
import importlib.util
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

import slapo
from benchmark.measure import Progress, Result, Target, allocated, kendall_tau, quiet, timed
from benchmark.partition import peak_megabytes
from slapo.cost import Machine, calibrate, dryrun
from slapo.cost.models import for_training, training_inputs
from slapo.model_schedule import apply_schedule

WARM_UP, STEPS = 2, 7
RANKS = (1024, 16384)
#: Largest errors: of all steps, of those with a hidden size from 256 on, and of memory.
ERROR, ERROR_WIDE, ERROR_MEMORY = 0.2, 0.1, 0.05
DISORDER, CALIBRATION = 0.1, 25.0
#: For all layouts on one number of ranks, imports included; of the whole process.
SECONDS, MEGABYTES = 15.0, 1000.0


@dataclass(frozen=True)
class Case:
    """A model and a step of it.

    Parameters
    ----------
    key
        Of its recipe.
    layers, hidden
        Of the model; T5 has as many layers in its encoder as in its decoder.
    batch, length
        Samples, and tokens of each.
    checkpoint
        Share of the layers that are computed again.
    vocabulary
        Of the model.
    """

    key: str
    layers: int
    hidden: int
    batch: int
    length: int
    checkpoint: float = 0.0
    vocabulary: int = 4096

    def config(self) -> Any:
        """Of Transformers, with the dropout that is usual there."""
        import transformers

        heads = {"num_attention_heads": 8}
        sizes = {"hidden_size": self.hidden, "num_hidden_layers": self.layers, **heads}
        length = {"max_position_embeddings": 256}
        common = {"vocab_size": self.vocabulary}
        decoder = {**common, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
        if self.key == "gpt2":
            return transformers.GPT2Config(
                n_embd=self.hidden, n_layer=self.layers, n_head=8, n_positions=256, **decoder
            )
        if self.key == "llama":
            more = {"intermediate_size": 3 * self.hidden, "num_key_value_heads": 4}
            return transformers.LlamaConfig(**sizes, **length, **more, **decoder)
        if self.key == "bert":
            more = {"intermediate_size": 4 * self.hidden}
            return transformers.BertConfig(**sizes, **length, **more, **common)
        return transformers.T5Config(
            d_model=self.hidden,
            d_kv=self.hidden // 8,
            d_ff=4 * self.hidden,
            num_layers=self.layers,
            num_decoder_layers=self.layers,
            num_heads=8,
            decoder_start_token_id=0,
            **common,
        )

    def predict(self, machine: Machine | str) -> Any:
        """The dry run of a step."""
        return dryrun(
            self.key,
            self.config(),
            machine=machine,
            batch=self.batch,
            seq_len=self.length,
            ckpt_ratio=self.checkpoint,
        )

    def scheduled(self) -> tuple[torch.nn.Module, Any, dict[str, torch.Tensor]]:
        """The model as the recipe leaves it, its schedule, and inputs."""
        model = for_training(self.config()).train()
        sch = apply_schedule(model, self.key, ckpt_ratio=self.checkpoint)
        return model, sch, training_inputs(model, self.batch, self.length)

    def __str__(self) -> str:
        again = f", {self.checkpoint:.0%} again" if self.checkpoint else ""
        return (
            f"{self.key}, {self.layers} layers, hidden {self.hidden}, "
            f"{self.batch} x {self.length}{again}"
        )


STEP_CASES = [
    *(
        Case(key, 4, hidden, 4, 128)
        for key in ("gpt2", "llama", "bert")
        for hidden in (128, 256, 512)
    ),
    Case("gpt2", 8, 384, 2, 256),
    Case("llama", 6, 256, 4, 128, 1.0),
    Case("bert", 4, 384, 8, 64, 0.5),
]
MEMORY_CASES = [
    Case(key, 6, 256, 8, 128, checkpoint)
    for key in ("gpt2", "bert", "t5", "llama")
    for checkpoint in (0.0, 0.5, 1.0)
]
QUICK_CASES = [Case("gpt2", 2, 32, 2, 16, vocabulary=64)]


def run(quick: bool, progress: Progress) -> Result:
    """Step times, memory, then large layouts."""
    result = Result()
    if not importlib.util.find_spec("transformers"):
        progress("left out: transformers is not installed")
        return result
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # processor time of several counts that they wait for each other
    try:
        with quiet():
            return _run(quick, progress, result)
    finally:
        torch.set_num_threads(threads)


def _run(quick: bool, progress: Progress, result: Result) -> Result:
    spent, _ = timed(lambda: calibrate(progress, 0.5 if quick else 20.0))
    times = list(_step_rows(QUICK_CASES if quick else STEP_CASES, 0.5 if quick else 5.0, progress))
    memory = list(_memory_rows(QUICK_CASES if quick else MEMORY_CASES, progress))
    layouts = list(_layout_rows(quick, progress))
    result.rows = [_with_all_columns(row) for row in (*times, *memory, *layouts)]
    if not quick:
        result.targets = [
            Target("calibration", spent.cpu, CALIBRATION, "s of CPU"),
            *_targets(times, memory, layouts),
        ]
    return result


#: Of the CSV file; a line has those of its kind.
COLUMNS = [
    "kind",
    "config",
    "hidden",
    "predicted_ms",
    "measured_ms",
    "predicted_mib",
    "measured_mib",
    "error",
    "ranks",
    "tp",
    "pp",
    "dp",
    "sequence_parallel",
    "checkpoint",
    "peak_gib",
    "fits",
    "step_s",
    "mfu",
    "process_s",
    "process_mb",
]


def _with_all_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row.get(name, "") for name in COLUMNS}


def _targets(
    times: Sequence[Mapping[str, Any]],
    memory: Sequence[Mapping[str, Any]],
    layouts: Sequence[Mapping[str, Any]],
) -> list[Target]:
    tau = kendall_tau([r["predicted_ms"] for r in times], [r["measured_ms"] for r in times])
    wide = [row for row in times if row["hidden"] >= 256]
    targets = [
        Target("step time: 1 - Kendall's tau", 1 - tau, DISORDER),
        Target("step time: largest error", _largest(times), ERROR),
        Target("step time: largest error, hidden from 256 on", _largest(wide), ERROR_WIDE),
        Target("memory: largest error", _largest(memory), ERROR_MEMORY),
    ]
    for ranks in RANKS:
        rows = [row for row in layouts if row["ranks"] == ranks]
        what = f"{len(rows)} layouts on {ranks} ranks"
        targets += [
            Target(what, rows[0]["process_s"], SECONDS, "s"),
            Target(f"{what}: peak", rows[0]["process_mb"], MEGABYTES, "MB"),
        ]
    return targets


def _largest(rows: Sequence[Mapping[str, Any]]) -> float:
    return max(abs(float(row["error"])) for row in rows)


# --- step time -----------------------------------------------------------------------------------
def _step_rows(
    cases: Sequence[Case], seconds: float, progress: Progress
) -> Iterator[dict[str, Any]]:
    # A shared machine changes its speed within seconds: calibrate before and after each step.
    before = calibrate(seconds=seconds)
    for number, case in enumerate(cases, 1):
        measured = 1e3 * measure_step(case)
        after = calibrate(seconds=seconds)
        predicted = 1e3 * mean(case.predict(here).time.total for here in (before, after))
        before = after
        error = predicted / measured - 1
        progress(
            f"step {number} of {len(cases)}, {case}: predicted {predicted:.1f} ms, "
            f"measured {measured:.1f} ms, {error:+.1%}"
        )
        yield {
            "kind": "time",
            "config": str(case),
            "hidden": case.hidden,
            "predicted_ms": round(predicted, 3),
            "measured_ms": round(measured, 3),
            "error": round(error, 4),
        }


def measure_step(case: Case) -> float:
    """Median seconds of processor time of forward, backward and AdamW."""
    model, _, inputs = case.scheduled()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = [timed(step, collect=False)[0].cpu for _ in range(WARM_UP + STEPS)]
    return median(times[WARM_UP:])


# --- memory --------------------------------------------------------------------------------------
def _memory_rows(cases: Sequence[Case], progress: Progress) -> Iterator[dict[str, Any]]:
    for number, case in enumerate(cases, 1):
        predicted, measured = case.predict("cpu").peak / 2**20, measure_peak(case) / 2**20
        error = predicted / measured - 1
        progress(
            f"memory {number} of {len(cases)}, {case}: predicted {predicted:.1f} MiB, "
            f"measured {measured:.1f} MiB, {error:+.1%}"
        )
        yield {
            "kind": "memory",
            "config": str(case),
            "hidden": case.hidden,
            "checkpoint": case.checkpoint,
            "predicted_mib": round(predicted, 2),
            "measured_mib": round(measured, 2),
            "error": round(error, 4),
        }


def measure_peak(case: Case) -> int:
    """Bytes of tensors at the worst moment of two steps of an engine of one process."""
    started = not dist.is_initialized()
    try:
        return _peak_of_engine(*case.scheduled())
    finally:
        if started:  # a dry run of tensor parallelism makes a group of its own
            dist.destroy_process_group()


def _peak_of_engine(model: torch.nn.Module, sch: Any, inputs: dict[str, torch.Tensor]) -> int:
    engine, _ = slapo.build(
        sch,
        target="torch",
        mesh=slapo.init_mesh(device="cpu"),
        loss_fn=lambda output, labels: output.loss,
        optimizer=torch.optim.AdamW,
    )
    held = {id(t): t for t in (*model.parameters(), *model.buffers(), *inputs.values())}
    static = sum(t.untyped_storage().nbytes() for t in held.values())
    gc.collect()

    def steps() -> None:
        for _ in range(2):
            engine.train_batch(iter([(inputs, inputs["labels"])]))

    return static + allocated(steps)


# --- large layouts -------------------------------------------------------------------------------
def _layout_rows(quick: bool, progress: Progress) -> Iterator[dict[str, Any]]:
    if quick:
        yield from predict_layouts("small", 16)["rows"]
        return
    for ranks in RANKS:
        start = time.perf_counter()
        command = [sys.executable, "-m", "benchmark.dry_run", "llama_70b", str(ranks)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        spent = time.perf_counter() - start
        found = json.loads(done.stdout.splitlines()[-1])
        rows = found["rows"]
        progress(
            f"{len(rows)} layouts on {ranks} ranks: {spent:.1f} s, peak {found['peak_mb']:.0f} MB, "
            f"{sum(row['fits'] for row in rows)} fit"
        )
        cost = {"process_s": round(spent, 2), "process_mb": round(found["peak_mb"], 1)}
        yield from ({**row, **cost} for row in rows)


def predict_layouts(model: str, ranks: int) -> dict[str, Any]:
    """All layouts of a model on so many ranks, and the largest resident memory of this process."""
    is_small = model == "small"
    config = llama(is_small)
    widths, depths = ((2,), (2,)) if is_small else ((4, 8), (4, 8, 16))
    choices = itertools.product(widths, depths, (False,) if is_small else (False, True), (0.0, 1.0))
    rows = [_layout_row(config, ranks, *choice) for choice in choices]
    return {"rows": rows, "peak_mb": peak_megabytes()}


def llama(is_small: bool) -> Any:
    """The config of Llama 70B, or of a small model."""
    from transformers import LlamaConfig

    if is_small:
        return LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
        )
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )


def _layout_row(
    config: Any, ranks: int, tp: int, pp: int, sequence_parallel: bool, checkpoint: float
) -> dict[str, Any]:
    mesh = {"tp": tp, "pp": pp, "dp": ranks // (tp * pp)}
    found = dryrun(
        "llama",
        config,
        mesh=mesh,
        machine="h100-80gb",
        batch=32,
        micro_batches=32,
        seq_len=64 if config.hidden_size < 1024 else 4096,
        dtype=torch.bfloat16,
        target="megatron",
        zero=1,
        sequence_parallel=sequence_parallel,
        ckpt_ratio=checkpoint,
    )
    return {
        "kind": "layout",
        "config": f"llama, {config.num_hidden_layers} layers, hidden {config.hidden_size}",
        "hidden": config.hidden_size,
        "ranks": ranks,
        **mesh,
        "sequence_parallel": sequence_parallel,
        "checkpoint": checkpoint,
        "peak_gib": round(found.peak / 2**30, 2),
        "fits": found.fits,
        "step_s": round(found.time.total, 3),
        "mfu": round(found.mfu, 4),
    }


# --- plot ----------------------------------------------------------------------------------------
def plot(directory: Path) -> Path | None:
    """Draw ``dry_run.csv`` as ``dry_run.png``: predictions beside measurements.

    Returns
    -------
    Path or None
        The picture; None without the file or without matplotlib (``pip install slapo[examples]``).
    """
    source = directory / "dry_run.csv"
    if not source.exists() or importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot as plt

    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    _draw_times(left, [row for row in rows if row["kind"] == "time"])
    _draw_memory(right, [row for row in rows if row["kind"] == "memory"])
    path = directory / "dry_run.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _draw_times(axes: Any, rows: Sequence[Mapping[str, str]]) -> None:
    for key in dict.fromkeys(_family(row) for row in rows):
        points = [row for row in rows if _family(row) == key]
        axes.plot(
            [float(row["measured_ms"]) for row in points],
            [float(row["predicted_ms"]) for row in points],
            linestyle="none",
            marker="o",
            label=key,
        )
    values = [float(row[name]) for row in rows for name in ("measured_ms", "predicted_ms")]
    ends = [min(values) / 1.2, max(values) * 1.2]
    axes.plot(ends, ends, color="gray", linewidth=0.8)
    axes.fill_between(
        ends,
        [(1 - ERROR) * end for end in ends],
        [(1 + ERROR) * end for end in ends],
        color="gray",
        alpha=0.15,
        label=f"within {ERROR:.0%}",
    )
    axes.set(xscale="log", yscale="log")
    ticks = [
        tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if ends[0] < tick < ends[1]
    ]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, labels=[str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlim=ends, ylim=ends)
    axes.set(xlabel="measured ms of processor time", ylabel="predicted ms")
    axes.set_title("A step on this processor", fontsize="medium")
    axes.legend(fontsize="small")


def _draw_memory(axes: Any, rows: Sequence[Mapping[str, str]]) -> None:
    places = range(len(rows))
    for shift, name in ((-0.2, "measured_mib"), (0.2, "predicted_mib")):
        heights = [float(row[name]) for row in rows]
        label = name.removesuffix("_mib")
        axes.bar([place + shift for place in places], heights, width=0.4, label=label)
    labels = [f"{_family(row)} {float(row['checkpoint']):g}" for row in rows]
    axes.set_xticks(list(places), labels=labels, rotation=60, ha="right", fontsize="small")
    axes.set_ylabel("peak in MiB")
    axes.set_title("Memory, by the share of layers computed again", fontsize="medium")
    axes.legend(fontsize="small")


def _family(row: Mapping[str, str]) -> str:
    return row["config"].partition(",")[0]


if __name__ == "__main__":
    print(json.dumps(predict_layouts(sys.argv[1], int(sys.argv[2]))))
