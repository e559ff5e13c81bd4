"""Losses over a vocabulary that is sharded over ranks: right uses, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.op.cross_entropy import ParallelCrossEntropy, token_losses
from slapo.op.linear_loss import LossHead, Targets, linear_cross_entropy
from slapo.sharding import reduce_from_group, scatter
from slapo.sharding.collectives import all_gather, copy_to_group
from slapo.sharding.state import shards_of
from slapo.verify.placement import PlacementError, check
from slapo.verify.placement.offline import check_at
from tests.check.verdicts import fake_world
from tests.distributed import run_distributed

WIDTH, SEQ, BATCH = 24, 7, 3
X = torch.randn(BATCH, SEQ, WIDTH)

Loss = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A body, a head, and a function of both that makes the loss."""

    def __init__(self, loss: Loss, vocab: int, bias: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=bias)
        self.loss, self.vocab = loss, vocab

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, self.body(x), labels)

    @property
    def start(self) -> int:
        return shards_of(self.head)["weight"].start


@pytest.fixture(params=[(2, 96), (2, 97), (4, 97)])
def vocab(request: pytest.FixtureRequest) -> Iterator[int]:
    ranks, vocab = request.param
    with fake_world(ranks, ranks - 1):
        yield vocab


def inputs(vocab: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(vocab, (BATCH, SEQ))
    labels[:, ::3] = -100
    return X, labels


def split(loss: Loss, vocab: int, bias: bool = False, sums: bool = True) -> slapo.Schedule:
    sch = slapo.create_schedule(Model(loss, vocab, bias))
    sch["head"].shard("weight", 0, uneven=True)
    if bias:
        sch["head"].shard("bias", 0, uneven=True)
    if sums:
        sch["head"].sync("bwd_post", "all_reduce")
    return sch


def refused(sch: slapo.Schedule, vocab: int) -> str:
    with pytest.raises(PlacementError) as caught:
        check(sch, inputs(vocab))
    return str(caught.value)


def world() -> Any:
    return dist.group.WORLD


# --- losses of logits ----------------------------------------------------------------------------
def parallel(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return token_losses(model.head(x), labels, model.start, world()).sum()


def by_module(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return ParallelCrossEntropy()(model.head(x), labels).mean()


def by_module_of_known_size(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    kept = (labels != -100).sum()
    return ParallelCrossEntropy(world())(model.head(x), labels, model.vocab).sum() / kept


@pytest.mark.parametrize("loss", [parallel, by_module, by_module_of_known_size])
@pytest.mark.parametrize("bias", [False, True])
def test_slices_of_logits_with_their_group(vocab: int, loss: Loss, bias: bool) -> None:
    check(split(loss, vocab, bias), inputs(vocab))


def test_without_the_sum_of_the_input_s_gradient(vocab: int) -> None:
    assert "Partial()" in refused(split(parallel, vocab, sums=False), vocab)


def without_group(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return token_losses(model.head(x), labels.clamp(max=5)).sum()


def from_elsewhere(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return token_losses(model.head(x), labels, model.start + 1, world()).sum()


def of_other_dimensions(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x).transpose(1, 2)
    return token_losses(logits, labels[:, :1].expand(-1, logits.shape[1]), 0, world()).sum()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (without_group, "no group is given for the rest"),
        (from_elsewhere, "begins at"),
        (of_other_dimensions, "must be sliced along dimension 2"),
    ],
)
def test_slices_of_logits_that_are_taken_for_others(vocab: int, loss: Loss, said: str) -> None:
    assert said in refused(split(loss, vocab), vocab)


def whole(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return token_losses(model.head(x), labels, 0, world()).sum()


def summands(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    own = scatter(x, world(), -1)
    logits = F.linear(own, scatter(model.head.weight, world(), -1))
    return token_losses(logits, labels).sum()


@pytest.mark.parametrize(
    ("loss", "said"), [(whole, "whole on every rank"), (summands, "not linear")]
)
def test_logits_that_are_no_slices(vocab: int, loss: Loss, said: str) -> None:
    assert said in refused(slapo.create_schedule(Model(loss, vocab)), vocab)


def gathered(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = all_gather(model.head(x), world(), -1, False, model.vocab)
    return token_losses(logits, labels).sum()


def test_gathered_logits_need_no_group(vocab: int) -> None:
    check(split(gathered, vocab), inputs(vocab))


def each_its_tokens(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    own = scatter(model.head(x), world(), 0, uneven=True)
    losses = token_losses(own, scatter(labels, world(), 0, uneven=True))
    return reduce_from_group(losses.sum(), world())


def test_losses_of_the_tokens_that_a_rank_has() -> None:
    with fake_world(3, 2):
        check(slapo.create_schedule(Model(each_its_tokens, 96)), inputs(96))


# --- a fused head --------------------------------------------------------------------------------
def fused(model: Model, x: Tensor, labels: Tensor, group: Any = None, off: int = 0) -> Tensor:
    head = model.head
    return linear_cross_entropy(
        copy_to_group(x, group).flatten(0, 1),
        head.weight,
        labels.flatten(),
        head.bias,
        start=model.start + off if group is not None else 0,
        group=group,
        chunk=8,
    )


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_head_of_rows(vocab: int, bias: bool) -> None:
    def loss(model: Model, x: Tensor, labels: Tensor) -> Tensor:
        return fused(model, x, labels, world())

    check(split(loss, vocab, bias, sums=False), inputs(vocab))


def test_a_fused_head_that_begins_elsewhere(vocab: int) -> None:
    def loss(model: Model, x: Tensor, labels: Tensor) -> Tensor:
        return fused(model, x, labels, world(), off=1)

    assert "begins at" in refused(split(loss, vocab, sums=False), vocab)


def test_a_fused_head_without_its_group(vocab: int) -> None:
    def loss(model: Model, x: Tensor, labels: Tensor) -> Tensor:
        return fused(model, x, labels.clamp(max=5))

    assert "no group is given" in refused(split(loss, vocab), vocab)
    with pytest.raises(slapo.SlapoError, match="and the group"):  # by a label of another rank's
        check(split(fused, vocab), inputs(vocab))


def test_a_whole_fused_head(vocab: int) -> None:
    def loss(model: Model, x: Tensor, labels: Tensor, group: Any = None) -> Tensor:
        head = model.head
        return linear_cross_entropy(x.flatten(0, 1), head.weight, labels.flatten(), group=group)

    check(slapo.create_schedule(Model(loss, vocab)), inputs(vocab))
    sch = slapo.create_schedule(Model(lambda *args: loss(*args, world()), vocab))
    assert "whole on every rank" in refused(sch, vocab)


def test_a_fused_head_of_sliced_states() -> None:
    def loss(model: Model, x: Tensor, labels: Tensor) -> Tensor:
        own, labels = scatter(x, world(), 0), scatter(labels, world(), 0)
        states, start = own.flatten(0, 1), model.start
        weight = model.head.weight
        return linear_cross_entropy(states, weight, labels.flatten(), start=start, group=world())

    with fake_world(2, 1):
        sch = split(loss, 96, sums=False)
        with pytest.raises(PlacementError, match=r"the labels are Shard\(0\)"):
            check(sch, (X[:2], inputs(96)[1][:2]))


# --- the head as a layer -------------------------------------------------------------------------
def by_head(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    assert isinstance(model.head, LossHead)
    model.head.targets = Targets(labels)
    try:
        return model.head(x)
    finally:
        model.head.targets = None


def head_schedule(vocab: int, bias: bool, sums: bool = True) -> slapo.Schedule:
    model = Model(by_head, vocab, bias)
    model.head = LossHead.like(model.head)
    sch = slapo.create_schedule(model)
    sch["head"].shard("weight", 0, uneven=True)
    if bias:
        sch["head"].shard("bias", 0, uneven=True)
    if sums:
        sch["head"].sync("bwd_post", "all_reduce")
    return sch


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_head_that_gives_the_loss(vocab: int, bias: bool, is_checkpointed: bool) -> None:
    sch = head_schedule(vocab, bias)
    if is_checkpointed:
        sch["body"].checkpoint()
    check(sch, inputs(vocab))


def test_a_head_without_the_sum_of_its_input_s_gradient(vocab: int) -> None:
    assert "Partial()" in refused(head_schedule(vocab, False, sums=False), vocab)


def test_a_head_with_a_whole_bias(vocab: int) -> None:
    sch = slapo.create_schedule(Model(by_head, vocab, bias=True))
    sch.mod.head = LossHead.like(sch.mod.head)
    sch["head"].shard("weight", 0, uneven=True).sync("bwd_post", "all_reduce")
    with pytest.raises(slapo.SlapoError, match="its bias is whole"):
        check(sch, inputs(vocab))


def test_without_memory() -> None:
    def make() -> Any:
        model = Model(by_head, 97)
        model.head = LossHead.like(model.head)

        def schedule(sch: slapo.Schedule) -> None:
            sch["head"].shard("weight", 0, uneven=True).sync("bwd_post", "all_reduce")

        return model, schedule, inputs(97)

    assert [checked.ranks for checked in check_at(make, 4)] == [4, 2]


def check_among_processes(rank: int, world_size: int) -> None:
    for vocab in (96, 97):
        check(head_schedule(vocab, True), inputs(vocab))
        check(split(parallel, vocab), inputs(vocab))
        sch = split(from_elsewhere, vocab)
        with pytest.raises(PlacementError):
            check(sch, inputs(vocab))


@pytest.mark.distributed
def test_among_processes_nothing_is_communicated() -> None:
    run_distributed(check_among_processes, 2)
