"""Jobs of the tests of target "megatron": what one set of processes does."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.runtimes import layouts, megatron_cases, megatron_faults
from tests.runtimes.cuda_standin import cuda_on_cpu
from tests.runtimes.megatron_cases import CASES, Alone, Layout, drive, train_case

CHECKS: dict[str, Callable[..., Any]] = {
    "half": megatron_cases.half,
    "mixed": megatron_cases.mixed,
    "scaled": megatron_cases.scaled,
    "restarted": megatron_faults.restarted,
    "evaluate": megatron_cases.evaluate,
    "idle_stages": megatron_cases.idle_stages,
    "repeats": megatron_cases.repeats,
    "refusals": megatron_faults.refusals,
    "group_faults": megatron_faults.group_faults,
    "no_gradient": megatron_faults.no_gradient,
}


@dataclass(frozen=True)
class Job:
    """All that one set of processes does.

    Parameters
    ----------
    layout
        Sizes of the mesh.
    families
        Families to compare with their run in one process.
    cases
        Those of `CASES`, with theirs.
    by_hand
        What to compare steps by hand with; None: there are none.
    checks
        Names in `CHECKS`.
    before
        Whether to see first what happens without the stand-in.
    """

    layout: Layout
    families: dict[str, Any] = field(default_factory=dict)
    cases: dict[str, Alone] = field(default_factory=dict)
    by_hand: Alone | None = None
    checks: list[str] = field(default_factory=list)
    before: bool = False


def run(rank: int, world_size: int, pickled: bytes) -> dict[str, Any]:
    """Name -> what came out, for all of a pickled job.

    Pickled, since a process takes only so many tensors as arguments.
    """
    job: Job = pickle.loads(pickled)
    found: dict[str, Any] = {}
    if job.before:
        found["without_cuda"] = megatron_faults.without_cuda(job.layout)
    with cuda_on_cpu():
        families = list(job.families)
        found.update(
            layouts.compare(rank, world_size, families, "megatron", job.layout, job.families, {})
        )
        for name, alone in job.cases.items():
            found[name] = train_case(CASES[name], job.layout, alone)
        if job.by_hand is not None:
            found["by hand"] = [drive(job.layout, job.by_hand, way) for way in (False, True)]
        for name in job.checks:
            found[name] = CHECKS[name](job.layout)
    return found
