"""Whether this rank can finish its steps, by what it knows of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slapo.framework_dialect.peers import Event


class Steps:
    """Steps of this rank, and events of the others.

    Steps are counted alike on all ranks, so a rank that ended or failed with fewer of them than
    this one has begun will never join in. One that is ahead does no harm.

    Examples
    --------
    >>> steps = Steps()
    >>> steps.begin()
    >>> steps.note([Event("ended", 1, 1, "rank 1 ended")])
    >>> steps.obstacle() is None
    True
    >>> steps.finish()
    >>> steps.begin()
    >>> steps.obstacle().text
    'rank 1 ended'
    """

    def __init__(self) -> None:
        self.count = 0
        self._failed_at = -1
        self._depth = 0
        self._counted = False
        self._events: list[Event] = []

    @property
    def is_inside(self) -> bool:
        """Whether this rank is in a step."""
        return self._depth > 0

    @property
    def has_failed(self) -> bool:
        """Whether this rank failed in its latest step, or after it."""
        return self._failed_at == self.count

    def begin(self, counted: bool = True) -> None:
        """Enter a step; the outermost one counts."""
        self._depth += 1
        if self._depth == 1:
            self.count += counted
            self._counted = counted

    def finish(self) -> None:
        """Leave a step."""
        self._depth -= 1

    def fail(self) -> None:
        """Note that this rank fails where it is."""
        self._failed_at = self.count

    def note(self, events: Iterable[Event]) -> None:
        """Take in what became of other ranks."""
        self._events += events

    def told(self) -> set[int]:
        """Ranks of which there is any news."""
        return {event.rank for event in self._events}

    def gone(self) -> set[int]:
        """Ranks that take no part any more."""
        return {event.rank for event in self._events if event.kind != "failed"}

    def obstacle(self) -> Event | None:
        """The first event that keeps this rank from finishing what it does, None if it can."""
        return next(self._obstacles(), None)

    def obstacle_to_begin(self) -> Event | None:
        """Like `obstacle`, for a step that begins: an error in that same step may hit all ranks."""
        return next((e for e in self._obstacles() if not self._may_share(e)), None)

    def _obstacles(self) -> Iterator[Event]:
        return (event for event in self._events if self._is_obstacle(event))

    def _is_obstacle(self, event: Event) -> bool:
        if event.kind == "ended":
            return self.is_inside and self._counted and event.step < self.count
        # An error that this rank met as well, in the same step, is nothing to wait for.
        return event.kind == "died" or event.step > self._failed_at

    def _may_share(self, event: Event) -> bool:
        return event.kind == "failed" and event.step == self.count
