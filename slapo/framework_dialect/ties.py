"""Parameters that stages on several ranks share, with the ranks that hold each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.nn import Parameter

from slapo.framework_dialect.buckets import distinct
from slapo.framework_dialect.runtime import Lowering
from slapo.mesh import new_group
from slapo.pipeline import Stage


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that is one in the model and has copies in several stages.

    Parameters
    ----------
    places
        Stages of this rank that hold it, each with the parameter's name there.
    group
        The ranks that hold it, of one place within their stages; None if this rank holds all.
    is_counted
        Whether the first copy here is the one that counts in a norm.
    """

    places: tuple[tuple[Stage, str], ...]
    group: dist.ProcessGroup | None
    is_counted: bool

    @property
    def copies(self) -> list[Parameter]:
        """Those of this rank, as they are now: FSDP2 puts others in their place."""
        return distinct(stage.get_parameter(name) for stage, name in self.places)


def shared_parameters(
    lowering: Lowering,
    columns: Sequence[Sequence[int]],
    rank_of: Callable[[int], int] = lambda stage: stage,
) -> list[SharedParameter]:
    """This rank's parameters that several stages share. A collective of the world.

    Parameters
    ----------
    lowering
        With the ties and this rank's stages.
    columns
        For every place within a stage, the global ranks along the pipeline.
    rank_of
        Stage -> its place in a column.

    Returns
    -------
    list of SharedParameter
        In one order on all ranks.
    """
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    found = []
    here = dist.get_rank()
    for tie in lowering.ties:
        for column in columns:
            ranks = tuple(sorted({column[rank_of(stage)] for stage in tie.stages}))
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = new_group(ranks)  # all ranks of the job make all groups
            if here not in ranks:
                continue
            places = tuple(
                (lowering.stages[stage], name)
                for stage, name in tie.members
                if stage in lowering.stages
            )
            is_counted = here == column[rank_of(tie.owner)]
            found.append(SharedParameter(places, made.get(ranks), is_counted))
    return found
