"""The ranks of the pipeline benchmark: models that take a known time, engines, steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from benchmark.measure import timed

#: Seconds that each of the three parts of a layer waits.
WAIT = 0.04
#: The end of a wait is spent awake: a sleeper may be woken late.
AWAKE = 0.002
WIDTH = 8
#: Of a matrix product: rows of a micro-batch, columns.
ROWS, COLUMNS = 256, 1024
#: Of each rank, in every schedule: one stage of both, or two stages of one.
LAYERS = 2
#: A rank that waits longer for another one gives up.
PATIENCE = timedelta(seconds=120)


# --- models --------------------------------------------------------------------------------------
class _Waits:
    """Seconds that the waits of this process took: a little more than asked for, on a busy machine.

    Work is what they took. A late awakening is none of the schedule's idle time.
    """

    took = 0.0


def _wait(seconds: float) -> None:
    start = time.perf_counter()
    time.sleep(max(0.0, seconds - AWAKE))
    while time.perf_counter() < start + seconds:
        pass
    _Waits.took += time.perf_counter() - start


class _WaitInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        _wait(ctx.seconds)
        return grad, None


class Waiting(nn.Module):
    """A layer whose forward, backward of inputs and backward of weights take a known time.

    The product is the node at which torch splits a backward in two: its first half goes on to `x`
    alone, its second one to the weight alone, and each waits on its way.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        _wait(self.seconds)
        weight = _WaitInBackward.apply(self.weight, self.seconds)
        return _WaitInBackward.apply(x, self.seconds) * weight


class Product(nn.Module):
    """A layer with one matrix product for each of the three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Start(nn.Module):
    """A trained offset, so that the first layer too has a gradient of its input to compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


@dataclass(frozen=True)
class Case:
    """One measurement.

    Parameters
    ----------
    compute
        ``"waiting"`` or ``"products"``.
    schedule, stages
        Name, and stages of each rank.
    pp, micro_batches
        Ranks, and micro-batches of a step.
    seconds
        What a part of a layer waits.
    """

    compute: str
    schedule: str
    stages: int
    pp: int
    micro_batches: int
    seconds: float = WAIT

    def layer(self) -> nn.Module:
        return Waiting(self.seconds) if self.compute == "waiting" else Product()

    def batch(self) -> Tensor:
        rows, width = (1, WIDTH) if self.compute == "waiting" else (ROWS, COLUMNS)
        return torch.randn(self.micro_batches * rows, width)


def _loss(output: Tensor, target: Any) -> Tensor:
    return output.mean()


def _engine(case: Case, mesh: Any) -> Any:
    layers = [case.layer() for _ in range(LAYERS * case.pp)]
    model = nn.Sequential(Start(case.batch().shape[1]), *layers)
    sch = slapo.create_schedule(model, group=mesh["tp"])
    sch.trace_until("")
    per_stage = LAYERS // case.stages
    for end in range(per_stage, len(layers), per_stage):
        sch[str(end)].cut_pipeline_stage()
    return slapo.build(
        sch,
        target="torch",
        mesh=mesh,
        loss_fn=_loss,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        micro_batches=case.micro_batches,
        pipeline_schedule=case.schedule,
        check_batches=False,  # the step alone is measured
    )[0]


# --- steps ---------------------------------------------------------------------------------------
def rank_main(
    rank: int, cases: list[Case], rounds: int, warm_up: int, store: str, pipe: Connection
) -> None:
    """Life of a rank: an engine for each case; rounds in which each takes a step.

    Rank 0 sends lines of text, and at the end for each case the seconds of its steps, the seconds
    of work in them, and the time that the order of work allows, in units of a part of a stage.
    """
    torch.set_num_threads(1)
    pp = cases[0].pp
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, pp), rank=rank, world_size=pp, timeout=PATIENCE
    )
    mesh = slapo.init_mesh(pp=pp, dp=1, tp=1, device="cpu")
    torch.manual_seed(0)
    engines = [_engine(case, mesh) for case in cases]
    steps: list[list[tuple[float, float]]] = [[] for _ in cases]
    for turn in range(warm_up + rounds):
        for case, engine, measured in zip(cases, engines, steps, strict=True):
            found = _step(case, engine)
            if turn >= warm_up:
                measured.append(found)
        if rank == 0:
            pipe.send(f"{pp} ranks, round {turn + 1} of {warm_up + rounds}")
    spans = [_span(engine, case) for case, engine in zip(cases, engines, strict=True)]
    if rank == 0:
        pipe.send(list(zip(steps, spans, strict=True)))
    dist.barrier()
    dist.destroy_process_group()


def _step(case: Case, engine: Any) -> tuple[float, float]:
    """Seconds of a step, and of the work in it, as a mean over the ranks."""
    work = 0.0 if case.compute == "waiting" else _work_alone(case, engine.module)
    data = iter([(case.batch(), None)])
    _Waits.took = 0.0
    dist.barrier()
    times, _ = timed(lambda: engine.train_batch(data), collect=False)
    mean = torch.tensor([times.wall, work + _Waits.took], dtype=torch.float64) / case.pp
    dist.all_reduce(mean)
    return mean[0].item(), mean[1].item()


def _work_alone(case: Case, module: nn.Module) -> float:
    """Seconds that this rank's layers take for a step without a pipeline, all ranks at once."""
    layers = [m for m in module.modules() if isinstance(m, Product)]
    batch = case.batch()
    dist.barrier()

    def work() -> None:
        for part in batch.chunk(case.micro_batches):
            x = part.detach().requires_grad_()
            for layer in layers:
                x = layer(x)
            x.mean().backward()

    times, _ = timed(work, collect=False)
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return times.wall


def _span(engine: Any, case: Case) -> float | None:
    """Of the order in which torch runs the parts, where it tells."""
    if case.stages == 1:
        return None  # what torch says of 1F1B's last rank is not what that runs
    (run,) = engine._runs.values()  # it is in no public attribute
    return span_of_order(run.pipeline_order, case.pp * case.stages)


# --- what torch's order of work allows -----------------------------------------------------------
def span_of_order(order: dict[int, list[Any]], stages: int) -> float:
    """Time of a step in units of a stage's F = B = W, if messages take none.

    Parameters
    ----------
    order
        For each rank its work: objects with ``stage_index``, ``computation_type`` and
        ``microbatch_index``, as ``torch.distributed.pipelining`` has them, or None.
    stages
        Of the whole pipeline.
    """
    waiting = {rank: [a for a in actions if _parts(a)] for rank, actions in order.items()}
    clock = dict.fromkeys(order, 0.0)
    done: dict[tuple[str, int, int], float] = {}
    while any(waiting.values()):
        moved = False
        for rank, actions in waiting.items():
            while actions and (ready := _ready_at(actions[0], done, stages)) is not None:
                action = actions.pop(0)
                begin = max(clock[rank], ready)
                kind, cost = _parts(action)
                clock[rank] = begin + cost
                done[kind, action.stage_index, action.microbatch_index] = clock[rank]
                moved = True
        if not moved:
            raise RuntimeError("the schedule waits for itself")
    return max(clock.values())


_COSTS = {"F": ("F", 1.0), "I": ("B", 1.0), "W": ("W", 1.0), "B": ("B", 2.0)}


def _parts(action: Any) -> Any:
    return action and _COSTS.get(action.computation_type.value)


def _ready_at(action: Any, done: dict[tuple[str, int, int], float], stages: int) -> float | None:
    kind, _ = _parts(action)
    stage, part = action.stage_index, action.microbatch_index
    needs = []
    if kind == "F" and stage > 0:
        needs = [("F", stage - 1, part)]
    elif kind == "B":
        needs = [("F", stage, part)] + [("B", stage + 1, part)] * (stage + 1 < stages)
    elif kind == "W":
        needs = [("B", stage, part)]
    if any(need not in done for need in needs):
        return None
    return max((done[need] for need in needs), default=0.0)
