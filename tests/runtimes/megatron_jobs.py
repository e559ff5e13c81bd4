"""Jobs of the tests of target "megatron": what one set of processes does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.runtimes import layouts, megatron_cases, megatron_faults
from tests.runtimes.cuda_standin import cuda_on_cpu
from tests.runtimes.megatron_cases import CASES, Layout, drive, train_case

CHECKS: dict[str, Callable[..., Any]] = {
    "by hand": lambda layout: [drive(layout, way) for way in (False, True)],
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
        Those of `CASES` to compare with theirs.
    checks
        Names in `CHECKS`.
    before
        Whether to see first what happens without the stand-in.
    """

    layout: Layout
    families: list[str] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    before: bool = False


def run(rank: int, world_size: int, job: Job) -> dict[str, Any]:
    """Name -> what came out, for all of a job."""
    found: dict[str, Any] = {}
    if job.before:
        found["without_cuda"] = megatron_faults.without_cuda(job.layout)
    with cuda_on_cpu():
        found.update(
            layouts.compare_families(rank, world_size, job.families, "megatron", job.layout, {})
        )
        for name in job.cases:
            found[name] = train_case(CASES[name], job.layout)
        for name in job.checks:
            found[name] = CHECKS[name](job.layout)
    return found
