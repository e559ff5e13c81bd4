"""Placement check of a schedule for many ranks in one process, on a fake group."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from slapo.errors import SlapoError, TraceError
from slapo.example_inputs import example_inputs
from slapo.history import describe
from slapo.schedule import Schedule, create_schedule
from slapo.verify.placement.run import check
from slapo.weights.meta import init_empty_weights
from slapo.weights.slots import slots


@dataclass(frozen=True)
class CheckResult:
    """Statistics of a schedule that passed the check."""

    #: class name of the model
    model: str
    #: number of ranks
    ranks: int
    #: number of primitives applied
    primitives: int
    #: duration of the check
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.model} on {self.ranks} ranks: {self.primitives} primitives, every tensor where "
            f"it belongs ({self.seconds:.1f} s)"
        )


def check_at(
    make: Callable[[], Any],
    ranks: int,
    sequence_parallel: bool = False,
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> Iterator[CheckResult]:
    """Check a schedule for a number of ranks, and for two, where no slice has size 1.

    Parameters
    ----------
    make
        Function that returns the model, a function that schedules it, and example inputs unless it
        is a Transformers model. Parameters are created without memory.
    ranks
        Size of the tensor-parallel group; 2 or more.
    sequence_parallel
        Call the function with ``sequence_parallel=True``.
    loss_fn
        As for :func:`slapo.check`.

    Yields
    ------
    CheckResult
        One result for each of the two sizes.

    Raises
    ------
    PlacementError
        As for :func:`slapo.check`.
    SlapoError
        If this process has a process group already.

    Examples
    --------
    >>> def make():
    ...     model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    ...     def schedule(sch):
    ...         sch["0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    ...         sch["1"].shard("weight", 1).sync("fwd_post", "all_reduce")
    ...     return model, schedule, torch.ones(3, 8)
    >>> for checked in check_at(make, 4):  # doctest: +SKIP
    ...     print(checked.model, checked.ranks, checked.primitives)
    Sequential 4 5
    Sequential 2 5
    """
    if ranks < 2:
        raise ValueError(f"nothing is sharded over {ranks} ranks; check for 2 or more")
    for count in dict.fromkeys((ranks, 2)):
        with fake_world(count):
            checked, is_uneven = _check_once(make, count, sequence_parallel, loss_fn)
        if is_uneven:  # the last rank has the smallest slice, so check another one too
            with fake_world(count, count - 2):
                _check_once(make, count, sequence_parallel, loss_fn)
        yield checked


def _check_once(
    make: Callable[[], Any], ranks: int, sequence_parallel: bool, loss_fn: Any
) -> tuple[CheckResult, bool]:
    """Result of one check, and True if slices differ in size between ranks."""
    options = {"sequence_parallel": True} if sequence_parallel else {}
    model, sch, inputs = _scheduled(make, **options)
    if inputs is None:
        inputs = _example_inputs(model, ranks)
    begun = time.monotonic()
    check(sch, inputs, loss_fn)
    name = type(model).__name__
    checked = CheckResult(name, ranks, len(sch.history), time.monotonic() - begun)
    return checked, any(slot.spec is not None and slot.spec.is_uneven for slot in slots(sch.mod))


def schedule_offline(make: Callable[[], Any], ranks: int) -> Schedule:
    """Return the schedule of the last of `ranks` ranks, with parameters on meta."""
    with fake_world(ranks):
        return _scheduled(make)[1]


def _scheduled(make: Callable[[], Any], **options: Any) -> tuple[nn.Module, Schedule, Any]:
    """The model of a user's function, its schedule, and the example inputs if it returned some."""
    with init_empty_weights():
        made = make()
    has_parts = isinstance(made, tuple) and len(made) > 1
    model, schedule, *inputs = made if has_parts else (made, None)
    if not (isinstance(model, nn.Module) and callable(schedule)) or len(inputs) > 1:
        raise TypeError(
            f"make() returned {describe(made)}; return (model, schedule) or (model, schedule, "
            "example_inputs), where schedule(sch) applies the primitives"
        )
    sch = create_schedule(model)
    schedule(sch, **options)
    return model, sch, inputs[0] if inputs else None


def _example_inputs(model: nn.Module, ranks: int) -> Mapping[str, Tensor]:
    """Three samples, with an odd number of tokens for each rank."""
    labels = "labels" in inspect.signature(model.forward).parameters
    # Sequence parallelism shards tokens evenly.
    length = 5 * ranks
    try:
        return example_inputs(
            model, length=length, decoder_length=length, labels=labels, device="cpu"
        )
    except TraceError:
        raise SlapoError(
            f"no example inputs are known for {type(model).__name__}; return example inputs too: "
            "(model, schedule, example_inputs)"
        ) from None


@contextmanager
def fake_world(ranks: int = 2, rank: int | None = None) -> Iterator[None]:
    """A fake default group; this process is its last rank unless `rank` is given.

    Rank 0 would miss faults: a wrong offset is often right there.
    """
    # The import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise SlapoError(
            "this process has a process group already; call slapo.check(sch, example_inputs), "
            "which works with any group, or call this in a separate process"
        )
    rank = ranks - 1 if rank is None else rank
    printed = sys.excepthook  # torch adds a prefix for the rank, and leaves it there
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = printed
