"""What travels: collectives of a tensor-parallel layer, and messages between pipeline stages.

Both are counted where torch hands them to a process group, on real gloo processes. A layer's share
is the difference between a model with one layer more and one with one less.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import slapo
from examples.parallel_models import FAMILIES, Family, schedule
from slapo.agreement import gathered
from slapo.framework_dialect.batches import Batch
from slapo.framework_dialect.pytorch.placement import SCHEDULES
from slapo.pipeline import PipelinedModule, generate_pipeline_partition
from slapo.pipeline.boundaries import Boundaries, Boundary, describe_tensors
from slapo.sharding.groups import group_of_one
from tests.communication import Collectives
from tests.runtimes import contract
from tests.runtimes.layouts import SIZES, batches, build
from tests.runtimes.ranks import on_ranks

Counts = dict[str, int]


# --- tensor parallelism --------------------------------------------------------------------------
def model_of(family: Family, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return family.build(replace(SIZES, layers=layers)).train()


def collectives_of(name: str, layers: int, by_tokens: bool) -> tuple[Counter[str], Counter[str]]:
    """Forward and backward."""
    family = FAMILIES[name]
    inputs, targets = batches(family)[0]
    slapo.set_random_seed(1, tp_rank=torch.distributed.get_rank())  # which fork_rng() needs
    sch = slapo.create_schedule(model_of(family, layers), group=torch.distributed.group.WORLD)
    schedule(sch, family, sequence_parallel=by_tokens)
    model, _ = slapo.build(sch, check=False)  # which would compare the first gradients
    with Collectives() as forward:
        loss = family.loss(model(**inputs), targets)
    with Collectives() as backward:
        loss.backward()
    return forward.counts(), backward.counts()


def per_layer(name: str, few: int, by_tokens: bool = False) -> tuple[Counts, Counts]:
    """Forward and backward: what the model with one layer more does in addition."""
    less, more = (collectives_of(name, layers, by_tokens) for layers in (few, few + 1))
    return dict(more[0] - less[0]), dict(more[1] - less[1])


@pytest.mark.slow
@on_ranks(2)
def test_a_tensor_parallel_layer_reduces_twice_each_way() -> None:
    for name in ("gpt2", "bert", "llama"):
        assert per_layer(name, 2) == ({"allreduce_": 2}, {"allreduce_": 2}), name
        # And nothing beside the layers: embeddings and heads are whole.
        found = collectives_of(name, 2, by_tokens=False)
        assert found == ({"allreduce_": 4}, {"allreduce_": 4}), name


@pytest.mark.slow
@on_ranks(2)
def test_a_decoder_layer_of_t5_reduces_once_for_each_block_and_for_what_it_reads() -> None:
    """Of 3 layers the third is a decoder's; of 4 the fourth is an encoder's.

    A decoder layer has three blocks, so three sums forward, and backward as many for their inputs.
    The gradient of the encoder's states, which all its layers read, is summed once for all.
    """
    assert per_layer("t5", 2) == ({"allreduce_": 3}, {"allreduce_": 3})
    assert per_layer("t5", 3) == ({"allreduce_": 2}, {"allreduce_": 2})
    assert collectives_of("t5", 2, by_tokens=False) == ({"allreduce_": 5}, {"allreduce_": 6})


# Of parameters that see some of the tokens only: weight and bias of two norms, and the biases of
# two row layers. Llama has two norms without bias.
PARTIAL_GRADIENTS = {"gpt2": 6, "bert": 6, "llama": 2}


@pytest.mark.slow
@on_ranks(2)
def test_a_sequence_parallel_layer_has_the_published_pairs() -> None:
    """An all-gather before, and a reduce-scatter after, attention and MLP; backward the reverse."""
    pairs = {"_allgather_base_": 2, "_reduce_scatter_base_": 2}
    for name, partial in PARTIAL_GRADIENTS.items():
        backward = {**pairs, "allreduce_": partial}
        assert per_layer(name, 2, by_tokens=True) == (pairs, backward), name


# --- pipeline ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Message:
    """A tensor that one rank sent to another."""

    source: int
    target: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    content: bytes = b""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def kind(self) -> Message:
        return replace(self, content=b"")


class Messages(TorchDispatchMode):
    """Notes what is handed to a process group for sending, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            (tensor,), _, target, _ = args
            content = tensor.contiguous().numpy().tobytes()
            here = torch.distributed.get_rank()
            self.sent.append(Message(here, target, tuple(tensor.shape), tensor.dtype, content))
        return func(*args, **(kwargs or {}))


def messages_of(name: str, pp: int, pipeline_schedule: str) -> list[list[Message]]:
    """What each rank sends in a training step."""
    options = {"micro_batches": pp, "pipeline_schedule": pipeline_schedule}
    engine = build(name, "torch", (pp, 1, 1), loss_fn=FAMILIES[name].loss, **options)
    data = iter(batches(FAMILIES[name]))
    engine.train_batch(data)  # torch connects neighbors by messages of its own
    with Messages() as messages:
        engine.train_batch(data)
    return gathered(messages.sent, None)


def boundaries_of(name: str, stages: int, micro_batches: int) -> tuple[Boundary, ...]:
    """What each stage receives for one micro-batch, found in one process."""
    family = FAMILIES[name]
    sch = slapo.create_schedule(model_of(family, SIZES.layers), group=group_of_one())
    schedule(sch, family, stages)
    pipelined = generate_pipeline_partition(sch).mod
    assert isinstance(pipelined, PipelinedModule)
    part = Batch.of(batches(family)[0], "cpu").cut(micro_batches)[0]
    inputs = describe_tensors(pipelined.inputs.names, pipelined.bind(part.args, part.kwargs))
    local = dict(enumerate(pipelined.stages))
    return Boundaries(local, stages, torch.device("cpu")).of(inputs)


def check_messages(name: str, pp: int, pipeline_schedule: str, stages: int) -> list[list[Message]]:
    """Every message is one of a boundary's tensors, or its gradient; returns what ranks sent."""
    rank_of = SCHEDULES[pipeline_schedule].rank_of
    sent = messages_of(name, pp, pipeline_schedule)
    expected: Counter[Message] = Counter()
    for index, metas in enumerate(boundaries_of(name, stages, pp)[1:], 1):
        before, after = rank_of(index - 1, pp), rank_of(index, pp)
        for meta in metas if before != after else ():
            expected[Message(before, after, meta.shape, meta.dtype)] += pp
            if meta.requires_grad:
                expected[Message(after, before, meta.shape, meta.dtype)] += pp
    assert Counter(m.kind for by_rank in sent for m in by_rank) == expected, name
    return sent


def check_nothing_twice(sent: list[list[Message]], micro_batches: int) -> None:
    """In each micro-batch, what a stage sends on is all different."""
    for rank, messages in enumerate(sent[:-1]):
        forward = [m for m in messages if m.target == rank + 1]
        size, rest = divmod(len(forward), micro_batches)
        assert rest == 0
        for start in range(0, len(forward), size):
            part = forward[start : start + size]
            assert len({(m.shape, m.dtype, m.content) for m in part}) == size


# By hand, for a micro-batch of (2, 8) tokens in the middle of a model of width 16.
TOKENS, MASK, HIDDEN_STATES = 2 * 8 * 8, 2 * 8 * 8, 2 * 8 * 16 * 4
POSITIONS, COSINES = 8 * 8, 8 * 4 * 4
BYTES = {
    "gpt2": (TOKENS, POSITIONS, MASK, HIDDEN_STATES),
    "bert": (MASK, HIDDEN_STATES),
    # Between encoder and decoder: the decoder's tokens, and the padding that it looks past.
    "t5": (TOKENS, TOKENS, HIDDEN_STATES),
    "llama": (POSITIONS, MASK, COSINES, COSINES, HIDDEN_STATES),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [(2, 1, 1), pytest.param((4, 1, 1), marks=pytest.mark.wide)],
    ids=["pp2", "pp4"],
)
@on_ranks(timeout=280)
def test_each_boundary_sends_its_tensors_once_and_their_gradients_back(layout: Any) -> None:
    """As many micro-batches as stages."""
    pp = layout[0]
    for name in FAMILIES if pp == 2 else ("llama", "t5"):
        sent = check_messages(name, pp, "1f1b", pp)
        check_nothing_twice(sent, pp)
        if pp == 2:
            forward, backward = (sum(m.nbytes for m in by_rank) for by_rank in sent)
            assert (forward, backward) == (2 * sum(BYTES[name]), 2 * HIDDEN_STATES), name


@pytest.mark.slow
@pytest.mark.parametrize("pipeline_schedule", ["interleaved_1f1b", "zbv"])
@on_ranks(2, timeout=280)
def test_several_stages_on_a_rank_send_to_other_ranks_only(pipeline_schedule: str) -> None:
    check_messages("llama", 2, pipeline_schedule, 4)


# --- steps ---------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options", "expected"),
    [
        # The loss, which train_batch returns; and the embedding that both stages hold.
        ((2, 1, 1), {}, {"allreduce_": 2}),
        # And the norm, over the stages.
        ((2, 1, 1), {"clip_grad_norm": 1.0}, {"allreduce_": 3}),
        # And the mean over replicas, in one bucket, and how many targets they have.
        ((2, 2, 1), {}, {"allreduce_": 4}),
        ((2, 2, 1), {"loss_mean": "micro_batches"}, {"allreduce_": 3}),
        # Four times the least: two sums for each of four blocks, forward and backward.
        ((1, 1, 2), {"micro_batches": 1}, {"allreduce_": 1 + 8}),
        # Two blocks and what is around them: gathered once, for four micro-batches.
        (
            (2, 2, 1),
            {"data_parallel": "fsdp"},
            {"allreduce_": 3, "_allgather_base_": 3, "_reduce_scatter_base_": 3},
        ),
    ],
    ids=str,
)
@on_ranks()
def test_a_step_has_no_collective_that_nobody_asked_for(
    layout: tuple[int, int, int], options: dict[str, Any], expected: Counts
) -> None:
    """After the first steps, which compare more."""
    engine = contract.make("torch", layout, **options)
    part = contract.BATCH // layout[1]
    data = (tuple(t[:part] for t in batch) for batch in contract.data(6))
    for _ in range(4):
        engine.train_batch(data)
    with Collectives() as collectives:
        engine.train_batch(data)
    counts = collectives.counts()
    assert {n: count for n, count in counts.items() if n not in ("send", "recv_")} == expected
