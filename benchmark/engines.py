"""What an engine adds to a step of the library that it drives: time, and peak memory.

A tiny GPT-2 in two pipeline stages, so that a step is mostly what libraries do around it, and a
larger one in two replicas. The bare side runs the same modules by torch.distributed.pipelining, by
DeepSpeed's PipelineEngine, by DistributedDataParallel and by DeepSpeed's ZeRO-1, as a script of its
own would. Both sides take their steps in turns, in the same two processes. Pairs of processes
differ by more than rounds do, as memory lies otherwise in each: there are several. Of two equal
sides, the one that is made first is the faster by one or two percent: they take turns in that too.

At the end, tensor parallelism of a Llama over two ranks: a recipe beside DTensor's styles and
Transformers' own plan.
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
import torch.nn.functional as F
from torch import Tensor

import slapo
from benchmark import engine_replicas, kernel_ranks
from benchmark.kernel_cases import CASES
from benchmark.measure import Progress, Result, Target, on_ranks, peak_of
from slapo.pipeline import Stage, generate_pipeline_partition

WARM_UP = 5
LIMIT = 1.03
MICRO_BATCHES, BATCH, LENGTH, VOCABULARY = 4, 8, 32, 256
#: Of tensor parallelism: samples of a batch, rounds.
PEER_BATCH, PEER_ROUNDS = 2, 9

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
    for name, case in CASES_OF_ENGINES.items():
        pairs, rounds = (1, 2) if quick else (case.pairs, case.rounds)
        found = []
        for pair in range(pairs):
            found.append(_on_two(progress, name, rounds, pair % 2 == 1))
            ratios = ", ".join(f"{_ratio(of_rank['cpu']):.3f}" for of_rank in found[-1])
            progress(f"{name}, processes {pair + 1} of {pairs}: ratios {ratios}")
        for rank in range(2):
            row = _row(name, rank, case.steps, [by_rank[rank] for by_rank in found])
            _add(result, row, progress)
    for row in _peers(quick, progress):
        _add(result, row, progress)
    return result


def _on_two(progress: Progress, *arguments: Any) -> list[Found]:
    found: list[Found] = on_ranks(2, _rank_main, arguments, progress, PRELOADED)
    return found


def _add(result: Result, row: dict[str, Any], progress: Progress) -> None:
    result.rows.append(row)
    where = f"{row['target']}, rank {row['rank']}"
    progress(
        f"{where}: {row['engine_ms']} ms, bare {row['bare_ms']} ms, ratio {row['ratio']}, wall "
        f"{row['wall_ratio']}; peak {row['engine_peak_mib']} MiB, bare {row['bare_peak_mib']} MiB"
    )
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
    found = kernel_ranks.sides_of(case, PEER_BATCH, rounds, kernel_ranks.FEW, progress)
    ours = found[0].pop("ours"), found[1].pop("ours")
    rows = []
    for side in found[0]:
        for rank in range(2):
            own, other = ours[rank], found[rank][side]
            pairs: Found = {
                "cpu": list(zip(other.cpu, own.cpu, strict=True)),
                "wall": list(zip(other.wall, own.wall, strict=True)),
                "peak": [(other.peak, own.peak)],
            }
            rows.append(_row(f"tensor parallel, {side}", rank, 1, [pairs]))
    return rows


# --- ranks ---------------------------------------------------------------------------------------
def _rank_main(
    rank: int, name: str, rounds: int, engine_first: bool, store: str, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=patience
    )
    case = CASES_OF_ENGINES[name]
    mesh = slapo.init_mesh(pp=case.pp, dp=2 // case.pp, device="cpu")
    makers = {"bare": case.bare, "engine": case.engine}
    order = ("engine", "bare") if engine_first else ("bare", "engine")
    steps = {side: makers[side](mesh) for side in order}
    found: Found = {"cpu": [], "wall": []}
    for turn in range(WARM_UP + rounds):
        sides = order if turn % 2 else order[::-1]
        times = {side: _times(steps[side], case.steps) for side in sides}
        if turn >= WARM_UP:
            for key, place in (("cpu", 0), ("wall", 1)):
                found[key].append((times["bare"][place], times["engine"][place]))
    found["peak"] = [(peak_of(steps["bare"]), peak_of(steps["engine"]))]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, found)
    if rank == 0:
        pipe.send(gathered)
    dist.barrier()
    dist.destroy_process_group()


def _times(step: Step, count: int) -> tuple[float, float]:
    """Of the main thread, and passed."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(count):
        step()
    return time.thread_time() - cpu, time.perf_counter() - wall


def _scheduled(group: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # optional package

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    sch = slapo.create_schedule(GPT2LMHeadModel(config).train(), group=group)
    inputs = {"input_ids": torch.ones(2, LENGTH, dtype=torch.long)}
    sch.trace_until("transformer", tracer="huggingface", example_inputs=inputs)
    sch["transformer.h.1"].cut_pipeline_stage()
    return sch


def _data() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    while True:
        yield {"input_ids": ids}, ids


def _loss(output: Any, labels: Tensor) -> Tensor:
    logits = output.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


_optimizer = functools.partial(torch.optim.SGD, lr=1e-3)


def _engine(target: str, mesh: Any) -> Step:
    """With all defaults."""
    engine, _ = slapo.build(
        _scheduled(mesh["tp"]),
        target=target,
        mesh=mesh,
        loss_fn=_loss,
        optimizer=_optimizer,
        micro_batches=MICRO_BATCHES,
    )
    data = _data()
    return lambda: engine.train_batch(data)


def _stages() -> list[Stage]:
    stages: list[Stage] = generate_pipeline_partition(_scheduled(None)).mod.stages
    return stages


def _bare_torch(mesh: Any) -> Step:
    """As the tutorial of torch.distributed.pipelining has it; there are no replicas, so no DDP."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, stages = dist.get_rank(), _stages()
    ids = torch.ones(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.long)
    sent = tuple(t.detach() for t in stages[0](ids))
    floats = tuple(t.requires_grad_(t.is_floating_point()) for t in sent)
    with torch.no_grad():
        output = stages[1](*sent).logits
    received = ((ids,), floats)[rank]
    passed = (floats, (output.detach().requires_grad_(),))[rank]

    class Logits(torch.nn.Module):
        def __init__(self, stage: torch.nn.Module) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, *tensors: Tensor) -> Tensor:
            return self.stage(*tensors).logits

    module = Logits(stages[1]) if rank else stages[0]
    stage = PipelineStage(
        module,
        rank,
        2,
        torch.device("cpu"),
        input_args=received,
        output_args=passed,
        group=mesh.get_group("pp"),
    )

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn)
    optimizer, data = _optimizer(module.parameters()), _data()

    def step() -> None:
        inputs, labels = next(data)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs["input_ids"])
        else:
            losses: list[Tensor] = []
            schedule.step(target=labels, losses=losses)
            torch.stack(losses).mean()  # of which the engine tells all ranks
        optimizer.step()

    return step


def _bare_deepspeed(mesh: Any) -> Step:
    """A PipelineModule of the two stages, whose boundary it can carry: one tensor with gradient."""
    from slapo.framework_dialect.deepspeed.package import import_deepspeed, quiet

    deepspeed = import_deepspeed("cpu")
    stages = _stages()

    class First(torch.nn.Module):
        """A mask and the like cross as integers, which DeepSpeed sends as they are."""

        def __init__(self) -> None:
            super().__init__()
            self.stage = stages[0]

        def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
            sent: tuple[Tensor, ...] = self.stage(ids)
            return tuple(
                t if t.requires_grad or not t.is_floating_point() else t.view(torch.int32)
                for t in sent
            )

    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = stages[1]
            ids = torch.ones(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.long)
            with torch.no_grad():
                self.floats = [t.is_floating_point() for t in stages[0](ids)]

        def forward(self, received: tuple[Tensor, ...]) -> Tensor:
            tensors = [
                t.view(torch.float32) if is_float and not t.is_floating_point() else t
                for t, is_float in zip(received, self.floats, strict=True)
            ]
            return self.stage(*tensors).logits

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    with quiet():
        module = deepspeed.pipe.PipelineModule(
            [First(), Last()], num_stages=2, loss_fn=loss_fn, partition_method="uniform"
        )
        parameters = [p for p in module.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=_optimizer(parameters),
            model_parameters=parameters,
            config={
                "train_micro_batch_size_per_gpu": BATCH // MICRO_BATCHES,
                "gradient_accumulation_steps": MICRO_BATCHES,
                "steps_per_print": 10**9,
                "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
            },
        )

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, labels in _data():
            yield from zip(
                inputs["input_ids"].chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True
            )

    data = parts()
    return lambda: engine.train_batch(data_iter=data)


# --- cases ---------------------------------------------------------------------------------------
CASES_OF_ENGINES = {
    "torch": Case(2, functools.partial(_engine, "torch"), _bare_torch),
    "deepspeed": Case(2, functools.partial(_engine, "deepspeed"), _bare_deepspeed),
    "torch, DDP": Case(1, engine_replicas.engine_ddp, engine_replicas.bare_ddp, 6, 16, 2),
    "deepspeed, ZeRO-1": Case(1, engine_replicas.engine_zero, engine_replicas.bare_zero, 6, 16, 2),
}
