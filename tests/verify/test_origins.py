"""Values and gradients go between a schedule and its copy by where tensors come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.weights.provenance import Source
from tests.sharding.packed import MLP, Packed


class Turned(nn.Module):
    """A layer with its weight the other way round; the fault: and twice is once."""

    def __init__(self, is_turned: bool = True, sizes: tuple[int, int] = (16, 16)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*sizes))
        self.bias = nn.Parameter(torch.empty(sizes[1]))
        self.is_turned = is_turned

    def weight_sources(self) -> dict[str, Source]:
        return {"weight": Source(("0.weight",), transpose=True), "bias": Source(("0.bias",))}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t() if self.is_turned else self.weight, self.bias)


class Interleaved(nn.Module):
    """Gate and up in turns, scaled: code that is not followed."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.both, self.start = nn.Parameter(torch.empty(48, 16)), start

    def weights_from(self, originals: Any) -> dict[str, Tensor]:
        gate, up = (each["weight"] for each in originals)
        return {"both": 2 * torch.stack([gate, up], 1).reshape(48, 16)}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        both = F.linear(x, self.both / 2).unflatten(-1, (24, 2))
        return both[..., self.start], both[..., 1 - self.start]


def interleave(sch: slapo.Schedule, start: int = 0) -> None:
    sch.trace()
    sch.replace(Interleaved(start), sch.find(lambda x: slapo.call_module("gate|up", x)))


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_square_weight_that_is_turned_several_times(times: int) -> None:
    sch, x = slapo.create_schedule(nn.Sequential(nn.Linear(16, 16), MLP())), torch.randn(2, 16)
    with slapo.Verify(sch, x):
        for number in range(times):
            sch["0"].replace(Turned(is_turned=number % 2 == 0))
    with pytest.raises(slapo.VerificationError, match="differs"), slapo.Verify(sch, x):
        sch["0"].replace(Turned(is_turned=times % 2 == 1))


def test_a_turned_weight_that_is_not_square() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 6)))
    with slapo.Verify(sch, torch.randn(2, 4)):
        sch["0"].replace(Turned(sizes=(4, 6)))


def test_the_copy_may_be_of_a_packed_model() -> None:
    sch, x = slapo.create_schedule(MLP()), torch.randn(2, 16)
    sch.trace()
    sch.replace(Packed(), sch.find(lambda x: slapo.call_module("gate|up", x)))
    with slapo.Verify(sch, x):
        sch["Packed_0.both"].replace(Whole())
    with pytest.raises(slapo.VerificationError, match="differs"), slapo.Verify(sch, x):
        sch["Packed_0.both"].replace(Whole(2.0))


class Whole(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.kernel, self.scale = nn.Parameter(torch.empty(16, 48)), scale

    def weights_from(self, originals: Any) -> dict[str, Tensor]:
        (only,) = originals[0].values()
        return {"kernel": only.t() if only.shape[0] == 48 else only}

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel * self.scale


def test_weights_by_code_that_is_not_followed() -> None:
    sch, x = slapo.create_schedule(MLP()), torch.randn(2, 16)
    with slapo.Verify(sch, x):
        interleave(sch)
    wrong = slapo.create_schedule(MLP())
    with pytest.raises(slapo.VerificationError, match="differs"), slapo.Verify(wrong, x):
        interleave(wrong, start=1)
