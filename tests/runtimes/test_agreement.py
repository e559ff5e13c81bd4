"""Errors and checks that all ranks meet at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slapo.agreement import all_ranks_or_none, is_on_every_rank, same_on_all_ranks
from slapo.errors import SlapoError
from slapo.framework_dialect.batches import Batch, BatchCheck, batch_digest
from slapo.mesh import init_mesh
from tests.distributed import run_distributed


def outcome(fn: Any) -> tuple[str, str, bool]:
    try:
        return "result", str(fn()), False
    except Exception as error:
        return type(error).__name__, str(error), is_on_every_rank(error)


def check_on_ranks(rank: int, world_size: int, bad: list[int]) -> tuple[str, str, bool]:
    def check() -> int:
        if rank in bad:
            raise KeyError(f"lost on {rank}")
        return 10 * rank

    result = outcome(lambda: all_ranks_or_none("reading the file", check))
    dist.barrier()
    return result


@pytest.mark.distributed
def test_all_ranks_or_none() -> None:
    fine = run_distributed(check_on_ranks, 3, [])
    assert [r[1] for r in fine] == ["0", "10", "20"]
    failed = run_distributed(check_on_ranks, 3, [1])
    assert failed[1] == ("KeyError", "'lost on 1'", True)
    message = "reading the file failed on rank 1 with KeyError: 'lost on 1'"
    assert failed[0] == failed[2] == ("SlapoError", message, True)
    several = run_distributed(check_on_ranks, 3, [1, 2])
    assert several[0][1].startswith("reading the file failed on rank 1 (and on 1 more: [2]) with")
    assert several[2][0] == "KeyError"


def compare(rank: int, world_size: int, values: list[Any], dim: str) -> tuple[str, str, bool]:
    group = init_mesh(dp=2, tp=2).get_group(dim) if dim else None
    return outcome(lambda: same_on_all_ranks("micro_batches", values[rank], group))


@pytest.mark.distributed
def test_same_on_all_ranks() -> None:
    assert run_distributed(compare, 4, [(1, "a")] * 4, "")[3] == ("result", "None", False)
    differ = run_distributed(compare, 4, [1, 1, 3, 1], "")
    assert set(differ) == {differ[0]}
    assert differ[0][0] == "SlapoError"
    assert differ[0][1].startswith("micro_batches differs between ranks: 1 on rank 0, 3 on rank 2;")
    in_group = run_distributed(compare, 4, [1, 1, 3, 4], "tp")
    assert in_group[0][0] == in_group[1][0] == "result"
    assert "3 on rank 2, 4 on rank 3" in in_group[3][1]


def load_batches(rank: int, world_size: int, batches: list[Any]) -> tuple[str, str, bool]:
    mesh = init_mesh(pp=2, dp=2)
    check = BatchCheck(mesh)
    mine = batches[rank]
    failed = isinstance(mine, Exception)
    batch = None if failed else Batch((mine,), {}, ())
    return outcome(lambda: check.check("train_batch", batch, mine if failed else None))


@pytest.mark.distributed
def test_ranks_that_share_a_batch_have_the_same() -> None:
    nan = torch.tensor([1.0, float("nan")])
    other = torch.tensor([float("nan"), 1.0])
    # Ranks 0 and 2 share a data-parallel coordinate, and so do 1 and 3.
    fine = run_distributed(load_batches, 4, [nan, other, nan, other])
    assert {r[0] for r in fine} == {"result"}
    contents = run_distributed(load_batches, 4, [nan, other, nan, nan])
    assert [r[0] for r in contents] == ["result", "SlapoError"] * 2
    assert "the batch of data-parallel coordinate 1 differs between ranks" in contents[1][1]
    assert re.search(r"float32\(2,\) of checksum \w+' on rank 1, .* on rank 3", contents[1][1])
    shapes = run_distributed(load_batches, 4, [nan, nan, nan[:1], nan])
    assert [r[0] for r in shapes] == ["SlapoError", "result"] * 2
    assert re.search(r"float32\(2,\) .* on rank 0, .*float32\(1,\) .* on rank 2", shapes[2][1])
    empty = run_distributed(load_batches, 4, [nan, nan, nan, SlapoError("no further batch")])
    # The other replica does not know: this is no error of all ranks.
    assert empty[3] == ("SlapoError", "no further batch", False)
    assert empty[1][1] == "train_batch failed on rank 3 with SlapoError: no further batch"
    assert empty[0][0] == empty[2][0] == "result"


def test_alone_everything_passes() -> None:
    assert all_ranks_or_none("nothing", lambda: 5) == 5
    same_on_all_ranks("value", object())
    with pytest.raises(KeyError):
        all_ranks_or_none("nothing", lambda: {}["x"])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 4), ()])
def test_a_digest_knows_every_element(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    digests = {batch_digest(tensor)}
    for i in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[i] = 1
        digests.add(batch_digest([changed]))
    assert len(digests) == tensor.numel() + 1


def test_a_digest_knows_order_and_form() -> None:
    tensor = torch.randint(100, (8, 16))
    swapped = tensor[[1, 0, 2, 3, 4, 5, 6, 7]]
    assert batch_digest(tensor) == batch_digest(tensor.t().contiguous().t())
    assert batch_digest(tensor) != batch_digest(swapped)
    assert batch_digest(tensor) != batch_digest(tensor.t())
    assert batch_digest((tensor, swapped)) != batch_digest((swapped, tensor))
    assert batch_digest({"x": tensor, "mode": "a"}) != batch_digest({"x": tensor, "mode": "b"})
    assert batch_digest(torch.empty(0)) == batch_digest(torch.empty(0))
