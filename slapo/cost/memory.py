"""Memory of a rank: fixed bytes of its engine, and the peak of all others during a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from slapo.cost.layout import Layout
from slapo.cost.runs import HeldParameter, Place, Run
from slapo.cost.stages import StageParts, Step
from slapo.cost.update import Update

SINGLE = 4
#: Bytes of the gradient-reduction buffers of stages: two of 25 MiB each exist at a time.
_BUCKETS = 2 * 25 * 2**20


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a rank in a step, in parts.

    Parameters
    ----------
    parameters
        Parameters and buffers of the model.
    gradients
        All gradients after the backward pass.
    optimizer
        Optimizer states, including float32 copies of parameters.
    activations
        Tensors kept from forward to backward, for all micro-batches in flight.
    buffers
        Engine buffers: messages between stages, gradient buckets, a step's inputs.
    working
        Other bytes at the peak. Gradients and activations peak at different times, so the parts may
        add up to more than the peak.
    peak
        All bytes at the peak.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    working: int
    peak: int


def order(schedule: str, stage: int, stages: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield the passes of a stage in order: ``("F", micro-batch)`` or ``("B", micro-batch)``.

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


def memory_of(
    parts: StageParts, stage: int, layout: Layout, run: Run, update: Update, dtype: torch.dtype
) -> Memory:
    """Simulate a step of a stage; `run` has the sizes of the model's buffers and inputs."""
    state = _state_of(parts, layout, update, dtype)
    count = layout.micro_batches
    received = parts.received.crossing if parts.received else 0
    back = parts.sent.gradient if parts.sent else 0
    # Torch's stages allocate a receive buffer for each micro-batch.
    buffers = state.buffers + run.inputs * count + (received + back) * count
    base = state.parameters + run.buffers + state.optimizer + buffers
    most, peak = _run(parts, state, layout, stage)
    # No activations are left when the optimizer steps, so the two peaks never coincide.
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


def _run(parts: StageParts, state: _State, layout: Layout, stage: int) -> tuple[int, int]:
    """Return the peak of activations, and the peak of all bytes that vary during a step."""
    # In 1F1B the middle micro-batches are alike, so a few represent them all.
    is_short = layout.schedule != "gpipe"
    few = layout.pp - stage + 2 if is_short else layout.micro_batches
    count = min(layout.micro_batches, few)
    received = parts.received.gradient if parts.received else 0
    sent = parts.sent.gradient if parts.sent else 0
    alive = gradients = extra = most = peak = 0
    # Tensors that one stage allocates and another frees, such as outputs, end with the micro-batch.
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
            if state.kept is not None and number in (0, count - 1):  # no change in between
                change = _kept(step, state, number, count)
                alive += change
                gradients += change
        alive -= received + left
        if number == 0:
            gradients += sum(held.size for held in parts.held.values() if held.is_trained)
    return most, peak


def _kept(step: Step, state: _State, number: int, count: int) -> int:
    """Return the bytes of gradients that stay of a segment minus those its backward allocates."""
    assert state.kept is not None
    owned = [h for h in step.owned if h.is_trained]
    size, elements = sum(h.size for h in owned), sum(h.elements for h in owned)
    now = state.kept(size, elements, number == count - 1)
    if number == 0:
        return now - size
    return now - state.kept(size, elements, False)


# --- engines -------------------------------------------------------------------------------------
@dataclass
class _State:
    """Bytes of a rank that do not come from running the model."""

    #: Bytes kept by the engine; gradients as at the optimizer step.
    parameters: int
    gradients: int
    optimizer: int
    #: Engine buffers that exist throughout a step.
    buffers: int = 0
    #: Bytes during forward and backward only, not at the optimizer step.
    around: int = 0
    #: Buffer that exists from the first gradient on.
    reducing: int = 0
    #: Bytes for reducing gradients after the backward pass.
    reduced: int = 0
    #: Working bytes of the optimizer step.
    working: int = 0
    #: Parameters gathered only while a layer runs, by place.
    gathered: dict[Place, int] = field(default_factory=dict)
    #: Gradients of a segment that stay: (bytes, elements, is last micro-batch) -> bytes. None keeps
    #: all that its backward makes.
    kept: Callable[[int, int, bool], int] | None = None

    def whole(self, step: Step, kind: str) -> int:
        """Return the gathered bytes while a segment runs; a backward also prefetches the next's."""
        return self.gathered.get(step.place, 0) * (2 if kind == "B" else 1)


def _state_of(parts: StageParts, layout: Layout, update: Update, dtype: torch.dtype) -> _State:
    """Return the engine's bytes for a stage on one rank."""
    # In half precision, optimizers have float32 copies.
    is_half = dtype in (torch.float16, torch.bfloat16)
    held = list(parts.held.values())
    if layout.target == "deepspeed":
        return _deepspeed(held, layout, update, is_half)
    if layout.target == "megatron":
        return _megatron(held, layout, update, is_half)
    # The torch engine uses FSDP2 for half precision too, with replicas of a single shard.
    if layout.data_parallel == "fsdp" or is_half:
        return _sharded(parts, layout, update)
    return _replicated(held, layout, update)


def _trained(held: list[HeldParameter]) -> list[int]:
    return [each.elements for each in held if each.is_trained]


def _replicated(held: list[HeldParameter], layout: Layout, update: Update) -> _State:
    """Replicated parameters; DDP keeps buckets in addition to the gradients."""
    elements = _trained(held)
    gradients = sum(each.size for each in held if each.is_trained)
    state = _State(
        parameters=sum(each.size for each in held),
        gradients=gradients,
        optimizer=round(update.state * sum(elements)),
        working=update.working(elements),
    )
    if layout.dp > 1 and layout.pp == 1:
        state.buffers = gradients
    elif layout.dp > 1:
        state.reduced = min(_BUCKETS, gradients)
    return state


def _sharded(parts: StageParts, layout: Layout, update: Update) -> _State:
    """FSDP2, which also keeps the float32 copies for half precision."""
    held = list(parts.held.values())
    shares = layout.dp if layout.data_parallel == "fsdp" else 1
    elements = [count // shares for count in _trained(held)]
    gathered = Counter[Place]()
    for name, place in parts.layer_of.items():
        gathered[place] += parts.held[name].size
    # Several layers of the full model may share a place.
    layers = Counter(step.place for step in parts.steps)
    one_layer = {place: size // max(layers[place], 1) for place, size in gathered.items()}
    # Parameters outside layers stay gathered from the first forward to the last backward. In a
    # pipeline those of layers do too.
    outside = sum(each.size for name, each in parts.held.items() if name not in parts.layer_of)
    stay_whole = layout.pp > 1
    single = SINGLE * sum(each.elements for each in held) // shares
    is_half = any(each.itemsize < SINGLE for each in held)

    def kept(size: int, count: int, is_last: bool) -> int:
        # Gradients accumulate whole in float32, and are sharded after the last micro-batch.
        return SINGLE * count // (shares if is_last else 1)

    # In float32 a single rank's parameters are already full, so there is no copy.
    copies = 1 if shares > 1 or is_half else 0
    return _State(
        parameters=single,
        gradients=SINGLE * sum(elements),
        optimizer=round(update.state * sum(elements)),
        around=copies * (sum(each.size for each in held) if stay_whole else outside),
        working=update.working(elements),
        gathered={} if stay_whole or not copies else one_layer,
        kept=kept,
    )


def _deepspeed(held: list[HeldParameter], layout: Layout, update: Update, is_half: bool) -> _State:
    """ZeRO (Rajbhandari et al. 2020): shards states (1), gradients (2), parameters (3)."""
    elements = _trained(held)
    shares = layout.dp if layout.zero else 1
    owned = sum(elements) // shares
    copies = SINGLE * owned if layout.zero or is_half else 0
    size = sum(each.size for each in held)
    gradients = sum(each.size for each in held if each.is_trained)
    own = [owned] if layout.zero or is_half else elements
    state = _State(
        parameters=size,
        gradients=gradients,
        optimizer=round(update.state * sum(own)) + copies,
        working=update.working(own),
    )
    itemsize = held[0].itemsize if held else SINGLE
    if layout.zero:
        state.reducing = layout.bucket * itemsize
    elif layout.dp > 1:
        state.reduced = min(layout.bucket * itemsize, gradients)
    if layout.zero >= 2:
        state.gradients = gradients // shares
        state.kept = lambda made, count, is_last: made // shares
    if layout.zero == 3:
        largest = max((each.size for each in held), default=0)
        state.parameters = size // shares
        state.around = min(size, 2 * largest + layout.bucket * itemsize)
    return state


def _megatron(held: list[HeldParameter], layout: Layout, update: Update, is_half: bool) -> _State:
    """Megatron: gradients in one float32 buffer throughout a step."""
    elements = _trained(held)
    shares = layout.dp if layout.zero else 1
    own = [count // shares for count in elements]
    copies = SINGLE * sum(own) if is_half else 0
    return _State(
        parameters=sum(each.size for each in held),
        gradients=SINGLE * sum(elements),
        optimizer=round(update.state * sum(own)) + copies,
        around=SINGLE * sum(elements),
        working=update.working(own),
        # Gradients go into the buffer at once (`around`), and what the backward allocates is freed.
        kept=lambda made, count, is_last: 0,
    )
