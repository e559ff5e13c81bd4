"""What an engine adds to a step of the library that it drives: time, and peak memory.

A tiny GPT-2 in two pipeline stages, so that a step is mostly what libraries do around it, and a
larger one in two replicas. The bare side runs the same modules by torch.distributed.pipelining, by
DeepSpeed's PipelineEngine, by DistributedDataParallel and by DeepSpeed's ZeRO-1, as a script of its
own would. Both sides take their steps in turns, in the same two processes. Pairs of processes
differ by more than rounds do, as memory lies otherwise in each: there are several. Of two equal
sides, the one that is made first is the faster by one or two percent: they take turns in that too.

At the end, tensor parallelism of a Llama over two ranks: a recipe with its fused loss beside
DTensor's styles and Transformers' own plan.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import slapo
from benchmark import engine_pipelines, engine_replicas, kernel_ranks
from benchmark.kernel_cases import CASES
from benchmark.measure import Progress, Result, Target, on_ranks, peak_of

WARM_UP = 5
LIMIT = 1.03
#: Of tensor parallelism: samples of a batch, rounds, sides, and the wall time over the others'.
PEER_BATCH, PEER_ROUNDS = 2, 7
OURS, PEERS = "ours, fused loss", ("DTensor", "transformers")
PEER_LIMIT = 1 / 1.3

TENSOR_PARALLEL = "tensor parallel"

PRELOADED = ("benchmark.engine_imports", "benchmark.engines")

Step = Callable[[], Any]
#: Of one rank: main-thread seconds and seconds passed of each round, and peak bytes; bare, engine.
Found = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Case:
    """An engine, and the library that it drives.

    Parameters
    ----------
    pp
        Pipeline ranks of the two; the others are replicas.
    engine, bare
        ``(mesh)`` -> a step.
    pairs, rounds, steps
        Pairs of processes, rounds in each, steps of a round.
    """

    pp: int
    engine: Callable[[Any], Step]
    bare: Callable[[Any], Step]
    pairs: int = 10
    rounds: int = 24
    steps: int = 4


def run(quick: bool, progress: Progress) -> Result:
    """Medians over pairs of processes, and the share by which the engine is above the library."""
    result = Result()
    for name, found in (_quickly if quick else _at_length)(progress):
        for rank in range(2):
            steps = CASES_OF_ENGINES[name].steps
            row = _row(name, rank, steps, [by_rank[rank] for by_rank in found])
            _add(result, row, progress)
    for row in _peers(quick, progress):
        _add(result, row, progress)
    return result


def _quickly(progress: Progress) -> Iterator[tuple[str, list[list[Found]]]]:
    """Those of one layout in the same two processes; DeepSpeed wants others for another layout."""
    for pp in (2, 1):
        names = [name for name, case in CASES_OF_ENGINES.items() if case.pp == pp]
        found = _on_two(progress, names, 2, False)
        for name in names:
            yield name, [found[name]]


def _at_length(progress: Progress) -> Iterator[tuple[str, list[list[Found]]]]:
    for name, case in CASES_OF_ENGINES.items():
        found = []
        for pair in range(case.pairs):
            found.append(_on_two(progress, [name], case.rounds, pair % 2 == 1)[name])
            ratios = ", ".join(f"{_ratio(of_rank['cpu']):.3f}" for of_rank in found[-1])
            progress(f"{name}, processes {pair + 1} of {case.pairs}: ratios {ratios}")
        yield name, found


def _on_two(progress: Progress, *arguments: Any) -> dict[str, list[Found]]:
    found: dict[str, list[Found]] = on_ranks(2, _rank_main, arguments, progress, PRELOADED)
    return found


def _add(result: Result, row: dict[str, Any], progress: Progress) -> None:
    result.rows.append(row)
    where = f"{row['target']}, rank {row['rank']}"
    progress(
        f"{where}: {row['engine_ms']} ms, bare {row['bare_ms']} ms, ratio {row['ratio']}, wall "
        f"{row['wall_ratio']}; peak {row['engine_peak_mib']} MiB, bare {row['bare_peak_mib']} MiB"
    )
    if row["target"].startswith(TENSOR_PARALLEL):
        what = f"{where}: time over the other's"
        result.targets.append(Target(what, row["wall_ratio"], PEER_LIMIT))
    else:
        what = f"{where}: main-thread CPU time over the bare library's"
        result.targets.append(Target(what, row["ratio"], LIMIT))
    what = f"{where}: peak memory over the bare library's"
    result.targets.append(Target(what, row["peak_ratio"], LIMIT))


def _ratio(rounds: Sequence[tuple[float, float]]) -> float:
    return median(engine / bare for bare, engine in rounds)


def _row(name: str, rank: int, steps: int, pairs: Sequence[Found]) -> dict[str, Any]:
    ratios = [_ratio(found["cpu"]) for found in pairs]
    every = {key: [each for found in pairs for each in found[key]] for key in pairs[0]}
    bare_peak, engine_peak = (median(sizes) for sizes in zip(*every["peak"], strict=True))
    return {
        "target": name,
        "rank": rank,
        "process_pairs": len(pairs),
        "rounds": len(pairs[0]["cpu"]),
        "steps_of_a_round": steps,
        "bare_ms": _step_ms(every["cpu"], 0, steps),
        "engine_ms": _step_ms(every["cpu"], 1, steps),
        "ratio": round(median(ratios), 4),
        "ratio_least": round(min(ratios), 4),
        "ratio_largest": round(max(ratios), 4),
        "bare_wall_ms": _step_ms(every["wall"], 0, steps),
        "engine_wall_ms": _step_ms(every["wall"], 1, steps),
        "wall_ratio": round(median(_ratio(found["wall"]) for found in pairs), 4),
        "bare_peak_mib": round(bare_peak / 2**20, 3),
        "engine_peak_mib": round(engine_peak / 2**20, 3),
        "peak_ratio": round(engine_peak / bare_peak, 4),
    }


def _step_ms(rounds: Sequence[tuple[float, float]], side: int, steps: int) -> float:
    return round(1e3 * median(times[side] for times in rounds) / steps, 3)


def _peers(quick: bool, progress: Progress) -> list[dict[str, Any]]:
    """Tensor parallelism by others, in the place of the bare library."""
    case = CASES["quick" if quick else "cpu"]["llama"]
    rounds = 2 if quick else PEER_ROUNDS
    found = kernel_ranks.sides_of(case, PEER_BATCH, rounds, (OURS, *PEERS), progress)
    ours = found[0].pop(OURS), found[1].pop(OURS)
    rows = []
    for side in found[0]:
        for rank in range(2):
            own, other = ours[rank], found[rank][side]
            pairs: Found = {
                "cpu": list(zip(other.cpu, own.cpu, strict=True)),
                "wall": list(zip(other.wall, own.wall, strict=True)),
                "peak": [(other.peak, own.peak)],
            }
            rows.append(_row(f"{TENSOR_PARALLEL}, {side}", rank, 1, [pairs]))
    return rows


# --- ranks ---------------------------------------------------------------------------------------
def _rank_main(
    rank: int, names: list[str], rounds: int, engine_first: bool, store: str, pipe: Connection
) -> None:
    """Sends what each case takes on each rank."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=patience
    )
    all_found = {}
    for name in names:
        case = CASES_OF_ENGINES[name]
        mesh = slapo.init_mesh(pp=case.pp, dp=2 // case.pp, device="cpu")
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, _measured(case, mesh, rounds, engine_first))
        all_found[name] = gathered
        if rank == 0:
            pipe.send(f"{name}: measured")
    if rank == 0:
        pipe.send(all_found)
    dist.barrier()
    dist.destroy_process_group()


def _measured(case: Case, mesh: Any, rounds: int, engine_first: bool) -> Found:
    makers = {"bare": case.bare, "engine": case.engine}
    order = ("engine", "bare") if engine_first else ("bare", "engine")
    steps = {side: makers[side](mesh) for side in order}
    found: Found = {"cpu": [], "wall": []}
    warm_up = min(WARM_UP, rounds)
    for turn in range(warm_up + rounds):
        sides = order if turn % 2 else order[::-1]
        times = {side: _times(steps[side], case.steps) for side in sides}
        if turn >= warm_up:
            for key, place in (("cpu", 0), ("wall", 1)):
                found[key].append((times["bare"][place], times["engine"][place]))
    found["peak"] = [(peak_of(steps["bare"]), peak_of(steps["engine"]))]
    return found


def _times(step: Step, count: int) -> tuple[float, float]:
    """Of the main thread, and passed."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(count):
        step()
    return time.thread_time() - cpu, time.perf_counter() - wall


# --- cases ---------------------------------------------------------------------------------------
def _pipeline(target: str, bare: Callable[[Any], Step]) -> Case:
    return Case(2, functools.partial(engine_pipelines.engine, target), bare)


CASES_OF_ENGINES = {
    "torch": _pipeline("torch", engine_pipelines.bare_torch),
    "deepspeed": _pipeline("deepspeed", engine_pipelines.bare_deepspeed),
    "torch, DDP": Case(1, engine_replicas.engine_ddp, engine_replicas.bare_ddp, 4, 12, 2),
    "deepspeed, ZeRO-1": Case(1, engine_replicas.engine_zero, engine_replicas.bare_zero, 4, 12, 2),
}
