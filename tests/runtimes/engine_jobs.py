"""What an engine offers on every target, as jobs of several processes. See test_engine.py."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from tests.runtimes import contract
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


def train_uneven_alone(clip: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and parameters of one process that sees whole batches."""
    torch.manual_seed(0)
    model = Model().train()
    optimizer = contract.sgd(list(model.parameters()))
    losses, norms = [], []
    for ids, targets in uneven():
        total, count = counted(model(ids), targets)
        (total / count).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    return losses, norms, copy.deepcopy(model.state_dict())


def of_this_rank(engine: Any, batches: Iterator[Any]) -> Iterator[Any]:
    dp, size = engine.mesh.get_local_rank("dp"), engine.mesh["dp"].size()
    part = BATCH // size
    for ids, targets in batches:
        rows = slice(dp * part, (dp + 1) * part)
        # As the tokenizers of Transformers return them: a mapping that is no dict.
        yield UserDict(ids=ids[rows]), targets[rows]


def train_uneven(
    rank: int, world: int, setup: str | None, target: str, layout: Any, options: dict[str, Any]
) -> dict[str, Any]:
    prepare(setup)
    engine, _ = make(target, layout, loss_fn=counted, clip_grad_norm=CLIP, **options)
    batches = of_this_rank(engine, uneven())
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(engine.train_batch(batches).item())
        norms.append(float(engine.grad_norm))
    return {"losses": losses, "norms": norms, "state": _copied(engine), "steps": engine.step_count}


def _copied(engine: Any) -> dict[str, Tensor]:
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in engine.state_dict().items()
    }


# --- the rest of the surface ---------------------------------------------------------------------
def no_decay_for_biases(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    biases = [p for name, p in named_parameters if name.endswith("bias")]
    others = [p for name, p in named_parameters if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1)


def train_groups_alone() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model().train()
    optimizer = no_decay_for_biases(list(model.named_parameters()))
    for ids, targets in contract.data(2):
        contract.loss_fn(model(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def use_all(
    rank: int, world: int, setup: str | None, target: str, layout: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """Modes, norms, names, values in and out, evaluations of any size."""
    prepare(setup)
    found: dict[str, Any] = {}
    engine, _ = make(
        target, layout, optimizer=no_decay_for_biases, clip_grad_norm=math.inf, **options
    )
    start = _copied(engine)
    engine.eval()
    batches = contract.data(9)
    dp, size = engine.mesh.get_local_rank("dp"), engine.mesh["dp"].size()
    mine = slice(dp * BATCH // size, (dp + 1) * BATCH // size)
    data = ((ids[mine], targets[mine]) for ids, targets in batches)
    found["norms"] = []
    for _ in range(2):
        engine.train_batch(data)
        found["norms"].append(float(engine.grad_norm))
    found["training"] = all(m.training for m in engine.module.modules())
    found["state"], found["steps"] = _copied(engine), engine.step_count

    # Back to the start: the same steps give the same again, so what the optimizer works on is back.
    engine.load_state_dict(start)
    found["loaded"] = _apart(_copied(engine), start)
    engine.eval_batch(data)
    # The last step, from the values that are loaded: a copy of its own would show.
    torch.manual_seed(0)
    alone = Model().train()
    optimizer = no_decay_for_biases(list(alone.named_parameters()))
    ids, targets = next(contract.data(1, seed=9))
    contract.loss_fn(alone(ids), targets).backward()
    optimizer.step()
    engine.train_batch(iter([(ids[mine], targets[mine])]))
    found["after loading"] = _apart(_copied(engine), alone.state_dict())

    # Evaluations of any number of samples.
    found["evaluated"] = []
    for samples in (7, 3, 1):
        generator = torch.Generator().manual_seed(samples)
        ids, targets = torch.randint(0, VOCABULARY, (2, samples, LENGTH), generator=generator)
        loss, outputs = engine.eval_batch(iter([(ids, targets)]), return_outputs=True)
        with torch.no_grad():
            expected = alone.eval()(ids)
        wanted = contract.loss_fn(expected, targets).item()
        shown = torch.cat(outputs) if outputs else None
        apart = 0.0 if shown is None else (shown.float() - expected).abs().max().item()
        found["evaluated"].append((abs(loss.item() - wanted), apart, shown is not None))
    try:
        engine.load_state_dict({"nothing": torch.ones(1)})
    except ValueError as error:
        found["names"] = str(error)
    return found


def _apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max((ours[n].float() - _part(theirs[n], ours[n])).abs().max().item() for n in ours)


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """The slice of this tensor-parallel rank, of two."""
    for axis, (size, wanted) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if size != wanted:
            return whole.chunk(2, axis)[torch.distributed.get_rank() % 2]
    return whole


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
                for n, t in _copied(engine).items()
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
