"""Parameters shared by several stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class StageTie:
    """One parameter that several stages hold.

    Parameters
    ----------
    members
        ``(stage index, parameter name there)``, by stage; the first is the owner. A stage that
        holds it under several names is listed once, with the first name.
    """

    members: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages that hold the parameter."""
        return tuple(index for index, _ in self.members)

    @property
    def owner(self) -> int:
        """First stage that holds it."""
        return self.members[0][0]


def ties_of_stages(stages: Sequence[nn.Module]) -> tuple[StageTie, ...]:
    """Parameters tied across stages, found by identity in one pass."""
    ties = []
    for places in _places(stages):
        first: dict[int, str] = {}
        for name, index in places:
            first.setdefault(index, name)
        if len(first) > 1:
            ties.append(StageTie(tuple(first.items())))
    return tuple(ties)


def analyze_tie_weights(
    top_mod: nn.Module, is_pipeline_partitioned: bool
) -> dict[int, set[tuple[str, int]]]:
    """Return the parameters that a model has under several names.

    Parameters
    ----------
    top_mod
        The model; or, if partitioned, the module whose children are its stages.
    is_pipeline_partitioned
        True if `top_mod` is partitioned.

    Returns
    -------
    dict
        Index of the parameter -> its ``(name, stage)`` pairs: names in the stage, or in the model
        with stage 0.
    """
    stages = list(top_mod.children()) if is_pipeline_partitioned else [top_mod]
    return dict(enumerate(set(places) for places in _places(stages) if len(places) > 1))


def _places(stages: Sequence[nn.Module]) -> Iterable[list[tuple[str, int]]]:
    """For each parameter, its ``(name, stage)`` pairs in order."""
    found: dict[int, list[tuple[str, int]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append((name, index))
    return found.values()
