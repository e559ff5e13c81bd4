"""What an engine offers on every target, as jobs of several processes. See test_engine.py."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from tests.runtimes import contract
from tests.runtimes.alone import compare, largest_difference, of_this_rank, whole
from tests.runtimes.contract import BATCH, LENGTH, VOCABULARY, Model, make, prepare

STEPS, CLIP = 4, 0.1


# --- losses that count ---------------------------------------------------------------------------
def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Over tokens that have a target."""
    total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def uneven(steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples have from no target to all; so do micro-batches and replicas."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        ids, targets = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
        for sample in range(BATCH):
            targets[sample, sample % (LENGTH + 1) :] = -100
        yield ids, targets


def as_tokenized(batch: Any) -> Any:
    """As the tokenizers of Transformers return them: a mapping that is no dict."""
    return UserDict(ids=batch[0]), batch[1]


def train_uneven(
    rank: int, world: int, setup: str | None, target: str, layout: Any, options: dict[str, Any]
) -> dict[str, float]:
    """Clipped at every step, with losses that count."""
    prepare(setup)
    engine, _ = make(target, layout, loss_fn=counted, clip_grad_norm=CLIP, **options)
    alone = contract.alone(loss_fn=counted, clip=CLIP)
    found = compare(engine, alone, uneven(), as_tokenized)
    assert min(alone.norms) > CLIP
    assert engine.step_count == STEPS
    return found


# --- the rest of the surface ---------------------------------------------------------------------
def no_decay_for_biases(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    biases = [p for name, p in named_parameters if name.endswith("bias")]
    others = [p for name, p in named_parameters if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1)


def use_all(
    rank: int, world: int, setup: str | None, target: str, layout: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """Modes, norms, names, values in and out, evaluations of any size."""
    prepare(setup)
    found: dict[str, Any] = {}
    given = {"optimizer": no_decay_for_biases, "clip_grad_norm": math.inf}
    engine, _ = make(target, layout, **given, **options)
    engine.eval()
    start = {name: whole(t).clone() for name, t in engine.state_dict().items()}
    alone = contract.alone(optimizer=no_decay_for_biases, named=True)
    found["apart"] = compare(engine, alone, contract.data(2))
    found["training"] = all(m.training for m in engine.module.modules())

    # Back to the start: a copy of the optimizer's own would go on from where it was.
    engine.load_state_dict(start)
    again = contract.alone(optimizer=no_decay_for_biases, named=True)
    found["loaded"] = largest_difference(engine, again.state())
    engine.eval_batch(iter([of_this_rank(engine.mesh, next(contract.data()))]))
    found["after loading"] = compare(engine, again, contract.data(1, seed=9))
    found["steps"] = engine.step_count

    # Evaluations of any number of samples.
    found["evaluated"] = []
    for samples in (7, 3, 1):
        generator = torch.Generator().manual_seed(samples)
        ids, targets = torch.randint(0, VOCABULARY, (2, samples, LENGTH), generator=generator)
        loss, outputs = engine.eval_batch(iter([(ids, targets)]), return_outputs=True)
        wanted, expected = again.evaluate((ids, targets))
        shown = torch.cat(outputs) if outputs else None
        apart = 0.0 if shown is None else (shown - expected).abs().max().item()
        found["evaluated"].append((abs(loss.item() - wanted), apart, shown is not None))
    try:
        engine.load_state_dict({"nothing": torch.ones(1)})
    except ValueError as error:
        found["names"] = str(error)
    return found


# --- what must be alike --------------------------------------------------------------------------
def differ(rank: int, world: int, setup: str | None, target: str, layout: Any) -> dict[str, str]:
    """What a build says about ranks that differ, and a build that makes them equal."""
    prepare(setup)
    found = {}

    def attempt(name: str, **options: Any) -> Any:
        try:
            engine, _ = make(target, layout, **options)
            found[name] = "no error"
            return engine
        except (slapo.SlapoError, ValueError) as error:
            found[name] = str(error)
            return None

    attempt("clip", clip_grad_norm=1.0 + rank)
    attempt("rate", optimizer=_Rate(0.1 * (1 + rank)).make())
    attempt("seed", seed=rank)
    engine = attempt("synced", seed=rank, sync_replicated=True)
    if engine is not None:
        found["whole"] = str(
            [
                float(t.float().sum())
                for n, t in engine.state_dict().items()
                if t.shape == Model().state_dict()[n].shape
            ]
        )
    return found


class _Rate:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def make(self) -> Any:
        import functools

        return functools.partial(torch.optim.SGD, lr=self.rate)


def forget_a_collective(rank: int, world: int, setup: str | None, target: str) -> str:
    """The second layer of a block is sharded, and its partial sums are never added."""
    prepare(setup)
    mesh = slapo.init_mesh(tp=2, device="cpu")
    torch.manual_seed(0)
    sch = slapo.create_schedule(Model().train(), group=mesh["tp"])
    for block in sch.select("h.*"):
        block["up"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
        block["down"].shard("weight", 1)
    engine, _ = slapo.build(
        sch, target=target, mesh=mesh, loss_fn=contract.loss_fn, optimizer=contract.sgd
    )
    try:
        engine.train_batch(contract.data())
    except slapo.SlapoError as error:
        return str(error)
    return "no error"


def forget_a_step(rank: int, world: int, setup: str | None, target: str) -> str:
    prepare(setup)
    engine, _ = make(target, (1, 1, 1), micro_batches=1)
    batches = contract.data()
    ids, targets = next(batches)
    engine.backward(contract.loss_fn(engine(ids), targets))
    try:
        engine.train_batch(batches)
    except slapo.SlapoError as error:
        engine.step()
        engine.train_batch(batches)
        return str(error)
    return "no error"
