"""Choice of the axes to shard: as many bytes as possible, without conflicts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

from slapo.derive.axes import (
    Axis,
    Chosen,
    Term,
    axes_in,
    concatenations_in,
    factors,
    is_sharded,
)
from slapo.derive.trace import Trace


def choose(found: Trace, bytes_of: dict[int, int], ranks: int, banned: set[str]) -> Chosen:
    """Choose the axes to shard.

    Conflicting axes are two dimensions of one parameter, or factors of one dimension such as heads
    and head features. The blocks of a concatenation are sharded all or none. `bytes_of` maps values
    of parameters to bytes; other axes are not sharded. `banned` has names of axes that stay
    replicated.
    """
    return _Choice(found, bytes_of, ranks, banned).choose()


class _Choice:
    def __init__(
        self, found: Trace, bytes_of: dict[int, int], ranks: int, banned: set[str]
    ) -> None:
        self.ranks, self.banned = ranks, banned
        self.weights: defaultdict[Axis, int] = defaultdict(int)
        #: for each parameter, the axes of each dimension
        self.of_parameters: list[list[Chosen]] = []
        for number in dict.fromkeys(found.parameters.values()):
            dims = [dict.fromkeys(axes_in(term)) for term in found.values[number].dims]
            self.of_parameters.append(dims)
            for axis in itertools.chain(*dims):
                if size := bytes_of.get(number):
                    self.weights[axis] += size
        #: dimensions with several axes, and concatenations, of all tensors
        self.products: list[list[Axis]] = []
        self.concatenations: Chosen = {}
        # Most tensors of a model share a few dimensions; each is looked at once.
        known = set()
        for value in found.values:
            for term in value.dims:
                own = factors(term)
                key = tuple(map(id, own))
                if key not in known:
                    known.add(key)
                    self.concatenations |= dict.fromkeys(concatenations_in(own))
                    if len(own) > 1:
                        self.products.append(own)
        self.excluded = self._excluded()
        #: axis -> the parameters, products and concatenations that contain it
        self.parameters_of: defaultdict[Axis, list[list[Chosen]]] = defaultdict(list)
        self.products_of: defaultdict[Axis, list[list[Axis]]] = defaultdict(list)
        self.concatenations_of: defaultdict[Axis, list[Axis]] = defaultdict(list)
        for dims in self.of_parameters:
            for axis in itertools.chain(*dims):
                self.parameters_of[axis].append(dims)
        for own in self.products:
            for axis in axes_in(own):
                self.products_of[axis].append(own)
        for concatenation in self.concatenations:
            for axis in axes_in((concatenation,)):
                self.concatenations_of[axis].append(concatenation)

    def choose(self) -> Chosen:
        """Choose the heaviest axes first, relative to the axes that they exclude."""
        # Greedy, from the heaviest axis relative to those that it excludes: taking it costs the
        # least. Heads and head features weigh the same and exclude each other; of these, the outer
        # one comes first.
        places = self._places()

        def worth(axis: Axis) -> tuple[float, int, float]:
            own = self.weights[axis]
            others = sum(self.weights.get(other, 0) for other in self.excluded[axis])
            return -own / (own + others), -own, places.get(axis, 0.0)

        chosen: Chosen = {}
        for axis in sorted(filter(self._may, self.weights), key=worth):
            if axis not in chosen:
                more = self._with_other_blocks(axis)
                if more is not None and self._fit(chosen | more, more):
                    chosen |= more
        return chosen

    def _may(self, axis: Axis) -> bool:
        return not (axis.whole or axis.size % self.ranks or axis.name in self.banned)

    def _excluded(self) -> defaultdict[Axis, Chosen]:
        """Return, for each axis, the axes that cannot be sharded together with it."""
        found: defaultdict[Axis, Chosen] = defaultdict(dict)
        rows: Iterable[list[Chosen]] = [
            *self.of_parameters,
            *([dict.fromkeys(axes_in((axis,))) for axis in own] for own in self.products),
        ]
        for row in rows:
            for one, other in itertools.permutations(row, 2):
                for axis in one:
                    found[axis] |= dict.fromkeys(a for a in other if a is not axis and self._may(a))
        return found

    def _places(self) -> dict[Axis, float]:
        """Return how far inside its dimensions an axis is: heads come before head features."""
        found: defaultdict[Axis, list[int]] = defaultdict(list)
        for own in self.products:
            for place, axis in enumerate(own):
                found[axis].append(place)
        return {axis: sum(all_of) / len(all_of) for axis, all_of in found.items()}

    def _with_other_blocks(self, axis: Axis) -> Chosen | None:
        """Add one axis from each block beside the axis's own; None if a block has none."""
        # Added axes are treated alike, which covers nested blocks.
        need: Chosen = {axis: None}
        todo = [axis]
        while todo:
            for concatenation in self.concatenations_of[todo.pop()]:
                for block in concatenation.blocks or []:
                    if not is_sharded(block, need):
                        other = self._first(block)
                        if other is None:
                            return None
                        need[other] = None
                        todo.append(other)
        return need

    def _first(self, block: Term) -> Axis | None:
        return next(filter(self._may, axes_in(block)), None)

    def _fit(self, chosen: Chosen, more: Chosen) -> bool:
        """Return whether each parameter and dimension of `more` is sharded in one place only."""
        if not all(map(self._may, more)):
            return False
        return not any(
            sum(not chosen.keys().isdisjoint(axes) for axes in dims) > 1
            for axis in more
            for dims in self.parameters_of[axis]
        ) and not any(
            sum(is_sharded((each,), chosen) for each in own) > 1
            for axis in more
            for own in self.products_of[axis]
        )
