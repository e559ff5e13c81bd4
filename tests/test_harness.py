"""The harness of the distributed tests: results, failures, and no job that hangs."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.distributed import Job, RankFailure, run_distributed

pytestmark = pytest.mark.distributed


def seeds(rank: int, world_size: int) -> tuple[float, int]:
    return torch.rand(()).item(), torch.get_num_threads()


def raise_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        raise KeyError(f"broken on {rank}")
    dist.barrier()


def hang_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        time.sleep(600)


def die_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        os._exit(3)
    dist.barrier()


def warn(rank: int, world_size: int) -> None:
    warnings.warn("old", FutureWarning, stacklevel=2)


def unpicklable(rank: int, world_size: int) -> object:
    return lambda: None


def test_ranks_start_alike() -> None:
    first, second = run_distributed(seeds, 2)
    assert first == second
    assert first[1] == 1


def test_the_rank_that_failed_first_is_named() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 failed:[\s\S]*KeyError: 'broken on 1'") as info:
        run_distributed(raise_on, 3, 1)
    assert (info.value.rank, info.value.error) == (1, "KeyError")


def test_a_hanging_rank_is_killed_and_its_stack_shown() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"ranks \[1\] did not finish[\s\S]*hang_on") as info:
        run_distributed(hang_on, 2, 1, timeout=4)
    assert info.value.error == "TimeoutError"
    assert time.monotonic() - start < 30


def test_a_dead_rank_does_not_hang_the_job() -> None:
    with pytest.raises(RankFailure) as info:
        run_distributed(die_on, 2, 1, timeout=60)
    assert info.value.error in {"ProcessDied", "RuntimeError", "DistBackendError"}


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankFailure, match="unpicklable"):
        run_distributed(unpicklable, 2)


def test_a_warning_is_an_error_on_a_rank_too() -> None:
    with pytest.raises(RankFailure, match="FutureWarning: old"):
        run_distributed(warn, 2)


@pytest.mark.filterwarnings("ignore:old:FutureWarning")
def test_a_rank_has_the_filters_of_the_test() -> None:
    run_distributed(warn, 2)


def test_every_wrong_case_of_a_job_is_named() -> None:
    job, wrong = Job(2), ["raise_on(0,)", "die_on(1,)"]
    job.each((0,), (5,))(raise_on)
    job.each((1,), (5,))(die_on)
    with pytest.raises(AssertionError) as info:
        job.run()
    assert [name for name in job.cases if f"{name}: rank" in str(info.value)] == wrong
    with pytest.raises(AssertionError):
        Job(2).run()
    for name in wrong:
        del job.cases[name]
    job.run()
