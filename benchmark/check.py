"""What the placement check of a schedule costs, on meta, for ranks that do not exist.

Every case runs in a process of its own: ``python -m benchmark.check llama_70b 80`` is one, and
prints what it measured as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from statistics import median
from typing import Any

import torch

import slapo
from benchmark.measure import Progress, Result, Target, timed
from benchmark.partition import CASES, peak_megabytes
from slapo.verify.placement.offline import fake_world

#: Model -> ranks, and numbers of layers.
SIZES = {"gpt2": (4, (12, 24, 48)), "llama_70b": (8, (10, 20, 40, 80))}
TOKENS = (2, 1023)
REPEATS = 3


def run(quick: bool, progress: Progress) -> Result:
    """Check models of several sizes in turn; report medians."""
    result = Result()
    if not importlib.util.find_spec("transformers"):
        progress("left out: transformers is not installed")
        return result
    cases = [(model, n) for model, (_, sizes) in SIZES.items() for n in sizes]
    cases, repeats = ([("gpt2", 2)], 1) if quick else (cases, REPEATS)
    measured: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for repeat in range(repeats):
        for case, found in measured.items():
            found.append(measure(*case) if quick else measure_apart(*case))
            progress(
                f"{case[0]}, {case[1]} layers, {repeat + 1} of {repeats}: "
                f"{found[-1]['cpu_s']:.2f} s of CPU, peak {found[-1]['peak_mb']:.0f} MB"
            )
    for (model, layers), found in measured.items():
        middle = {name: round(median(each[name] for each in found), 3) for name in found[0]}
        row = {"model": model, "layers": layers, "ranks": SIZES[model][0], **middle}
        result.rows.append({**row, "cpu_ms_per_layer": round(1e3 * middle["cpu_s"] / layers, 2)})
    if not quick:
        result.targets += _targets({(r["model"], r["layers"]): r for r in result.rows})
    return result


def _targets(rows: dict[tuple[str, int], dict[str, Any]]) -> list[Target]:
    large, half, small = rows["llama_70b", 80], rows["llama_70b", 40], rows["gpt2", 12]
    more = (
        (large["cpu_s"] - half["cpu_s"])
        / 40
        / ((half["cpu_s"] - rows["llama_70b", 20]["cpu_s"]) / 20)
    )
    return [
        Target("Llama 70B, 8 ranks", large["cpu_s"], 8.0, "s"),
        Target("Llama 70B, 8 ranks: peak", large["peak_mb"], 1000.0, "MB"),
        Target("a layer more, from 40 to 80 to that from 20 to 40", more, 1.3),
        Target("GPT-2 small, 4 ranks", small["cpu_s"], 3.0, "s"),
    ]


def measure_apart(model: str, layers: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmark.check", model, str(layers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: str, layers: int) -> dict[str, Any]:
    """Seconds of the check alone, and the peak of this process, imports included."""
    from examples.parallel_models import FAMILIES, schedule

    family = FAMILIES["gpt2" if model == "gpt2" else "llama"]
    with fake_world(SIZES[model][0]):
        with slapo.init_empty_weights():
            made: Any = CASES[model][0](layers)
        made.config.use_cache = False
        if model == "gpt2":
            made.config.attn_pdrop = 0.0
            for layer in made.transformer.h:
                layer.attn.attn_dropout.p = 0.0
        sch = slapo.create_schedule(made)
        schedule(sch, family)
        tokens = torch.zeros(TOKENS, dtype=torch.long)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        times, _ = timed(lambda: slapo.check(sch, inputs))
    return {"cpu_s": times.cpu, "wall_s": times.wall, "peak_mb": peak_megabytes()}


if __name__ == "__main__":
    slapo.get_logger().setLevel("ERROR")
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
