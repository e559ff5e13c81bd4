"""What fails on one rank is an error on all, and names the module that was running."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from slapo.verify.numeric.rank_sync import RankSync
from tests.distributed import run_distributed
from tests.runtimes.jobs import WORLD, run_job
from tests.runtimes.ranks import on_ranks

X = torch.ones(2, 4)


class FailsOn(nn.Module):
    """Raises on one rank, for which the others wait where `awaited` is true."""

    def __init__(self, rank: int, awaited: bool = False) -> None:
        super().__init__()
        self.rank, self.awaited = rank, awaited

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == self.rank:
            raise IndexError("table of 3 rows")
        if self.awaited:
            dist.recv(x.detach().clone(), self.rank)
        return x


class FailsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            raise ArithmeticError("no such gradient")
        return grad


class Backwards(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return FailsBackwards.apply(x)


def one_rank_fails(rank: int, world: int, where: str) -> str:
    """The failing rank catches its error and lives on, as in a notebook."""
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Identity()))
    replacement = {
        "forward": FailsOn(1),
        "backward": Backwards(),
        "block": nn.Identity(),
    }
    try:
        with slapo.Verify(sch, X):
            if where == "block" and rank == 1:
                sch["2"].checkpoint()
            sch["1"].replace(replacement[where])
    except (slapo.SlapoError, KeyError) as error:
        time.sleep(1.0 if rank == 1 else 0.0)
        again = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)))
        with slapo.Verify(again, X):
            again["0"].checkpoint()  # the ranks are still in step
        return f"{type(error).__name__}: {error}"
    return "passed"


@pytest.mark.parametrize(
    ("where", "failing", "text"),
    [
        ("block", 1, "KeyError"),
        ("forward", 1, "fails with IndexError in '1' (FailsOn): table of 3 rows"),
        ("backward", 0, "the backward pass of the scheduled model fails with ArithmeticError"),
    ],
)
def test_a_failure_on_one_rank_is_one_on_all(where: str, failing: int, text: str) -> None:
    began = time.monotonic()
    told = run_distributed(one_rank_fails, 2, where)
    assert time.monotonic() - began < 30
    assert text in told[failing]
    assert told[1 - failing].startswith(f"VerificationError: Verify failed on rank {failing} with")
    assert text in told[1 - failing]


def sharded_pair(sch: slapo.Schedule) -> None:
    sch["0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", 1).sync("fwd_post", "all_reduce")


@pytest.mark.parametrize("module", [FailsOn, Backwards])
@on_ranks(2)
def test_a_failure_between_collectives_is_one_on_all(module: type[nn.Module]) -> None:
    """Others have begun the sum after it, of which the failing rank, which lives on, is missing."""
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)))
    x = X.clone().requires_grad_()
    with pytest.raises(slapo.VerificationError) as told, slapo.Verify(sch, x):
        sharded_pair(sch)
        sch["1"].replace(module(0) if module is FailsOn else module())
    store = dist.distributed_c10d._get_default_store()
    if sch.rank == 0:
        assert "scheduled model fails with" in str(told.value)
        store.wait(["heard"], timedelta(seconds=20))
    else:
        assert str(told.value).startswith("Verify failed on rank 0 with ")
        store.set("heard", "")


@on_ranks(2)
def test_collectives_that_do_not_meet_are_named() -> None:
    rank, ways = dist.get_rank(), ["all_reduce of (2, 4)", "all_gather of (2, 2)"]
    # Rank 1 comes first and looks for failures slowly: it finds rank 0's, which was told after both
    # had come.
    meet, told_by_another = RankSync.meet, RankSync._reported_by_another
    RankSync.meet = lambda self, step: (time.sleep(0.3 * (rank == 0)), meet(self, step))[1]
    RankSync._reported_by_another = lambda self: (time.sleep(0.1 * rank), told_by_another(self))[1]
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)))
    with pytest.raises(slapo.VerificationError) as told, slapo.Verify(sch, X):
        sharded_pair(sch)
        if rank == 1:
            sch["1"].sync("fwd_post", "all_gather", axis=1)
    said = f"rank {rank} is at {ways[rank]} while rank {1 - rank} is at {ways[1 - rank]}"
    assert said in str(told.value)
    assert f"in '{2 - rank}' (" in str(told.value)


def fails_while_others_wait(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Identity()))
    with slapo.Verify(sch, X):
        sch["1"].replace(FailsOn(1, awaited=True))


def test_those_that_wait_in_the_model_are_told_when_the_process_has_ended(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, fails_while_others_wait)
    own = "VerificationError: Verify: the scheduled model fails with IndexError in '1' (FailsOn)"
    assert own in outcome.texts[1]
    for rank in (0, 2):
        assert "VerificationError: Verify failed on rank 1 with" in outcome.texts[rank]
        assert outcome.seconds[rank] - outcome.seconds[1] < 15
