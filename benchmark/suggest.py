"""``slapo.suggest`` against a search of the tuner that measures every layout of two processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

import slapo
from benchmark import report
from benchmark.measure import Progress, Result, Target, on_ranks, quiet
from benchmark.tuning_ranks import batch_of, join, leave, timed_steps
from benchmark.tuning_space import WORK, Work, machines, token_loss
from slapo.autotune import Refused, tune
from slapo.autotune.space import survey
from slapo.cost.suggestions import ENGINES, RATIOS, Suggestion

#: The measured best layout has to be among so many suggestions.
FIRST = 3


def space(choose: Callable[[str, list[Any]], Any], samples: int = WORK.samples) -> dict[str, Any]:
    """All layouts that ``suggest`` may try for two processes, each micro-batch for each of them."""
    layout = choose("layout", [[2, 1, 1], [1, 2, 1], [1, 1, 2]])
    _, pp, dp = layout
    engine = choose("engine", list(range(len(ENGINES)))) if dp > 1 else 0
    micro = choose("micro_batch", [1, 2, 4, 8])
    if micro * dp * pp > samples:
        raise Refused("more samples than a step has")
    ratio = choose("ckpt_ratio", list(RATIOS))
    return {"layout": layout, "engine": engine, "micro_batch": micro, "ckpt_ratio": ratio}


def run(quick: bool, progress: Progress) -> Result:
    """Suggest layouts, measure all of them, and find the fastest among the suggestions.

    Parameters
    ----------
    quick
        A tiny model and one engine.
    progress
        Gets a line for each layout.
    """
    tiny = Work(hidden=32, layers=2, heads=2, vocabulary=64, length=16, samples=4, steps=3)
    work = tiny if quick else WORK
    with quiet():
        machine = machines(report.RESULTS / "tuning_machines.json", progress)[2]
        suggested = slapo.suggest(
            work.config(),
            machine=machine,
            gpus=2,
            seq_len=work.length,
            batch=work.samples,
            recipe="gpt2",
            dtype=torch.float32,
            loss_fn=token_loss,
        )
        order = [_key(each) for each in suggested.fitting]
        speeds = _measure(work, progress, quick)
    rows = [
        {
            **dict(zip(("tp", "pp", "dp"), key[0], strict=True)),
            "engine": " ".join(map(str, ENGINES[key[1]].values())),
            "micro_batch": key[2],
            "ckpt_ratio": key[3],
            "suggestion": order.index(key) + 1 if key in order else "",
            "predicted": round(suggested.fitting[order.index(key)].dry_run.throughput, 2)
            if key in order
            else "",
            "samples_per_s": round(speed, 2),
        }
        for key, speed in sorted(speeds.items(), key=lambda item: -item[1])
    ]
    best = rows[0]["suggestion"] or len(order) + 1
    first = max((speeds[key] for key in order[:FIRST] if key in speeds), default=0.0)
    progress(f"the fastest of {len(rows)} layouts is suggestion {best} of {len(order)}")
    share = 1 - first / max(speeds.values())
    return Result(
        rows,
        [
            Target("suggestion that is the fastest measured layout", float(best), FIRST),
            Target(f"loss of speed by the best of {FIRST} suggestions", share, 0.03),
        ],
    )


def _measure(work: Work, progress: Progress, quick: bool) -> dict[Any, float]:
    """Key of a layout -> samples per second, by a search of the whole space."""
    found: dict[Any, float] = {}
    points = partial(space, samples=work.samples)

    def measure(point: dict[str, Any]) -> float:
        key = tuple(point["layout"]), point["engine"], point["micro_batch"], point["ckpt_ratio"]
        if quick and (key[1] or key[3]):
            raise Refused("quick")
        speed = found[key] = on_ranks(2, train_main, (2, key, work), progress)
        progress(f"{speed:7.1f} samples/s: {key}")
        return speed

    tune(points, run=measure, trials=len(survey(points).points), seed=0)
    return found


def _key(suggestion: Suggestion) -> Any:
    layout = suggestion.dry_run.layout
    engine = {"target": layout.target}
    engine |= {"zero": layout.zero} if layout.zero else {"data_parallel": layout.data_parallel}
    ratio = suggestion.options.get("ckpt_ratio", 0.0)
    sizes = (layout.tp, layout.pp, layout.dp)
    return sizes, ENGINES.index(engine), layout.micro, ratio


def train_main(rank: int, ranks: int, key: Any, work: Work, store: str, pipe: Connection) -> None:
    """Life of a rank that trains a layout; rank 0 sends samples per second."""
    from transformers import GPT2LMHeadModel

    logging.getLogger("slapo").setLevel(logging.WARNING)
    join(rank, ranks, store)
    (tp, pp, dp), engine, micro, ratio = key
    mesh = slapo.init_mesh(pp=pp, dp=dp, tp=tp, device="cpu")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(work.config()).train()
    slapo.set_random_seed(0, mesh=mesh)
    sch = slapo.apply_schedule(
        model,
        "gpt2",
        mesh=mesh,
        ckpt_ratio=ratio,
        **({"pipeline_cuts": pp} if pp > 1 else {}),
        **({"sequence_parallel": True} if tp > 1 else {}),
    )
    built, _ = slapo.build(
        sch,
        mesh=mesh,
        loss_fn=token_loss,
        optimizer=torch.optim.AdamW,
        micro_batches=work.samples // dp // micro,
        **ENGINES[engine],
    )
    batch = batch_of(work, work.samples // dp, mesh.get_local_rank("dp"))
    for _ in range(work.warm_up):
        built.train_batch(iter([batch]))
    leave(rank, work.samples / median(timed_steps(built, batch, work)), pipe)
