"""Pipeline schedules of ``torch.distributed.pipelining``, and their placement of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slapo.errors import SlapoError
from slapo.framework_dialect.runtime import check_stage_count


def _looped(index: int, pp: int) -> int:
    """Place stages round-robin on the ranks."""
    return index % pp


def _v_shaped(index: int, pp: int) -> int:
    """Place stages forth and back: with two ranks 0, 1, 1, 0."""
    return min(index, 2 * pp - 1 - index)


@dataclass(frozen=True)
class PipelineSchedule:
    """One way to order the micro-batches of a pipeline.

    `cls` is a class of ``torch.distributed.pipelining``; `rank_of` maps ``(stage, ranks)`` to a
    rank. `stages_per_rank` is None for any number from 2. `splits_backward` is True if gradients of
    weights are computed separately from those of inputs (zero bubble).
    """

    cls: str
    rank_of: Callable[[int, int], int]
    stages_per_rank: int | None
    splits_backward: bool

    def stages_of(self, rank: int, n_stages: int, pp: int) -> tuple[int, ...]:
        """Return the stages that a rank runs, in order."""
        return tuple(i for i in range(n_stages) if self.rank_of(i, pp) == rank)

    def evaluates(self, micro_batches: int, pp: int) -> bool:
        """Return whether one run can evaluate so many micro-batches."""
        if self.stages_per_rank == 1:
            return True
        # torch runs looped schedules in rounds of equal size, and refuses other numbers.
        return micro_batches % max(1, micro_batches // pp) == 0

    def check(self, name: str, n_stages: int, pp: int, micro_batches: int) -> None:
        """Refuse stages or micro-batches that the schedule cannot run."""
        if self.stages_per_rank is not None:
            check_stage_count(n_stages, pp, self.stages_per_rank)
        elif n_stages % pp or n_stages < 2 * pp:
            raise SlapoError(
                f"pipeline_schedule={name!r} runs the same number of stages, at least two, on "
                f"each of pp={pp} ranks, but the schedule has {n_stages}; cut it in {2 * pp}, or "
                'use "1f1b"'
            )
        if self.cls != "ScheduleGPipe" and micro_batches < pp:
            raise SlapoError(
                f"pipeline_schedule={name!r} needs at least as many micro-batches as ranks, but "
                f"micro_batches={micro_batches} < pp={pp}; raise it, or use "
                'pipeline_schedule="gpipe"'
            )
        if self.stages_per_rank is None and micro_batches % pp:
            raise SlapoError(
                f"pipeline_schedule={name!r} sends micro-batches in rounds of pp={pp}, but "
                f"micro_batches={micro_batches} is not a multiple of it; change one of them"
            )


SCHEDULES = {
    # Narayanan et al. 2019
    "1f1b": PipelineSchedule("Schedule1F1B", _looped, 1, False),
    # Huang et al. 2019
    "gpipe": PipelineSchedule("ScheduleGPipe", _looped, 1, False),
    # Narayanan et al. 2021
    "interleaved_1f1b": PipelineSchedule("ScheduleInterleaved1F1B", _looped, None, False),
    # Qi et al. 2024: ZB-H1 and ZB-V
    "zero_bubble": PipelineSchedule("ScheduleInterleavedZeroBubble", _looped, None, True),
    "zbv": PipelineSchedule("ScheduleZBVZeroBubble", _v_shaped, 2, True),
}
