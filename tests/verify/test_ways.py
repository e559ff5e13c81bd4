"""The ways in which models are run: dtypes, modes, constant tensors, schedules in two blocks."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from tests.runtimes.ranks import on_ranks
from tests.sharding.families import FAMILIES, Steps
from tests.verify.models import build, inputs

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class OnlySingle(nn.Module):
    """Takes float32 and nothing else, as kernels do."""

    def __init__(self, slope: float = 0.0) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"expected dtype float32, got {x.dtype}")
        return F.leaky_relu(x, self.slope)


def test_what_refuses_float64_is_compared_in_its_own_dtype(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def model() -> slapo.Schedule:
        return slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), OnlySingle(), nn.Linear(4, 2)))

    sch = model()
    with caplog.at_level(logging.INFO), slapo.Verify(sch, X):
        sch["1"].replace(OnlySingle())
    sch = model()
    told = r"first at '1' \(OnlySingle\)"
    with pytest.raises(slapo.VerificationError, match=told), slapo.Verify(sch, X):
        sch["1"].replace(OnlySingle(0.1))
    assert "Verify does not compare in torch.float64" in caplog.text


def test_constants_are_perturbed_alike_where_they_are_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(model[0].bias)
    model[1].bias = model[0].bias
    sch = slapo.create_schedule(model)
    with slapo.Verify(sch, X):
        sch["0"].checkpoint()
    assert not sch.mod[0].bias.detach().any()


def test_masks_and_positions_keep_their_values() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4, 4))
            self.register_buffer("ids", torch.zeros(3, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            assert bool((self.mask == 1).all())
            assert not bool(self.ids.any())
            return x @ self.mask

    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), Masked()))
    with slapo.Verify(sch, X):
        sch["0"].checkpoint()


def test_a_model_that_cannot_train_is_compared_in_eval_mode() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with slapo.Verify(sch, X[:1]):  # a batch of one has no variance
        sch["0"].checkpoint()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bias = nn.Linear(4, 4, bias=False), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.fc(x) + self.bias, 0.1, self.training)


def test_dropouts_in_compiled_fusions_are_out_of_sight() -> None:
    def pattern(x: Tensor, bias: Tensor, training: bool) -> Tensor:
        return F.dropout(x + bias, 0.1, training)

    sch = slapo.create_schedule(nn.Sequential(Dropping(), nn.Dropout(0.2)))
    with slapo.Verify(sch, X):
        sch["0"].trace(flatten=True)
        found = sch["0"].find(pattern)
        assert len(found) == 1
        sch["0"].fuse(found, compiler="TorchScript")
    with pytest.raises(slapo.VerificationError, match="'1' drops with"), slapo.Verify(sch, X):
        sch["1"].mod.p = 0.3


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(2)
def test_a_sharded_model_is_an_original_too() -> None:
    sch = slapo.create_schedule(build("gpt2"))
    with slapo.Verify(sch, inputs("gpt2")):
        Steps(FAMILIES["gpt2"]).apply(sch)
    with slapo.Verify(sch, inputs("gpt2")):
        sch["transformer.h.0"].checkpoint()
    told = r"first at 'transformer.h.1.mlp.act' \(ReLU\)"
    with pytest.raises(slapo.VerificationError, match=told), slapo.Verify(sch, inputs("gpt2")):
        sch["transformer.h.1.mlp.act"].replace(nn.ReLU())


@on_ranks(2)
def test_ranks_fall_back_together() -> None:
    """Float64 is refused on one rank, while the other is in a sum."""
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    with slapo.Verify(sch, X):
        sch["0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
        sch["2"].shard("weight", 1).sync("fwd_post", "all_reduce")
        sch["1"].replace(OnlySingle() if sch.rank == 1 else nn.ReLU())
