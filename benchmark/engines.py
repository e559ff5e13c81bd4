"""What an engine adds to a step of the library that it drives: processor time of the main thread.

A tiny GPT-2 in two pipeline stages, so that a step is mostly what libraries do around it. The bare
side runs the same stages by torch.distributed.pipelining, and by DeepSpeed's PipelineEngine, as a
script of its own would. Both sides take their steps in turns, in the same two processes. Pairs of
processes differ by more than rounds do, as memory lies otherwise in each: there are several. Of two
equal sides, the one that is made first is the faster by one or two percent: they take turns in that
too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import slapo
from benchmark.measure import Progress, Result, Target, on_ranks
from slapo.pipeline import Stage, generate_pipeline_partition

PAIRS, ROUNDS, WARM_UP, STEPS = 10, 24, 5, 4
LIMIT = 1.03
MICRO_BATCHES, BATCH, LENGTH, VOCABULARY = 4, 8, 32, 256
TARGETS = ("torch", "deepspeed")

Step = Callable[[], Any]


def run(quick: bool, progress: Progress) -> Result:
    """Medians over pairs of processes, and the share by which the engine is above the library."""
    result = Result()
    pairs, rounds = (2, 2) if quick else (PAIRS, ROUNDS)
    for target in TARGETS:
        found = []
        for pair in range(pairs):
            found.append(on_ranks(2, _rank_main, (target, rounds, pair % 2 == 1), progress))
            ratios = ", ".join(f"{_ratio(rounds_of):.3f}" for rounds_of in found[-1])
            progress(f"{target}, processes {pair + 1} of {pairs}: ratios {ratios}")
        for rank in range(2):
            row = _row(target, rank, [by_rank[rank] for by_rank in found])
            result.rows.append(row)
            progress(
                f"{target}, rank {rank}: {row['engine_ms']} ms, bare {row['bare_ms']} ms, "
                f"ratio {row['ratio']}"
            )
            what = f"{target}, rank {rank}: main-thread CPU time over the bare library's"
            result.targets.append(Target(what, row["ratio"], LIMIT))
    return result


def _ratio(rounds: list[tuple[float, float]]) -> float:
    return median(engine / bare for bare, engine in rounds)


def _row(target: str, rank: int, pairs: list[list[tuple[float, float]]]) -> dict[str, Any]:
    ratios = [_ratio(rounds) for rounds in pairs]
    every = [times for rounds in pairs for times in rounds]
    return {
        "target": target,
        "rank": rank,
        "process_pairs": len(pairs),
        "rounds": len(pairs[0]),
        "steps_of_a_round": STEPS,
        "bare_ms": round(1e3 * median(bare for bare, _ in every) / STEPS, 3),
        "engine_ms": round(1e3 * median(engine for _, engine in every) / STEPS, 3),
        "ratio": round(median(ratios), 4),
        "ratio_least": round(min(ratios), 4),
        "ratio_largest": round(max(ratios), 4),
    }


# --- ranks ---------------------------------------------------------------------------------------
def _rank_main(
    rank: int, target: str, rounds: int, engine_first: bool, store: str, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=patience
    )
    mesh = slapo.init_mesh(pp=2, device="cpu")
    steps: dict[str, Step] = {}
    for name in ("engine", "bare") if engine_first else ("bare", "engine"):
        if name == "engine":
            steps[name] = _engine(target, mesh)
        else:
            steps[name] = _bare_torch(mesh) if target == "torch" else _bare_deepspeed()
    times = []
    for turn in range(WARM_UP + rounds):
        names = list(steps) if turn % 2 else list(steps)[::-1]
        found = {name: _thread_time(steps[name]) for name in names}
        if turn >= WARM_UP:
            times.append((found["bare"], found["engine"]))
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, times)
    if rank == 0:
        pipe.send(gathered)
    dist.barrier()
    dist.destroy_process_group()


def _thread_time(step: Step) -> float:
    dist.barrier()
    start = time.thread_time()
    for _ in range(STEPS):
        step()
    return time.thread_time() - start


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


def _bare_deepspeed() -> Step:
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
