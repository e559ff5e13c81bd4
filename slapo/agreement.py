"""Errors and checks that all ranks of a group meet at once.

An error on one rank alone leaves the others waiting in their next collective. What may go wrong on
some ranks only is therefore run through :func:`all_ranks_or_none`, and what must be alike is
compared by :func:`same_on_all_ranks`: either every rank goes on, or every rank raises.

Both are collectives: every rank of the group has to call them. They do nothing in a world of one
and under torch's fake process group, whose other ranks do not exist.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import isqrt
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slapo.errors import SlapoError

T = TypeVar("T")

# What the weight of an element grows by from row to row, from column to column and in the rest of a
# checksum: odd and far apart, so that no two places weigh the same.
_STEPS = (2_654_435_761, 40_503_000_787, 805_459_861_301, 97_711_124_347)

# The lower half of a word, and what the weight of the upper one is larger by: even.
_LOW, _UPPER = 2**32 - 1, 918_273_645_546_372

_BROKEN = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|remote process",
    re.IGNORECASE,
)

# Seconds that other ranks have to notice a failure and to read what it was.
_PATIENCE = 3.0

# On an exception that every rank of the group raises: no rank is left waiting.
_ON_EVERY_RANK = "_slapo_on_every_rank"


def all_ranks_or_none(
    what: str, check: Callable[[], T], group: dist.ProcessGroup | None = None
) -> T:
    """Run ``check`` on each rank; if it raises on any of them, raise on all."""
    if not has_peers(group):
        return check()
    result, error = _attempt(check)
    failed = torch.tensor(int(error is not None), device=communication_device(group))
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if failed.item():
        _raise_everywhere(what, error, group)
    return result  # type: ignore[return-value]  # there was no error


def same_on_all_ranks(
    what: str,
    value: Any,
    group: dist.ProcessGroup | None = None,
    remedy: str = "pass the same on every rank",
) -> None:
    """Refuse, on every rank, values that differ between ranks."""
    if not has_peers(group):
        return
    values = gathered(value, group)
    other = next((i for i, v in enumerate(values) if v != values[0]), None)
    if other is None:
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    here, there = values[0], values[other]
    if isinstance(here, dict) and isinstance(there, dict):
        entry = next(e for e in {**here, **there} if e not in here or here[e] != there.get(e))
        what, here, there = f"{what}: {entry}", here.get(entry), there.get(entry)
    error = SlapoError(
        f"{what} differs between ranks: {here!r} on rank {ranks[0]}, {there!r} on rank "
        f"{ranks[other]}; {remedy}"
    )
    raise _raised_by(group, error)


def extremes(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of each value over the ranks, by one collective."""
    mirrored = -values if values.is_floating_point() else ~values  # -x has no place for the least
    both = torch.stack([values, mirrored]).to(communication_device(group))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0], -both[1] if values.is_floating_point() else ~both[1]


def checksum(tensor: Tensor) -> Tensor:
    """A 0-dim integer that changes with any element or swap of elements; NaN is as good as any.

    Sums over the rows and over the columns of the bytes laid out in a square of 64-bit numbers,
    each weighted by its place: two passes over the data and no copy of it.
    """
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = flat.numel() // 8 * 8
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat[:whole].view(torch.int64)
    width = max(1, isqrt(words.numel()))
    head = words.numel() // width * width
    square = words[:head].view(-1, width)
    parts = [square.sum(1), square.sum(0), words[head:], flat[whole:].to(torch.int64)]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for step, part in zip(_STEPS, parts, strict=True):
        places = torch.arange(part.numel(), device=flat.device)
        weights = 2 * places * step + 1
        # Overflow wraps, by which the upper bits of a word would lose most of their weight.
        for half, extra in ((part & _LOW, 0), (part >> 32 & _LOW, _UPPER)):
            total = total + (half * (weights + extra)).sum()
    return total


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where small tensors have to be for the collectives of ``group``."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None  # a backend without cpu was started on it
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def has_peers(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether the group, None for the world, has other processes that really exist."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake"


def is_broken_collective(error: BaseException) -> bool:
    """Return whether this is the error of a collective that lost another rank, or its timeout."""
    if isinstance(error, SlapoError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or bool(_BROKEN.search(str(error)))


def on_every_rank(error: T) -> T:
    """Mark an exception that all ranks raise together."""
    setattr(error, _ON_EVERY_RANK, True)
    return error


def is_on_every_rank(error: BaseException) -> bool:
    """Return whether all ranks raise this exception together, so that none waits for another."""
    return getattr(error, _ON_EVERY_RANK, False)


class FirstFailure:
    """The first failure on any rank, kept in a store for ranks that meet a broken collective.

    A store whose keeper is gone is met with silence here: who reads it knows that by its error.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def tell(self, text: str) -> None:
        """Leave `text`, unless something has failed before."""
        with suppress(RuntimeError):
            if not self._store.check(["failed"]):
                self._store.set("failed", text)

    def told(self) -> str:
        """The first failure, or an empty text; RuntimeError if the store is gone."""
        return self._store.get("failed").decode() if self._store.check(["failed"]) else ""

    def forget(self) -> None:
        """All ranks know of it, and go on."""
        with suppress(RuntimeError):
            self._store.delete_key("failed")

    def wait_for_readers(self, ranks: Callable[[], Iterable[int]]) -> None:
        """Stay for a moment until others have read it: the store may go with this process."""
        deadline = time.monotonic() + _PATIENCE
        with suppress(RuntimeError):
            self._store.set(f"read/{self._rank}", "")
            while time.monotonic() < deadline:
                if self._store.check([f"read/{rank}" for rank in ranks()]):
                    return
                time.sleep(0.05)


def _attempt(check: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return check(), None
    except Exception as error:
        return None, error


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks of the group, in their order; every rank calls it."""
    if not has_peers(group):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _raise_everywhere(what: str, error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise this rank's own error, or one that tells of the other ranks'."""
    texts = gathered(f"{type(error).__name__}: {error}" if error else None, group)
    if error is not None:
        raise _raised_by(group, error)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    failed = {rank: text for rank, text in zip(ranks, texts, strict=True) if text is not None}
    first = next(iter(failed))
    others = f" (and on {len(failed) - 1} more: {list(failed)[1:]})" if len(failed) > 1 else ""
    text = f"{what} failed on rank {first}{others} with {failed[first]}"
    raise _raised_by(group, SlapoError(text))


def _raised_by(group: dist.ProcessGroup | None, error: Exception) -> Exception:
    """Mark an error of all ranks of a group, unless there are others that do not know of it."""
    everybody = group is None or group.size() == dist.get_world_size()
    return on_every_rank(error) if everybody else error
