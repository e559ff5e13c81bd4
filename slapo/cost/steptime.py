"""Seconds of a step: compute and collectives of each stage, the pipeline's order, what remains."""

from __future__ import annotations

from dataclasses import dataclass, fields

from slapo.cost.layout import Layout
from slapo.cost.machine import Machine
from slapo.cost.memory import order
from slapo.cost.stages import StageParts
from slapo.cost.state import SINGLE
from slapo.cost.update import Update

#: The share of the last backward behind which reductions of gradients hide.
HIDDEN = 0.5


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, in parts that add up.

    Parameters
    ----------
    forward, backward
        Compute of the slowest stage, all micro-batches; what is computed again is in `backward`.
    tensor_parallel
        Its collectives over the tensor-parallel ranks.
    messages
        Between stages, as far as a micro-batch waits for them.
    bubble
        In which that stage waits for others.
    data_parallel
        Reduction of gradients, and gathering of parameters, that compute does not hide.
    update
        The optimizer's.
    """

    forward: float
    backward: float
    tensor_parallel: float
    messages: float
    bubble: float
    data_parallel: float
    update: float

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(getattr(self, f.name) for f in fields(self))

    def parts(self) -> dict[str, float]:
        """By name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class _Costs:
    """Of one micro-batch on a stage."""

    forward: float
    backward: float
    talk_forward: float
    talk_backward: float


def time_of(stages: list[StageParts], layout: Layout, machine: Machine, update: Update) -> StepTime:
    """Of a job whose ranks are neighbours by tp, then dp, then pp."""
    costs = [_costs(parts, machine) for parts in stages]
    far = [_leaves_node(stage, layout, machine) for stage in range(len(stages))]
    sent = [(parts.sent.crossing, parts.sent.gradient) if parts.sent else None for parts in stages]
    hops, backs = (
        [
            machine.message(size[way], is_far) if size else 0.0
            for size, is_far in zip(sent, far, strict=True)
        ]
        for way in (0, 1)
    )
    end = _simulate(costs, hops, backs, layout)
    count = layout.micro_batches
    slowest = max(costs, key=lambda c: c.forward + c.backward + c.talk_forward + c.talk_backward)
    busy = [count * part for part in (slowest.forward, slowest.backward)]
    talk = count * (slowest.talk_forward + slowest.talk_backward)
    messages = sum(hops) + sum(backs)
    bubble = max(0.0, end - sum(busy) - talk - messages) if len(stages) > 1 else 0.0
    messages = min(messages, max(0.0, end - sum(busy) - talk))
    reduced = max(
        _reduction(parts, layout, machine, HIDDEN * cost.backward)
        for parts, cost in zip(stages, costs, strict=True)
    )
    steps = max(machine.time_of(update.kernels_for(_stepped(parts, layout))) for parts in stages)
    return StepTime(
        forward=busy[0],
        backward=busy[1],
        tensor_parallel=talk,
        messages=messages,
        bubble=bubble,
        data_parallel=reduced,
        update=steps,
    )


def _leaves_node(stage: int, layout: Layout, machine: Machine) -> bool:
    """Whether a rank of a stage sends to another node: its ranks are next to each other."""
    ranks, node = layout.tp * layout.dp, machine.devices
    own = range(stage * ranks, (stage + 1) * ranks)
    return any(rank // node != (rank + ranks) // node for rank in own)


def _costs(parts: StageParts, machine: Machine) -> _Costs:
    """Of a later micro-batch, which adds to gradients, as most do."""
    forward = [step.forward for step in parts.steps]
    backward = [step.backward(first=False) for step in parts.steps]
    return _Costs(
        sum(machine.time_of(s.kernels) for s in forward),
        sum(machine.time_of(s.kernels) for s in backward),
        sum(machine.communication(s.collectives) for s in forward),
        sum(machine.communication(s.collectives) for s in backward),
    )


def _simulate(costs: list[_Costs], hops: list[float], backs: list[float], layout: Layout) -> float:
    """When the last stage to end has ended: each runs its order, as soon as inputs are there."""
    stages, count = len(costs), layout.micro_batches
    waiting = [list(order(layout.schedule, s, stages, count))[::-1] for s in range(stages)]
    free = [0.0] * stages
    done: dict[tuple[str, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for stage, cost in enumerate(costs):
            while waiting[stage]:
                kind, number = waiting[stage][-1]
                source = stage - 1 if kind == "F" else stage + 1
                ready = 0.0
                if 0 <= source < stages:
                    if (kind, number, source) not in done:
                        break
                    hop = hops[source] if kind == "F" else backs[stage]
                    ready = done[kind, number, source] + hop
                took = (
                    cost.forward + cost.talk_forward
                    if kind == "F"
                    else cost.backward + cost.talk_backward
                )
                free[stage] = max(free[stage], ready) + took
                done[kind, number, stage] = free[stage]
                waiting[stage].pop()
                moved = True
    return max(free)


def _stepped(parts: StageParts, layout: Layout) -> list[int]:
    """Elements of what the optimizer steps on, on one rank."""
    trained = [held.elements for held in parts.held.values() if held.is_trained]
    if layout.data_parallel == "fsdp":
        return [count // layout.dp for count in trained]
    return [sum(trained) // layout.dp] if layout.zero else trained


def _reduction(parts: StageParts, layout: Layout, machine: Machine, hidden: float) -> float:
    """Seconds of the data-parallel ranks' collectives beyond what compute hides.

    Engines of PyTorch and Megatron add gradients of half precision in float32. ZeRO-2 and 3 share
    gradients out, and so reduce those of every micro-batch; FSDP2 here reduces their sum.
    """
    if layout.dp == 1:
        return 0.0
    trained = [held for held in parts.held.values() if held.is_trained]
    size = sum(held.size for held in trained)
    sums = size if layout.target == "deepspeed" else sum(SINGLE * held.elements for held in trained)
    reduce = machine.collective("all_reduce", sums, layout.dp, layout.tp)
    gather = machine.collective("all_gather", size, layout.dp, layout.tp)
    count = layout.micro_batches
    if layout.data_parallel == "fsdp":
        gathers = 1 if layout.pp > 1 else 2 * count
        return max(0.0, gathers * gather + reduce / 2 - hidden * 2 * count)
    if layout.zero == 3:
        return max(0.0, count * (2 * gather + reduce / 2 - 2 * hidden))
    if layout.zero == 2:
        return max(0.0, count * (reduce / 2 - hidden)) + gather
    if layout.zero == 1:
        return max(0.0, reduce / 2 - hidden) + gather
    return max(0.0, reduce - hidden)
