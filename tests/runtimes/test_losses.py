"""Losses of a step: means, sums with counts, and what is neither."""

from typing import Any

import pytest
import torch

from slapo.errors import SlapoError
from slapo.framework_dialect.losses import LossAccumulator, LossReducer
from slapo.mesh import init_mesh
from tests.runtimes.ranks import on_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor([3.0])])
def test_sums_bring_their_counts(count: Any) -> None:
    tally = LossAccumulator(2)
    assert float(tally.add((torch.tensor(6.0), count))) == 6.0
    tally.add((torch.tensor(0.0), 0))
    assert (float(tally.total), float(tally.count), tally.returns_counts) == (6.0, 3.0, True)
    mean = LossReducer(init_mesh(device="cpu"), CPU).begin(tally, check=True)
    loss, scale = mean.loss(), mean.scale()
    assert float(loss) == 2.0
    assert scale is not None
    assert float(scale) == pytest.approx(1 / 3)


def test_nothing_that_counts_is_a_loss_of_zero() -> None:
    tally = LossAccumulator()
    tally.add((torch.tensor(0.0), 0))
    mean = LossReducer(init_mesh(device="cpu"), CPU).begin(tally, check=True)
    loss, scale = mean.loss(), mean.scale()
    assert float(loss) == 0
    assert scale is not None
    assert scale.isfinite()


def test_a_loss_function_does_not_change_its_kind() -> None:
    tally = LossAccumulator(2)
    tally.add(torch.tensor(1.0))
    with pytest.raises(ValueError, match="for another in the batch"):
        tally.add((torch.tensor(1.0), 1))
    mean = LossReducer(init_mesh(device="cpu"), CPU)
    mean.begin(tally, check=False).loss()
    counted = LossAccumulator()
    counted.add((torch.tensor(1.0), 1))
    with pytest.raises(ValueError, match="a number for one batch and"):
        mean.begin(counted, check=False)


def test_the_last_stage_has_a_loss() -> None:
    with pytest.raises(SlapoError, match="no loss"):
        LossReducer(init_mesh(device="cpu"), CPU).begin(LossAccumulator(), check=False)


@pytest.mark.parametrize("apart", [0.0, 1e-5, 0.1, float("nan"), float("inf")])
@on_ranks(4)
def test_every_rank_gets_the_mean_or_the_error(apart: float) -> None:
    """Of three steps, of which the first and the last are checked, and of an evaluation."""
    mesh = init_mesh(pp=2, tp=2)
    mean = LossReducer(mesh, CPU)
    for check, weight in ((True, None), (False, None), (True, None), (True, 3)):
        tally = LossAccumulator()
        if mesh.get_local_rank("pp"):
            tally.add(torch.tensor(1.0 + (apart if mesh.get_local_rank("tp") else 0)), weight)
        pending = mean.begin(tally, check)
        if apart not in (0.0, 1e-5) and check:
            text = f"different losses for the same batch: 1, {1 + apart:.6g}; the schedule lacks"
            with pytest.raises(SlapoError, match=text):
                pending.scale()
        else:
            assert pending.scale() is None
            assert float(pending.loss()) == 1.0
