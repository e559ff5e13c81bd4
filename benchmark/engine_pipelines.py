"""Two pipeline stages of a tiny GPT-2: by an engine, and by the library that it drives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import slapo
from benchmark.engine_replicas import loss_of, repeated
from benchmark.models import hf_gpt2
from slapo.pipeline import Stage, generate_pipeline_partition

MICRO_BATCHES, BATCH, LENGTH, VOCABULARY = 4, 8, 32, 256

Step = Callable[[], Any]


def _scheduled(group: Any) -> Any:
    torch.manual_seed(0)
    # Copies of a tied table would be one more thing to reduce than the bare side has.
    model = hf_gpt2(4, 64, VOCABULARY, length=LENGTH, tie_word_embeddings=False)
    sch = slapo.create_schedule(model.train(), group=group)
    inputs = {"input_ids": torch.ones(2, LENGTH, dtype=torch.long)}
    sch.trace_until("transformer", tracer="huggingface", example_inputs=inputs)
    sch["transformer.h.1"].cut_pipeline_stage()
    return sch


def _data() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    return repeated(VOCABULARY, BATCH, LENGTH, 1)


_optimizer = functools.partial(torch.optim.SGD, lr=1e-3)


def _loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def engine(target: str, mesh: Any) -> Step:
    """With all defaults."""
    engine, _ = slapo.build(
        _scheduled(mesh["tp"]),
        target=target,
        mesh=mesh,
        loss_fn=loss_of,
        optimizer=_optimizer,
        micro_batches=MICRO_BATCHES,
    )
    data = _data()
    return lambda: engine.train_batch(data)


def _stages() -> list[Stage]:
    stages: list[Stage] = generate_pipeline_partition(_scheduled(None)).mod.stages
    return stages


def bare_torch(mesh: Any) -> Step:
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

    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_loss_of_logits)
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


class _DeepSpeedFirst(torch.nn.Module):
    """A mask and the like cross as integers, which DeepSpeed sends as they are."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        sent: tuple[Tensor, ...] = self.stage(ids)
        return tuple(
            t if t.requires_grad or not t.is_floating_point() else t.view(torch.int32) for t in sent
        )


class _DeepSpeedLast(torch.nn.Module):
    def __init__(self, first: Stage, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        ids = torch.ones(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.long)
        with torch.no_grad():
            self.floats = [t.is_floating_point() for t in first(ids)]

    def forward(self, received: tuple[Tensor, ...]) -> Tensor:
        tensors = [
            t.view(torch.float32) if is_float and not t.is_floating_point() else t
            for t, is_float in zip(received, self.floats, strict=True)
        ]
        output: Tensor = self.stage(*tensors).logits
        return output


def bare_deepspeed(mesh: Any) -> Step:
    """A PipelineModule of the two stages, whose boundary it can carry: one tensor with gradient."""
    from slapo.framework_dialect.deepspeed.load import import_deepspeed, quiet

    deepspeed = import_deepspeed("cpu")
    stages = _stages()

    ends = [_DeepSpeedFirst(stages[0]), _DeepSpeedLast(*stages)]
    with quiet():
        module = deepspeed.pipe.PipelineModule(
            ends, num_stages=2, loss_fn=_loss_of_logits, partition_method="uniform"
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
