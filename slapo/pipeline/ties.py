"""Parameters that several stages share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class StageTie:
    """One parameter that stands in several stages.

    Parameters
    ----------
    members
        ``(stage index, parameter name there)``, by stage; the first is its owner. A stage that
        holds it under several names is listed once, with the first of them.
    """

    members: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that hold it."""
        return tuple(index for index, _ in self.members)

    @property
    def owner(self) -> int:
        """The first of them."""
        return self.members[0][0]


def analyze_tie_weights(stages: Sequence[nn.Module]) -> tuple[StageTie, ...]:
    """Parameters tied across stages, found by identity in one pass.

    Parameters
    ----------
    stages
        Modules of all stages, in order, before any of them is copied or moved.

    Examples
    --------
    >>> first, last = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    >>> last.weight = first.weight
    >>> analyze_tie_weights([first, nn.ReLU(), last])
    (StageTie(members=((0, 'weight'), (2, 'weight'))),)
    """
    places: dict[int, dict[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), {}).setdefault(index, name)
    return tuple(StageTie(tuple(found.items())) for found in places.values() if len(found) > 1)
