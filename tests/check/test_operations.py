"""What operations of hand-written models make of slices and partial sums, right and wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.check import PlacementError, check
from tests.check.verdicts import fake_world

WIDTH, INNER = 24, 48
X = torch.randn(3, 7, WIDTH)


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    with fake_world(request.param, request.param - 1):
        yield request.param


class Base(nn.Module):
    """A layer, a pair that is split, and a function on the slices in between."""

    def __init__(self, inside: Callable[[Tensor], Tensor] = F.gelu, width: int = INNER) -> None:
        super().__init__()
        self.emb = nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, width), nn.Linear(INNER, WIDTH)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.inside(self.fc1(self.emb(x))))


def split(model: nn.Module, blocks: int = 1, reduces: bool = True) -> slapo.Schedule:
    sch = slapo.create_schedule(model)
    sch["fc1"].shard("weight", 0, blocks=blocks).shard("bias", 0, blocks=blocks)
    sch["fc1"].sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", 1)
    if reduces:
        sch["fc2"].sync("fwd_post", "all_reduce")
    return sch


def refused(sch: slapo.Schedule, inputs: Any = X) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        check(sch, inputs)
    return caught.value


# --- writes in place -----------------------------------------------------------------------------
class Shifted(Base):
    """Adds what a function makes of the input."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        return self.fc2(F.gelu(self.fc1(x))) + self.make(x)


def tokens_before(x: Tensor) -> Tensor:
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1]
    return shifted


def copied_into_a_view(x: Tensor) -> Tensor:
    blank = x.new_zeros(x.shape)
    blank[:, :, :].copy_(x)
    return blank


def parts_of_a_blank(x: Tensor) -> Tensor:
    blank = torch.empty_like(x)
    for token in range(x.shape[1]):
        blank[:, token] = x[:, token]
    return blank


@pytest.mark.parametrize("make", [tokens_before, copied_into_a_view, parts_of_a_blank])
def test_what_is_written_through_a_view_is_not_zero(ranks: int, make: Any) -> None:
    check(split(Shifted(make)), X)
    sch = split(Shifted(make), reduces=False)
    sch.sync("fwd_post", "all_reduce")
    assert "would count once per rank" in str(refused(sch))


def test_what_is_written_through_a_view_is_not_constant(ranks: int) -> None:
    def scaled(h: Tensor) -> Tensor:
        scale = torch.ones(h.shape[-1])
        scale[0:5] = torch.arange(5.0)
        return h * scale

    refused(split(Base(scaled)))


# --- convolutions --------------------------------------------------------------------------------
class ShortConvolution(Base):
    """A depthwise convolution over a packed projection."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__(width=2 * INNER)
        self.conv = nn.Conv1d(2 * INNER, 2 * INNER * outputs, 3, padding=1, groups=2 * INNER)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.fc1(self.emb(x)).transpose(1, 2)).transpose(1, 2)
        a, b = h.unflatten(-1, (-1, self.outputs)).sum(-1).chunk(2, -1)
        return self.fc2(a * torch.sigmoid(b))


@pytest.mark.parametrize("outputs", [1, 3])
def test_filters_are_cut_as_their_channels(ranks: int, outputs: int) -> None:
    for blocks in (2, 1):
        sch = split(ShortConvolution(outputs), blocks=2)
        sch["conv"].shard("weight", 0, blocks=blocks).shard("bias", 0, blocks=blocks)
        if blocks == 2:
            check(sch, X)
        else:
            assert refused(sch).path == "conv"


# --- sizes ---------------------------------------------------------------------------------------
class Grouped(Base):
    """Statistics over groups of channels, whose number is kept by the module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.groups, self.function = 4, function

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(self.emb(x))
        by_group = self.function(h.unflatten(-1, (self.groups, -1)))
        return self.fc2(by_group.flatten(-2))


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda h: F.normalize(h, dim=-1),
    "variance": lambda h: h * torch.rsqrt(h.var(-1, keepdim=True) + 1),
    "mean": lambda h: h - h.mean(-1, keepdim=True),
    "largest": lambda h: h / h.abs().amax(-1, keepdim=True),
    "sum": lambda h: h / h.abs().sum(-1, keepdim=True),
    "logsumexp": lambda h: h - h.logsumexp(-1, keepdim=True),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_groups_that_were_not_divided(ranks: int, name: str) -> None:
    sch = split(Grouped(STATISTICS[name]))
    assert "in one process" in str(refused(sch))
    sch.set("groups", whole=4)
    check(sch, X)


def test_group_norm_with_groups_that_were_not_divided(ranks: int) -> None:
    class Normed(Base):
        def __init__(self) -> None:
            super().__init__()
            self.groups = 4

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc1(self.emb(x)).transpose(1, 2)
            return self.fc2(F.group_norm(h, self.groups).transpose(1, 2))

    sch = split(Normed())
    refused(sch)
    sch.set("groups", whole=4)
    check(sch, X)
