"""Bytes of a rank, moment by moment through a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slapo.cost.layout import Layout
from slapo.cost.runs import Run
from slapo.cost.stages import StageParts, Step
from slapo.cost.state import State


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at the worst moment of a step, in parts.

    Parameters
    ----------
    parameters
        And the model's buffers.
    gradients
        Once all are there.
    optimizer
        States of the optimizer, float32 copies of parameters among them.
    activations
        Kept from forward to backward, of all micro-batches in flight.
    buffers
        Of the engine: messages between stages, buckets of gradients, a step's inputs.
    working
        What the worst moment needs beyond these. Gradients and activations are not at their most
        at the same time, so that the parts may add up to more than the peak.
    peak
        At that moment.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    working: int
    peak: int


def order(schedule: str, stage: int, stages: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield forwards and backwards of a stage: ``("F", micro-batch)`` and ``("B", micro-batch)``.

    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", for 1F1B; Huang et al. 2019, "GPipe".
    """
    ahead = count if schedule == "gpipe" else min(count, stages - stage)
    if stages == 1:
        ahead = 1
    yield from (("F", number) for number in range(ahead))
    for number in range(count):
        yield "B", number
        if ahead + number < count:
            yield "F", ahead + number


def memory_of(parts: StageParts, state: State, layout: Layout, stage: int, run: Run) -> Memory:
    """Walk through a step of a stage; `run` has the sizes of the model's buffers and inputs."""
    count = layout.micro_batches
    received = parts.received.crossing if parts.received else 0
    back = parts.sent.gradient if parts.sent else 0
    buffers = state.buffers + run.inputs * count + (received + back) * count
    base = state.parameters + run.buffers + state.optimizer + buffers
    most, peak = _run(parts, state, layout, stage)
    in_step = state.gradients + max(state.reduced, state.working) + state.reducing
    worst = max(base + peak + state.around, base + in_step)
    activations = max(0, min(most, worst - base))
    rest = worst - base - state.gradients - activations
    return Memory(
        parameters=state.parameters + run.buffers,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations,
        buffers=buffers,
        working=max(0, rest),
        peak=worst,
    )


def _run(parts: StageParts, state: State, layout: Layout, stage: int) -> tuple[int, int]:
    """Return the peak of activations, and the peak of all that comes and goes."""
    count = layout.micro_batches
    received = parts.received.gradient if parts.received else 0
    sent = parts.sent.gradient if parts.sent else 0
    alive = gradients = extra = most = peak = 0
    # Tensors that one stage makes and another frees, such as the output, go with the micro-batch.
    left = sent - received
    left += sum(step.forward.delta + step.backward(first=False).delta for step in parts.steps)
    for kind, number in order(layout.schedule, stage, layout.pp, count):
        if kind == "F":
            for step in parts.steps:
                segment = step.forward
                peak = max(peak, alive + segment.peak + extra + state.whole(step, "F"))
                alive += segment.delta
            most = max(most, alive - gradients)
            continue
        alive += sent
        for step in reversed(parts.steps):
            segment = step.backward(number == 0)
            peak = max(peak, alive + segment.peak + extra + state.whole(step, "B"))
            extra = state.reducing
            alive += segment.delta
            if state.kept is not None:
                change = _kept(step, state, number, count)
                alive += change
                gradients += change
        alive -= received + left
        if number == 0:
            gradients += sum(held.size for held in parts.held.values() if held.is_trained)
    return most, peak


def _kept(step: Step, state: State, number: int, count: int) -> int:
    """Return the difference of the gradients that stay of a segment and those that it makes."""
    assert state.kept is not None
    owned = [h for h in step.owned if h.is_trained]
    size, elements = sum(h.size for h in owned), sum(h.elements for h in owned)
    now = state.kept(size, elements, number == count - 1)
    if number == 0:
        return now - size
    return now - state.kept(size, elements, False)
