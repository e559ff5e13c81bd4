"""Errors and checks that all ranks meet at once."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slapo.agreement import all_ranks_or_none, checksum, is_on_every_rank, same_on_all_ranks
from slapo.errors import SlapoError
from slapo.framework_dialect.batches import Batch, BatchCheck, batch_digest
from slapo.mesh import init_mesh
from tests.runtimes.ranks import on_ranks


def outcome(fn: Any) -> tuple[str, bool]:
    """The result or the error of this rank, and whether all ranks have that."""
    try:
        return str(fn()), False
    except Exception as error:
        return f"{type(error).__name__}: {error}", is_on_every_rank(error)


@pytest.mark.parametrize("bad", [[], [1], [1, 2]], ids=str)
@on_ranks(3)
def test_all_ranks_or_none(bad: list[int]) -> None:
    rank = dist.get_rank()

    def check() -> int:
        if rank in bad:
            raise KeyError(f"lost on {rank}")
        return 10 * rank

    text, everywhere = outcome(lambda: all_ranks_or_none("reading the file", check))
    assert everywhere == bool(bad)
    if rank in bad:
        assert text == f"KeyError: 'lost on {rank}'"
    elif bad:
        more = " (and on 1 more: [2])" if bad == [1, 2] else ""
        message = f"reading the file failed on rank 1{more} with KeyError: 'lost on 1'"
        assert text == f"SlapoError: {message}"
    else:
        assert text == str(10 * rank)


@on_ranks(4)
def test_same_on_all_ranks() -> None:
    rank, mesh = dist.get_rank(), init_mesh(dp=2, tp=2)

    def compare(values: list[Any], group: Any = None) -> str:
        return outcome(lambda: same_on_all_ranks("micro_batches", values[rank], group))[0]

    assert compare([(1, "a")] * 4) == "None"
    text = "SlapoError: micro_batches differs between ranks: 1 on rank 0, 3 on rank 2;"
    assert compare([1, 1, 3, 1]).startswith(text)
    text = compare([1, 1, 3, 4], mesh.get_group("tp"))
    assert text == "None" if rank < 2 else "3 on rank 2, 4 on rank 3" in text


@on_ranks(4)
def test_ranks_that_share_a_batch_have_the_same() -> None:
    """Ranks 0 and 2 share a data-parallel coordinate, and so do 1 and 3."""
    rank, check = dist.get_rank(), BatchCheck(init_mesh(pp=2, dp=2))

    def load(*batches: Any) -> tuple[str, bool]:
        def read() -> Batch:
            if isinstance(batches[rank], Exception):
                raise batches[rank]
            return Batch((batches[rank],), {}, ())

        text, everywhere = outcome(lambda: check.load("train_batch", read))
        return ("None" if text.startswith("Batch(") else text), everywhere

    nan = torch.tensor([1.0, float("nan")])
    other = torch.tensor([float("nan"), 1.0])
    assert load(nan, other, nan, other)[0] == "None"
    text, _ = load(nan, other, nan, nan)
    differs = r"float32\(2,\) with checksum \w+' on rank 1, .* on rank 3"
    assert re.search(differs, text) if rank in (1, 3) else text == "None"
    assert rank not in (1, 3) or "the batch of data-parallel coordinate 1 differs" in text
    text, _ = load(nan, nan, nan[:1], nan)
    differs = r"float32\(2,\) .* on rank 0, .*float32\(1,\) .* on rank 2"
    assert re.search(differs, text) if rank in (0, 2) else text == "None"
    text, everywhere = load(nan, nan, nan, SlapoError("no more batches"))
    assert not everywhere  # the other replica does not know
    assert text == {
        1: "SlapoError: train_batch failed on rank 3 with SlapoError: no more batches",
        3: "SlapoError: no more batches",
    }.get(rank, "None")


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


def test_sparse_buffers_have_a_checksum() -> None:
    """Whisper keeps the mask of its alignment heads in one."""
    mask = torch.eye(3).bool()
    assert checksum(mask.to_sparse()) == checksum(mask) != checksum(~mask)
