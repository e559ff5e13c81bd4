"""Ties over the stages of a DeepSpeed topology, under the names of the published Slapo."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def analyze_tie_ranks(
    tie_weight_groups: Iterable[set[tuple[str, int]]], topology: Any
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Return the ranks that hold each tied parameter.

    Parameters
    ----------
    tie_weight_groups
        For each parameter, its ``(name, stage)`` pairs: the values of
        :func:`slapo.pipeline.analyze_tie_weights`.
    topology
        DeepSpeed's, or any object whose ``filter_match(pipe=stage)`` returns the stage's ranks.

    Returns
    -------
    tie_ranks
        For each parameter, and every position within a stage, the global ranks that share it.
    tie_stages
        For each parameter, its stages in order.

    Examples
    --------
    >>> class Topology:
    ...     def filter_match(self, pipe):
    ...         return [2 * pipe, 2 * pipe + 1]
    >>> analyze_tie_ranks([{("wte.weight", 0), ("head.weight", 2)}], Topology())
    ([[[0, 4], [1, 5]]], [[0, 2]])
    """
    tie_stages = [sorted({stage for _, stage in group}) for group in tie_weight_groups]
    tie_ranks = [
        [
            list(ranks)
            for ranks in zip(*(topology.filter_match(pipe=s) for s in stages), strict=True)
        ]
        for stages in tie_stages
    ]
    return tie_ranks, tie_stages
