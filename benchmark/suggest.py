"""``slapo.suggest`` against a search of the tuner that measures every layout of two processes.

And its own time, for Llama 70B on many devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import slapo
from benchmark import report
from benchmark.dry_run import llama
from benchmark.measure import Progress, Result, Target, on_ranks, quiet
from benchmark.tuning_ranks import train_main
from benchmark.tuning_space import TINY, WORK, Work, machines, token_loss
from slapo.autotune import Refused, tune
from slapo.autotune.space import survey
from slapo.cost import api
from slapo.cost.suggestions import ENGINES, RATIOS, Suggestion

#: The measured best layout has to be among so many suggestions.
FIRST = 3
#: Devices for which a suggestion is timed, and the seconds that it may take.
GPUS, SECONDS = (64, 1024), 20.0


def space(choose: Callable[[str, list[Any]], Any]) -> dict[str, Any]:
    """All layouts that ``suggest`` may try for two processes, each micro-batch for each of them."""
    tp, pp, dp = choose("layout", [[2, 1, 1], [1, 2, 1], [1, 1, 2]])
    engine = choose("engine", list(range(len(ENGINES)))) if dp > 1 else 0
    micro = choose("micro_batch", [1, 2, 4, 8])
    if micro * dp * pp > WORK.samples:
        raise Refused("more samples than a step has")
    return {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "engine": engine,
        "micro_batches": WORK.samples // dp // micro,
        "checkpoint": choose("ckpt_ratio", list(RATIOS)),
    }


def quick_space(choose: Callable[[str, list[Any]], Any]) -> dict[str, Any]:
    """The layouts alone."""
    return space(lambda name, values: choose(name, values if name == "layout" else values[:1]))


def run(quick: bool, progress: Progress) -> Result:
    """Suggest layouts, measure all of them, and find the fastest among the suggestions.

    Parameters
    ----------
    quick
        A tiny model and three layouts.
    progress
        Gets a line for each layout.
    """
    work = TINY if quick else WORK
    with quiet():
        suggested = slapo.suggest(
            work.config(),
            machine=machines(report.RESULTS / "tuning_machines.json", progress)[2],
            gpus=2,
            seq_len=work.length,
            batch=work.samples,
            recipe="gpt2",
            dtype=torch.float32,
            loss_fn=token_loss,
        )
        speeds = _measure(quick_space if quick else space, work, progress)
    ranks = {_key(_point(each)): (n, each) for n, each in enumerate(suggested.fitting, 1)}
    rows = []
    for key, (point, speed) in sorted(speeds.items(), key=lambda item: -item[1][1]):
        number, suggestion = ranks.get(key, ("", None))
        row = {
            **point,
            "engine": " ".join(map(str, ENGINES[point["engine"]].values())),
            "suggestion": number,
            "predicted": round(suggestion.dry_run.throughput, 2) if suggestion else "",
            "samples_per_s": round(speed, 2),
        }
        rows.append(row)
    best = rows[0]["suggestion"] or len(ranks) + 1
    first = max((speeds[key][1] for key in list(ranks)[:FIRST] if key in speeds), default=0.0)
    progress(f"the fastest of {len(rows)} layouts is suggestion {best} of {len(ranks)}")
    loss = 1 - first / rows[0]["samples_per_s"]
    targets = [
        Target("suggestion that is the fastest measured layout", float(best), FIRST),
        Target(f"loss of speed by the best of {FIRST} suggestions", loss, 0.03),
    ]
    for gpus in () if quick else GPUS:
        api._RUNS.clear()  # those of the devices before
        api._STAGES.clear()
        start = time.process_time()
        slapo.suggest(llama(is_small=False), gpus=gpus)
        spent = time.process_time() - start
        progress(f"Llama 70B on {gpus} devices: {spent:.1f} s")
        targets.append(Target(f"Llama 70B on {gpus} devices", spent, SECONDS, "s of CPU"))
    return Result(rows, targets)


def _measure(
    points: Callable[..., dict[str, Any]], work: Work, progress: Progress
) -> dict[Any, tuple[dict[str, Any], float]]:
    """Key of a layout -> its values and samples per second, by a search of the whole space."""

    def measure(point: dict[str, Any]) -> float:
        options = {"attention": "auto", "sequence_parallel": point["tp"] > 1}
        given = {**point, **options, "engine": ENGINES[point["engine"]]}
        speed: float = on_ranks(2, train_main, (2, given, work), progress).throughput(work)
        progress(f"{speed:7.1f} samples/s: {point}")
        return speed

    found = tune(points, run=measure, trials=len(survey(points).points), seed=0)
    return {_key(t.values): (t.values, t.result) for t in found.trials if t.result is not None}


def _point(suggestion: Suggestion) -> dict[str, Any]:
    layout = suggestion.dry_run.layout
    engine = {"target": layout.target}
    engine |= {"zero": layout.zero} if layout.zero else {"data_parallel": layout.data_parallel}
    return {
        **{name: getattr(layout, name) for name in ("tp", "pp", "dp")},
        "engine": ENGINES.index(engine),
        "micro_batches": layout.micro_batches,
        "checkpoint": suggestion.options.get("ckpt_ratio", 0.0),
    }


def _key(point: dict[str, Any]) -> Any:
    names = ("tp", "pp", "dp", "engine", "micro_batches", "checkpoint")
    return tuple(point[name] for name in names)
