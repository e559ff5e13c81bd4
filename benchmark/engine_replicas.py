"""Replicas of a model on two ranks: by an engine, and by the library that it drives.

A GPT-2 of a size at which a step computes more than it calls. Both sides have the same weights,
loss and batches, and AdamW as one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from benchmark.models import hf_gpt2

HIDDEN, LAYERS, HEADS, VOCABULARY = 256, 4, 4, 2048
BATCH, LENGTH = 4, 64
#: Elements; DeepSpeed's own default of 500 million would be gigabytes.
BUCKET = 2_000_000
ZERO_CONFIG: dict[str, Any] = {
    "zero_optimization": {
        "stage": 1,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    },
    "steps_per_print": 10**9,
}

Step = Callable[[], Any]


def model() -> nn.Module:
    """The same weights at each call."""
    torch.manual_seed(0)
    made: nn.Module = hf_gpt2(LAYERS, HIDDEN, VOCABULARY, HEADS, LENGTH)
    return made.train()


def repeated(
    vocabulary: int, batch: int, length: int, seed: int
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """One batch, again and again."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
    while True:
        yield {"input_ids": ids}, ids


def _data() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    return repeated(VOCABULARY, BATCH, LENGTH, 1 + dist.get_rank())


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """Of the next token."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


_optimizer = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)


# --- sides ---------------------------------------------------------------------------------------
def engine_ddp(mesh: Any) -> Step:
    return _engine(mesh, target="torch")


def engine_zero(mesh: Any) -> Step:
    return _engine(mesh, target="deepspeed", zero=1, config=ZERO_CONFIG)


def _engine(mesh: Any, **options: Any) -> Step:
    """With all defaults."""
    sch = slapo.create_schedule(model(), group=mesh["tp"])
    engine, _ = slapo.build(sch, mesh=mesh, loss_fn=loss_of, optimizer=_optimizer, **options)
    batches = _data()
    return lambda: engine.train_batch(batches)


def bare_ddp(mesh: Any) -> Step:
    """As its tutorial has it; the loss is known to its own rank."""
    module = nn.parallel.DistributedDataParallel(model(), process_group=mesh.get_group("dp"))
    optimizer, batches = _optimizer(module.parameters()), _data()

    def step() -> Tensor:
        inputs, labels = next(batches)
        optimizer.zero_grad()
        loss = loss_of(module(**inputs), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def bare_zero(mesh: Any) -> Step:
    """``deepspeed.initialize`` on the same module, with the same configuration."""
    from slapo.framework_dialect.deepspeed.load import import_deepspeed, quiet, quiet_warnings

    deepspeed = import_deepspeed("cpu")
    module = model()
    config = {
        **ZERO_CONFIG,
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
    }
    with quiet():
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=_optimizer(module.parameters()), config=config
        )
    batches = _data()

    def step() -> Tensor:
        inputs, labels = next(batches)
        with quiet_warnings():
            loss = loss_of(engine(**inputs), labels)
            engine.backward(loss)
            engine.step()
        return loss

    return step
