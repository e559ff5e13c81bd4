"""The first thing that is wrong, and the exception that ends the run there."""

from __future__ import annotations

from dataclasses import dataclass

from slapo.errors import SlapoError
from slapo.sharding.steps import Step
from slapo.verify.placement.place import Place

#: In what is wrong with a step over other ranks.
OURS = "the group of the schedule"


@dataclass(frozen=True)
class Finding:
    """The first thing that is wrong.

    Parameters
    ----------
    operation, path, in_backward
        Where.
    given
        ``(shape, place)`` of the tensors that it was given.
    why
        What is wrong with them.
    step
        The collective, where it is one.
    """

    operation: str
    path: str
    in_backward: bool
    given: tuple[tuple[tuple[int, ...], Place], ...]
    why: str
    step: Step | None = None
    is_certain: bool = True
    #: False for sizes that torch refuses
    fits: bool = True


class Stop(SlapoError):
    """Ends the run at the first finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.why)
        self.finding = finding
