"""What it costs to trace the containers of a large model on meta, and to cut it in four stages.

Every case runs in a process of its own, so that its memory can be told from that of others:
``python -m benchmark.partition gpt2 96`` is one, and prints what it measured as JSON.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from torch import nn

import slapo
from benchmark.measure import Progress, Result, Target, timed
from slapo.pipeline import generate_pipeline_partition
from slapo.utils.report import report_memory

SIZES = {"gpt2": (12, 24, 48, 96), "llama_70b": (12, 24, 48, 80)}
STAGES = 4
REPEATS = 3
#: For trace and partition of the largest; of the whole process, torch and transformers included.
SECONDS, MEGABYTES = 5.0, 1000.0


def gpt2(layers: int) -> nn.Module:
    """GPT-2 of the usual width, with more layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers))


def llama_70b(layers: int) -> nn.Module:
    """The sizes of Llama 3 70B, which has 80 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
    )
    return LlamaForCausalLM(config)


#: Name -> model of so many layers, path of the container, name of its list of layers.
CASES: dict[str, tuple[Callable[[int], nn.Module], str, str]] = {
    "gpt2": (gpt2, "transformer", "h"),
    "llama_70b": (llama_70b, "model", "layers"),
}


def run(quick: bool, progress: Progress) -> Result:
    """Partition models of several sizes in turn, several times; report medians."""
    result = Result()
    if not importlib.util.find_spec("transformers"):
        progress("left out: transformers is not installed")
        return result
    sizes, repeats = ({"gpt2": (4,)}, 1) if quick else (SIZES, REPEATS)
    run_case = measure if quick else measure_apart
    measured: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for repeat in range(repeats):
        for model, of_model in sizes.items():
            for layers in of_model:
                found = run_case(model, layers)
                measured.setdefault((model, layers), []).append(found)
                progress(
                    f"{model}, {layers} layers, {repeat + 1} of {repeats}: "
                    f"{found['trace_cpu_s'] + found['partition_cpu_s']:.2f} s of CPU, "
                    f"peak {found['peak_mb']:.0f} MB"
                )
    for (model, layers), found_ in measured.items():
        result.rows.append(_row(model, layers, found_))
    if not quick:
        result.targets += _targets(result.rows)
    return result


def measure_apart(model: str, layers: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmark.partition", model, str(layers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: str, layers: int) -> dict[str, Any]:
    """Times of each phase, and resident memory of this process, which does nothing else.

    Returns
    -------
    dict
        ``<phase>_cpu_s`` and ``<phase>_wall_s``; ``peak_mb`` of the whole process and
        ``peak_growth_mb``, what it grew by since the imports.
    """
    times = {"import": timed(_import_all)[0]}
    before = peak_megabytes()
    times["create"], sch = timed(lambda: create(model, layers))
    times["trace"], _ = timed(lambda: trace(sch, model))
    times["partition"], _ = timed(lambda: cut(sch, model, layers))
    found: dict[str, Any] = {}
    for phase, spent in times.items():
        found |= {f"{phase}_cpu_s": spent.cpu, f"{phase}_wall_s": spent.wall}
    peak = peak_megabytes()
    return {**found, "stages": len(sch.child), "peak_mb": peak, "peak_growth_mb": peak - before}


def _import_all() -> None:
    """What the first use of a model and of a tracer brings in."""
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    import slapo.graph.trace.capture  # noqa: F401


def create(model: str, layers: int) -> slapo.Schedule:
    """A schedule of the model on meta."""
    with slapo.init_empty_weights():
        return slapo.create_schedule(CASES[model][0](layers))


def trace(sch: slapo.Schedule, model: str) -> None:
    """Make graphs of the model and of the container of its layers."""
    if not sch.trace_until(CASES[model][1], tracer="huggingface"):
        raise RuntimeError(f"{model} could not be traced; see the warning")


def cut(sch: slapo.Schedule, model: str, layers: int) -> None:
    """Cut a traced model in equal stages."""
    _, container, layer_list = CASES[model]
    for stage in range(1, STAGES):
        last = stage * layers // STAGES - 1
        sch[f"{container}.{layer_list}.{last}"].cut_pipeline_stage()
    generate_pipeline_partition(sch)


def peak_megabytes() -> float:
    """Largest resident memory of this process until now."""
    gc.collect()
    peak = report_memory(ranks=()).peak_rss
    if peak is None:
        raise RuntimeError("this platform does not tell the memory of a process")
    return peak / 2**20


def _row(model: str, layers: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "layers": layers, "stages": found[0]["stages"]}
    for key in found[0]:
        if key != "stages":
            digits = 1 if key.endswith("_mb") else 4
            row[key] = round(median(f[key] for f in found), digits)
    for phase in ("trace", "partition"):
        row[f"{phase}_cpu_ms_per_layer"] = round(1e3 * row[f"{phase}_cpu_s"] / layers, 3)
    return row


def _targets(rows: list[dict[str, Any]]) -> list[Target]:
    targets = []
    for model, sizes in SIZES.items():
        first, *_, last = [row for row in rows if row["model"] == model]
        what = f"{model}, {sizes[-1]} layers"
        for clock in ("cpu", "wall"):
            spent = last[f"trace_{clock}_s"] + last[f"partition_{clock}_s"]
            targets.append(Target(f"{what}: trace and partition, {clock}", spent, SECONDS, "s"))
        targets.append(Target(f"{what}: peak of the process", last["peak_mb"], MEGABYTES, "MB"))
        for phase in ("trace", "partition"):
            key = f"{phase}_cpu_ms_per_layer"
            label = f"{model}: {phase} per layer, {sizes[-1]} to {sizes[0]} layers"
            targets.append(Target(label, last[key] / first[key], 1.3))
    return targets


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
