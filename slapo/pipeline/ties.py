"""Parameters that several stages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def ties_of_stages(stages: Sequence[nn.Module]) -> tuple[StageTie, ...]:
    """Parameters tied across stages, found by identity in one pass.

    Examples
    --------
    >>> first, last = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    >>> last.weight = first.weight
    >>> ties_of_stages([first, nn.ReLU(), last])
    (StageTie(members=((0, 'weight'), (2, 'weight'))),)
    """
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
    """Parameters that a model has under several names.

    Parameters
    ----------
    top_mod
        The model; or, partitioned, the module whose children are its stages.
    is_pipeline_partitioned
        Which of the two it is.

    Returns
    -------
    dict
        A number for each of them -> the ``(name, stage)`` where it stands: names in the stage, or
        in the model with stage 0.

    Examples
    --------
    >>> model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    >>> model[1].weight = model[0].weight
    >>> sorted(analyze_tie_weights(model, False)[0])
    [('0.weight', 0), ('1.weight', 0)]
    >>> sorted(analyze_tie_weights(model, True)[0])
    [('weight', 0), ('weight', 1)]
    """
    stages = list(top_mod.children()) if is_pipeline_partitioned else [top_mod]
    return dict(enumerate(set(places) for places in _places(stages) if len(places) > 1))


def _places(stages: Sequence[nn.Module]) -> Iterable[list[tuple[str, int]]]:
    """For each parameter, the ``(name, stage)`` of its places, in order."""
    found: dict[int, list[tuple[str, int]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append((name, index))
    return found.values()
