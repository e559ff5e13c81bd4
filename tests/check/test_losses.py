"""Losses over a vocabulary that is sharded over ranks: right uses, and wrong ones."""

from collections.abc import Callable, Iterator
from functools import partial
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
from tests.runtimes.ranks import on_ranks

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


def scheduled(loss: Loss, vocab: int, *how: str) -> slapo.Schedule:
    """Rows of the head, unless `how` has "whole"; others are "bias", "not summed", "recomputed"."""
    model = Model(loss, vocab, "bias" in how)
    if loss is by_head:
        model.head = LossHead.like(model.head)
    sch = slapo.create_schedule(model)
    if "recomputed" in how:
        sch["body"].checkpoint()
    if "whole" in how:
        return sch
    sch["head"].shard("weight", 0, uneven=True)
    if "bias" in how:
        sch["head"].shard("bias", 0, uneven=True)
    if "not summed" not in how:
        sch["head"].sync("bwd_post", "all_reduce")
    return sch


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


def gathered(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = all_gather(model.head(x), world(), -1, False, model.vocab)
    return token_losses(logits, labels).sum()


def without_group(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return token_losses(model.head(x), labels.clamp(max=5)).sum()


def from_elsewhere(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return token_losses(model.head(x), labels, model.start + 1, world()).sum()


def of_other_dimensions(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x).transpose(1, 2)
    return token_losses(logits, labels[:, :1].expand(-1, logits.shape[1]), 0, world()).sum()


def whole(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return token_losses(model.head(x), labels, 0, world()).sum()


def summands(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    own = scatter(x, world(), -1)
    logits = F.linear(own, scatter(model.head.weight, world(), -1))
    return token_losses(logits, labels).sum()


def each_its_tokens(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    own = scatter(model.head(x), world(), 0, uneven=True)
    losses = token_losses(own, scatter(labels, world(), 0, uneven=True))
    return reduce_from_group(losses.sum(), world())


# --- a fused head, and the head as a layer -------------------------------------------------------
def fused(model: Model, x: Tensor, labels: Tensor, grouped: bool = False, off: int = 0) -> Tensor:
    head, group = model.head, world() if grouped else None
    return linear_cross_entropy(
        copy_to_group(x, group).flatten(0, 1),
        head.weight,
        labels.flatten(),
        head.bias,
        start=model.start + off if grouped else 0,
        group=group,
        chunk=8,
    )


def fused_without_group(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return fused(model, x, labels.clamp(max=5))


def fused_whole(model: Model, x: Tensor, labels: Tensor, grouped: bool = False) -> Tensor:
    weight, group = model.head.weight, world() if grouped else None
    return linear_cross_entropy(x.flatten(0, 1), weight, labels.flatten(), group=group)


def by_head(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    assert isinstance(model.head, LossHead)
    model.head.targets = Targets(labels)
    try:
        return model.head(x)
    finally:
        model.head.targets = None


#: A loss, and how its head is scheduled.
RIGHT: list[tuple[Loss, tuple[str, ...]]] = [
    *((loss, ()) for loss in (parallel, by_module, by_module_of_known_size, gathered, by_head)),
    *((loss, ("bias",)) for loss in (parallel, by_module, by_module_of_known_size, by_head)),
    (by_head, ("recomputed",)),
    (by_head, ("bias", "recomputed")),
    (partial(fused, grouped=True), ("not summed",)),
    (partial(fused, grouped=True), ("bias", "not summed")),
    (fused_whole, ("whole",)),
]
WRONG: list[tuple[Loss, tuple[str, ...], str]] = [
    (parallel, ("not summed",), "Partial\\(\\)"),
    (without_group, (), "no group is given for the rest"),
    (from_elsewhere, (), "begins at"),
    (of_other_dimensions, (), "must be sliced along dimension 2"),
    (whole, ("whole",), "whole on every rank"),
    (summands, ("whole",), "not linear"),
    (partial(fused, grouped=True, off=1), ("not summed",), "begins at"),
    (fused_without_group, (), "no group is given"),
    (fused, (), "and the group"),  # by a label of another rank's
    (partial(fused_whole, grouped=True), ("whole",), "whole on every rank"),
    (by_head, ("not summed",), "Partial\\(\\)"),
]


def named(value: Any) -> str | None:
    """Identifier of a parameter."""
    if isinstance(value, partial):
        return " ".join([value.func.__name__, *value.keywords])
    return " ".join(value) if isinstance(value, tuple) else getattr(value, "__name__", None)


@pytest.mark.parametrize(("loss", "how"), RIGHT, ids=named)
def test_right_losses_pass(vocab: int, loss: Loss, how: tuple[str, ...]) -> None:
    check(scheduled(loss, vocab, *how), inputs(vocab))


@pytest.mark.parametrize(("loss", "how", "said"), WRONG, ids=named)
def test_wrong_losses_do_not(vocab: int, loss: Loss, how: tuple[str, ...], said: str) -> None:
    with pytest.raises(slapo.SlapoError, match=said):
        check(scheduled(loss, vocab, *how), inputs(vocab))


def test_losses_of_the_tokens_that_a_rank_has() -> None:
    with fake_world(3, 2):
        check(scheduled(each_its_tokens, 96, "whole"), inputs(96))


def test_a_fused_head_of_sliced_states() -> None:
    def loss(model: Model, x: Tensor, labels: Tensor) -> Tensor:
        own, labels = scatter(x, world(), 0), scatter(labels, world(), 0)
        states, start = own.flatten(0, 1), model.start
        weight = model.head.weight
        return linear_cross_entropy(states, weight, labels.flatten(), start=start, group=world())

    with fake_world(2, 1):
        sch = scheduled(loss, 96, "not summed")
        with pytest.raises(PlacementError, match=r"the labels are Shard\(0\)"):
            check(sch, (X[:2], inputs(96)[1][:2]))


def test_without_memory() -> None:
    def make() -> Any:
        model = Model(by_head, 97)
        model.head = LossHead.like(model.head)

        def schedule(sch: slapo.Schedule) -> None:
            sch["head"].shard("weight", 0, uneven=True).sync("bwd_post", "all_reduce")

        return model, schedule, inputs(97)

    assert [checked.ranks for checked in check_at(make, 4)] == [4, 2]


@on_ranks(2)
def test_among_processes_nothing_is_communicated() -> None:
    for vocab in (96, 97):
        check(scheduled(by_head, vocab, "bias"), inputs(vocab))
        check(scheduled(parallel, vocab), inputs(vocab))
        sch = scheduled(from_elsewhere, vocab)
        with pytest.raises(PlacementError):
            check(sch, inputs(vocab))
