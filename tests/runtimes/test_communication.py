"""What travels: collectives of a tensor-parallel layer, and messages between pipeline stages.

Both are counted where torch hands them to a process group, on real gloo processes. A layer's share
is the difference between a model with one layer more and one with one less.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import slapo
from examples.parallel_models import FAMILIES, schedule
from tests.communication import Collectives
from tests.runtimes import contract
from tests.runtimes.layouts import MICRO_BATCHES, SIZES, batches, build
from tests.runtimes.ranks import on_ranks

Counts = dict[str, int]


# --- tensor parallelism --------------------------------------------------------------------------
def collectives_of(name: str, layers: int, by_tokens: bool) -> list[Counter[str]]:
    """Forward and backward."""
    family = FAMILIES[name]
    inputs, targets = batches(family)[0]
    torch.manual_seed(0)
    model = family.build(replace(SIZES, layers=layers)).train()
    slapo.set_random_seed(1, tp_rank=torch.distributed.get_rank())  # which fork_rng() needs
    sch = slapo.create_schedule(model, group=torch.distributed.group.WORLD)
    schedule(sch, family, sequence_parallel=by_tokens)
    model, _ = slapo.build(sch, check=False)  # which would compare the first gradients
    with Collectives() as forward:
        loss = family.loss(model(**inputs), targets)
    with Collectives() as backward:
        loss.backward()
    return [forward.counts(), backward.counts()]


TWO, THREE = {"allreduce_": 2}, {"allreduce_": 3}
PAIRS = {"_allgather_base_": 2, "_reduce_scatter_base_": 2}
#: Family, layers, whether each rank sees some of the tokens; and, forward and backward, what a
#: layer more adds.
LAYERS: list[tuple[str, int, bool, Counts, Counts]] = [
    *((name, 2, False, TWO, TWO) for name in ("gpt2", "bert", "llama")),
    # Of 3 layers the third is a decoder's, which has three blocks; of 4 the fourth is an encoder's.
    ("t5", 2, False, THREE, THREE),
    ("t5", 3, False, TWO, TWO),
    # An all-gather before, and a reduce-scatter after, attention and MLP, and backward the reverse.
    # Parameters that see some of the tokens have partial gradients: weight and bias of two norms,
    # and the biases of two row layers; Llama has two norms without bias.
    *(
        (name, 2, True, PAIRS, {**PAIRS, "allreduce_": partial})
        for name, partial in {"gpt2": 6, "bert": 6, "llama": 2}.items()
    ),
]


@pytest.mark.slow
@on_ranks(2)
def test_a_tensor_parallel_layer_has_the_published_collectives() -> None:
    for name, layers, by_tokens, *expected in LAYERS:
        less, more = (collectives_of(name, count, by_tokens) for count in (layers, layers + 1))
        found = [dict(most - least) for least, most in zip(less, more, strict=True)]
        assert found == expected, (name, layers, by_tokens)
        if layers == 2 and not by_tokens:  # and nothing beside layers: embeddings, heads are whole
            # The gradient of the encoder's states, which all layers read, is summed once for all.
            whole = [5, 6] if name == "t5" else [4, 4]
            assert less == [{"allreduce_": count} for count in whole], name


# --- pipeline ------------------------------------------------------------------------------------
class Messages(TorchDispatchMode):
    """Notes what is handed to a process group for sending, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.sent.append(args[0][0].clone())
        return func(*args, **(kwargs or {}))


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
#: Schedule -> models, and for both ranks how many boundaries' tensors and gradients they send.
SENT: dict[str, tuple[list[str], list[tuple[int, int]]]] = {
    "1f1b": (list(BYTES), [(1, 0), (0, 1)]),
    # Of three boundaries all are between ranks, or all but the second.
    "interleaved_1f1b": (["llama"], [(2, 1), (1, 2)]),
    "zbv": (["llama"], [(1, 1), (1, 1)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("pipeline_schedule", SENT)
@on_ranks(2, timeout=280)
def test_each_boundary_sends_its_tensors_and_gradients_once(pipeline_schedule: str) -> None:
    """Several stages on a rank send to the other rank only."""
    rank, (names, counts) = torch.distributed.get_rank(), SENT[pipeline_schedule]
    for name in names:
        given = {"loss_fn": FAMILIES[name].loss, "pipeline_schedule": pipeline_schedule}
        engine = build(name, "torch", (2, 1, 1), **given)
        data = iter(batches(FAMILIES[name]))
        engine.train_batch(data)  # torch connects neighbors by messages of its own
        with Messages() as messages:
            engine.train_batch(data)
        forward, backward = counts[rank]
        wanted = forward * sum(BYTES[name]) + backward * HIDDEN_STATES
        assert sum(tensor.nbytes for tensor in messages.sent) == MICRO_BATCHES * wanted, name
        if (forward, backward) == (1, 0):  # what a micro-batch sends on is all different
            size = len(BYTES[name])
            for start in (0, size):
                part = messages.sent[start : start + size]
                assert len({(t.dtype, str(t.tolist())) for t in part}) == size, name


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
