"""Time of a step: compute and collectives of each stage, pipeline order, and the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass

from slapo.cost.layout import Layout
from slapo.cost.machine import Machine
from slapo.cost.memory import SINGLE, order
from slapo.cost.runs import Segment
from slapo.cost.stages import StageParts
from slapo.cost.update import Update

#: Fraction of the last backward that gradient reductions overlap with. A CPU overlaps nothing,
#: since the cores that compute also copy and add.
HIDDEN = 0.5
#: Operators of DeepSpeed's ZeRO, counted on its engines: for each gradient, mostly views, and for
#: the norm of each parameter in a rank's slice.
ZERO_OPERATORS, ZERO_NORM_OPERATORS = 15, 2
#: Bytes per element of that slice that the step moves besides the optimizer: it computes the norm
#: in float64, copies the gradients into one tensor, and the result into the model.
ZERO_TRAFFIC = 36
#: ZeRO 3 gathers parameters of at most so many elements one by one after each step. This is
#: DeepSpeed's ``stage3_param_persistence_threshold``.
PERSISTENT = 100_000


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, in parts that add up.

    Parameters
    ----------
    forward, backward
        Compute of the slowest stage over all micro-batches; `backward` includes recomputation.
    tensor_parallel
        Collectives of that stage over the tensor-parallel ranks.
    messages
        Messages between stages, as far as a micro-batch waits for them.
    bubble
        Time in which that stage waits for others.
    data_parallel
        Gradient reductions and parameter gathers that do not overlap with compute.
    update
        Optimizer step.
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
        """Seconds of the full step."""
        return sum(asdict(self).values())


#: Seconds of a micro-batch on a stage: (compute, collectives) for forward and for backward.
_Costs = dict[str, tuple[float, float]]


def time_of(stages: list[StageParts], layout: Layout, machine: Machine, update: Update) -> StepTime:
    """Predict a step of a job whose ranks are ordered by tp, then dp, then pp."""

    @functools.cache  # most layers share their segments
    def seconds(segment: Segment) -> tuple[float, float]:
        return machine.time_of(segment.kernels), machine.communication(segment.collectives)

    costs = [_costs(parts, seconds) for parts in stages]
    hops, backs = [], []
    for stage, parts in enumerate(stages):
        far = _leaves_node(stage, layout, machine)
        sizes = (parts.sent.crossing, parts.sent.gradient) if parts.sent else (0, 0)
        hop, back = (machine.message(size, far) if size else 0.0 for size in sizes)
        hops.append(hop)
        backs.append(back)
    passes = tuple((sum(each["F"]), sum(each["B"])) for each in costs)
    end = _simulate(passes, tuple(hops), tuple(backs), layout.schedule, layout.micro_batches)
    count = layout.micro_batches
    # The parts of the slowest stage add up to the step; what it waits for is bubble or messages.
    slowest = max(costs, key=lambda c: c["F"][0] + c["B"][0] + c["F"][1] + c["B"][1])
    forward, backward = (count * slowest[kind][0] for kind in "FB")
    talk = count * sum(slowest[kind][1] for kind in "FB")
    rest = end - (forward + backward) - talk
    messages = sum(hops) + sum(backs)
    hidden = HIDDEN if machine.is_asynchronous else 0.0
    return StepTime(
        forward=forward,
        backward=backward,
        tensor_parallel=talk,
        messages=min(messages, max(0.0, rest)),
        bubble=max(0.0, rest - messages) if len(stages) > 1 else 0.0,
        data_parallel=max(
            _reduction(parts, layout, machine, hidden * cost["B"][0])
            for parts, cost in zip(stages, costs, strict=True)
        ),
        update=max(
            machine.time_of(update.kernels_for(_stepped(p, layout))) + _zero(p, layout, machine)
            for p in stages
        ),
    )


def _leaves_node(stage: int, layout: Layout, machine: Machine) -> bool:
    """Return whether a rank of a stage sends to another node."""
    ranks, node = layout.tp * layout.dp, machine.devices
    own = range(stage * ranks, (stage + 1) * ranks)
    return any(rank // node != (rank + ranks) // node for rank in own)


def _costs(parts: StageParts, seconds: Callable[[Segment], tuple[float, float]]) -> _Costs:
    def both(each: list[Segment]) -> tuple[float, float]:
        costs = [seconds(segment) for segment in each]
        return sum(compute for compute, _ in costs), sum(talk for _, talk in costs)

    # Most micro-batches add to existing gradients, as a later one does.
    return {
        "F": both([step.forward for step in parts.steps]),
        "B": both([step.backward(first=False) for step in parts.steps]),
    }


@functools.lru_cache(maxsize=64)  # engines of one layout differ only in data parallelism
def _simulate(
    costs: tuple[tuple[float, float], ...],
    hops: tuple[float, ...],
    backs: tuple[float, ...],
    schedule: str,
    count: int,
) -> float:
    """Return the end of the last stage; each pass starts as soon as its inputs have arrived."""
    stages = len(costs)
    # Each stage runs its passes in its own order, so its next one is known: run it as soon as the
    # pass that feeds it has an end time. Rounds over the stages repeat until none can move.
    waiting = [list(order(schedule, stage, stages, count))[::-1] for stage in range(stages)]
    free = [0.0] * stages
    #: end times of the micro-batches of each stage, in order
    ends: dict[str, list[list[float]]] = {kind: [[] for _ in costs] for kind in "FB"}
    moved = True
    while moved:
        moved = False
        for stage, (forward, backward) in enumerate(costs):
            events = waiting[stage]
            while events:
                kind, number = events[-1]
                source = stage - 1 if kind == "F" else stage + 1
                if 0 <= source < stages:
                    before = ends[kind][source]
                    if number >= len(before):
                        break
                    ready = before[number] + (hops[source] if kind == "F" else backs[stage])
                    free[stage] = max(free[stage], ready)
                free[stage] += forward if kind == "F" else backward
                ends[kind][stage].append(free[stage])
                events.pop()
                moved = True
    return max(free)


def _stepped(parts: StageParts, layout: Layout) -> list[int]:
    """Return the element counts that the optimizer steps on, on one rank."""
    trained = [held.elements for held in parts.held.values() if held.is_trained]
    if layout.data_parallel == "fsdp":
        return [count // layout.dp for count in trained]
    # ZeRO flattens all parameters into one tensor and steps on a rank's slice of it.
    return [sum(trained) // layout.dp] if layout.zero else trained


def _is_zero(layout: Layout) -> bool:
    """Return whether DeepSpeed shards anything; for Megatron `zero` is its own optimizer."""
    return layout.target == "deepspeed" and layout.zero > 0


def _zero(parts: StageParts, layout: Layout, machine: Machine) -> float:
    """Return the seconds that DeepSpeed's ZeRO adds to an optimizer step."""
    if not _is_zero(layout):
        return 0.0
    trained = [held for held in parts.held.values() if held.is_trained]
    moved = ZERO_TRAFFIC * sum(held.elements for held in trained) / layout.dp
    operators = ZERO_NORM_OPERATORS * len(trained) / layout.dp
    small = [held.size for held in trained if layout.zero == 3 and held.elements <= PERSISTENT]
    talk = [("all_reduce", SINGLE), *(("all_gather", size) for size in small)]
    return (
        machine.traffic(moved)
        + operators * machine.overhead
        + sum(machine.collective(name, size, layout.dp, layout.tp) for name, size in talk)
    )


def _reduction(parts: StageParts, layout: Layout, machine: Machine, hidden: float) -> float:
    """Return the seconds of data-parallel collectives that do not overlap with compute."""
    if layout.dp == 1:
        return 0.0
    trained = [held for held in parts.held.values() if held.is_trained]
    size = sum(held.size for held in trained)
    # PyTorch and Megatron engines reduce half-precision gradients in float32.
    sums = size if layout.target == "deepspeed" else sum(SINGLE * held.elements for held in trained)
    is_sharded = layout.data_parallel == "fsdp" or layout.zero == 3
    # One collective per layer, and one for the rest.
    units = len(set(parts.layer_of.values())) + 1 if is_sharded else 1

    def seconds(name: str, size: float, copies: float) -> float:
        moved = units * machine.collective(name, size / units, layout.dp, layout.tp)
        return moved + machine.traffic(copies * 2 * size)

    # Gradients are copied into and out of a flat buffer; DeepSpeed flattens its bucket again, and
    # copies a rank's slice of it once more.
    scatters = is_sharded or (layout.target == "megatron" and layout.zero)
    copies = 3.0 if layout.target == "deepspeed" else 2.0
    operators = 0
    if _is_zero(layout):
        copies += 2 / layout.dp
        operators = ZERO_OPERATORS * len(trained)
    # ZeRO 1 and 2 all-reduce a bucket and keep a slice. ZeRO 2 and 3 shard gradients, so they
    # reduce those of every micro-batch; FSDP2 reduces their sum here.
    reduce = seconds("reduce_scatter" if scatters else "all_reduce", sums, copies)
    reduce += operators * machine.overhead
    gather = seconds("all_gather", size, 1)
    count = layout.micro_batches
    if layout.data_parallel == "fsdp":
        # Each layer is gathered for its forward and again for its backward; stages keep theirs for
        # a step.
        gathers = 1 if layout.pp > 1 else 2 * count
        return max(0.0, gathers * gather + reduce - hidden * 2 * count)
    if layout.zero == 3:
        return max(0.0, count * (2 * gather + reduce - 2 * hidden))
    if layout.zero == 2:
        return max(0.0, count * (reduce - hidden)) + gather
    return max(0.0, reduce - hidden) + (gather if layout.zero else 0.0)
