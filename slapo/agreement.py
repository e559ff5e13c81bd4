"""Errors and checks that all ranks of a group reach together.

An error on one rank alone leaves the others waiting in their next collective. Code that may fail
on some ranks only therefore runs through :func:`all_ranks_or_none`, and values that must be equal
are compared by :func:`same_on_all_ranks`: either every rank continues, or every rank raises.

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

# Increments of an element's weight per row, per column and in the two remainders of a checksum.
# They are odd and far apart, so that no two positions have the same weight.
_STEPS = (2_654_435_761, 40_503_000_787, 805_459_861_301, 97_711_124_347)

# The lower half of a word, and the extra weight of the upper half: even, so that weights stay odd.
_LOW, _UPPER = 2**32 - 1, 918_273_645_546_372

_BROKEN = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|remote process",
    re.IGNORECASE,
)

# Seconds that other ranks have to notice a failure and to read its cause.
REPORT_SECONDS = 3.0

# Attribute of an exception that every rank of the group raises: no rank is left waiting.
_ON_EVERY_RANK = "_slapo_on_every_rank"


def all_ranks_or_none(
    what: str, check: Callable[[], T], group: dist.ProcessGroup | None = None
) -> T:
    """Run ``check`` on each rank; if it raises on any rank, raise on all."""
    if not has_peers(group):
        return check()
    result, error = None, None
    try:
        result = check()
    except Exception as raised:
        error = raised
    # One integer in the usual case; texts are gathered only after a failure.
    failed = torch.tensor(int(error is not None), device=communication_device(group))
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not failed.item():
        return result  # type: ignore[return-value]  # there was no error
    texts = gathered(f"{type(error).__name__}: {error}" if error else None, group)
    # A rank's own error keeps its type and traceback.
    if error is not None:
        raise _raised_by(group, error)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    found = {rank: text for rank, text in zip(ranks, texts, strict=True) if text is not None}
    first = next(iter(found))
    others = f" (and on {len(found) - 1} more: {list(found)[1:]})" if len(found) > 1 else ""
    text = f"{what} failed on rank {first}{others} with {found[first]}"
    raise _raised_by(group, SlapoError(text))


def same_on_all_ranks(
    what: str,
    value: Any,
    group: dist.ProcessGroup | None = None,
    remedy: str = "pass the same on every rank",
) -> None:
    """Raise on every rank if a value differs between ranks."""
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
    """Return the elementwise maximum and minimum over the ranks, in one collective."""
    # The maximum of the mirrored values is the minimum, which saves a second collective.
    mirrored = -values if values.is_floating_point() else ~values  # -x overflows for the least
    both = torch.stack([values, mirrored]).to(communication_device(group))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0], -both[1] if values.is_floating_point() else ~both[1]


def checksum(tensor: Tensor) -> Tensor:
    """Return a 0-dim integer that changes with any element or swap of elements.

    Views the bytes as a square of 64-bit integers and sums its rows and columns, weighted by
    position: two passes over the data, no copy. NaN is compared like any other value.
    """
    dense = tensor.to_dense() if tensor.is_sparse else tensor  # Whisper keeps a mask so
    flat = dense.detach().contiguous().flatten().view(torch.uint8)
    whole = flat.numel() // 8 * 8
    # A view as int64 needs an aligned start.
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
        # Overflow wraps, so the upper bits of a word would lose most of their weight: weigh halves
        # apart.
        for half, extra in ((part & _LOW, 0), (part >> 32 & _LOW, _UPPER)):
            total = total + (half * (weights + extra)).sum()
    return total


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Device on which small tensors must be for the collectives of ``group``."""
    # A group may have a backend for each device; objects and small tensors then go by the CPU.
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None  # without a CPU backend, the group is on an accelerator
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def has_peers(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether the group, None for the world, has other processes that really exist."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake"


def is_broken_collective(error: BaseException) -> bool:
    """Return whether an error is that of a collective that lost another rank or timed out."""
    if isinstance(error, SlapoError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or bool(_BROKEN.search(str(error)))


def on_every_rank(error: T) -> T:
    """Mark an exception that all ranks raise together."""
    setattr(error, _ON_EVERY_RANK, True)
    return error


def is_on_every_rank(error: BaseException) -> bool:
    """Return whether all ranks raise this exception, so that no rank waits for another."""
    return getattr(error, _ON_EVERY_RANK, False)


class FirstFailure:
    """First failure on any rank, kept in a store for ranks whose collective breaks.

    Errors of a store that is gone are ignored, except in `reported`: a reader needs that error.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def report(self, text: str) -> None:
        """Record `text`, unless a failure is recorded already."""
        with suppress(RuntimeError):
            if not self._store.check(["failed"]):
                self._store.set("failed", text)

    def reported(self) -> str:
        """Return the first failure, or an empty string; RuntimeError if the store is gone."""
        return self._store.get("failed").decode() if self._store.check(["failed"]) else ""

    def forget(self) -> None:
        """Delete the record, once all ranks have handled the failure and continue."""
        with suppress(RuntimeError):
            self._store.delete_key("failed")

    def wait_for_readers(self, ranks: Iterable[int]) -> None:
        """Wait briefly until `ranks` have read the failure: the store may end with this process."""
        deadline = time.monotonic() + REPORT_SECONDS
        with suppress(RuntimeError):
            self._store.set(f"read/{self._rank}", "")
            while time.monotonic() < deadline:
                if self._store.check([f"read/{rank}" for rank in ranks]):
                    return
                time.sleep(0.05)


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks of the group in rank order. A collective."""
    if not has_peers(group):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _raised_by(group: dist.ProcessGroup | None, error: Exception) -> Exception:
    """Mark an error that all ranks raise, if the group covers the world."""
    everybody = group is None or group.size() == dist.get_world_size()
    return on_every_rank(error) if everybody else error
