"""Mistakes with the match of a subgraph, which every primitive that takes one refuses alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo import Schedule
from tests.fingerprint import refused
from tests.primitives.models import Attention, Block


def replace(sch: Schedule, match: Any) -> None:
    sch.replace(nn.Sequential(nn.Dropout(), nn.ReLU()), match)


def fuse(sch: Schedule, match: Any) -> None:
    sch.fuse(match, compiler=None)


def checkpoint(sch: Schedule, match: Any) -> None:
    sch.checkpoint(match)


ONE = pytest.mark.parametrize("act", [fuse, checkpoint])
ALL = pytest.mark.parametrize("act", [replace, fuse, checkpoint])


class Found(list[Any]):
    why = "the longest partial match is cos"


@ALL
@pytest.mark.parametrize(
    ("match", "error", "message"),
    [
        ([], ValueError, "is empty: the pattern matched nothing$"),
        (Found(), ValueError, "is empty: the pattern matched nothing; the longest partial match"),
        (3, TypeError, "must be a result of find"),
        ("fc1", TypeError, r"must be a result of find.* got str; pass sch.find\('fc1'\)"),
        ([3], TypeError, r"must be a \(parent_path, node\)"),
    ],
)
def test_what_is_no_match(act: Callable[..., None], match: Any, error: Any, message: str) -> None:
    sch = slapo.create_schedule(Block())
    sch.trace()
    with refused(sch, error, message):
        act(sch, match)


@ALL
def test_matches_of_other_graphs(act: Callable[..., None]) -> None:
    first, second, fresh = (slapo.create_schedule(Block()) for _ in range(3))
    foreign = first.find("fc1")
    second.trace()
    with refused(second, ValueError, "not in the graph"):
        act(second, foreign)
    with refused(fresh, ValueError, "not traced"):
        act(fresh, foreign)


@ONE
def test_several_subgraphs(act: Callable[..., None]) -> None:
    sch = slapo.create_schedule(Attention())
    match = sch.find("[qkv]$")
    with refused(sch, ValueError, "one subgraph can be .* at a time, got 3"):
        act(sch, match)


@ONE
def test_an_inner_value_that_is_used_outside(act: Callable[..., None]) -> None:
    sch = slapo.create_schedule(Leaky())
    match = sch.find(lambda x: torch.cos(torch.sin(x)))
    with refused(sch, ValueError, "'sin' .*used outside, by 'add'"):
        act(sch, match)


class Leaky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        return torch.cos(y) + y


class Dropouts(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(x)
        z = F.dropout(y)
        return h.relu() + z


@ALL
def test_what_may_not_move(act: Callable[..., None]) -> None:
    sch = slapo.create_schedule(Dropouts())
    match = sch.find(lambda x: F.dropout(x).relu())
    with refused(sch, ValueError, "'dropout' would move past 'dropout_1'"):
        act(sch, match)
