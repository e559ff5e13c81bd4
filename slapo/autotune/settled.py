"""Which points of a space are settled, and by which trials."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from slapo.autotune.options import Options
from slapo.autotune.space import Point, Survey, TuneError
from slapo.autotune.study import Trial, best_of
from slapo.autotune.trial import Outcome
from slapo.errors import with_nearest


class Settled:
    """What the trials of a database, and those of this start, say of the points of a space.

    Only what ran settles a point for good. What was refused, did not fit or was skipped is judged
    again at each start: the constraint, the prediction or the options may be others now.

    Attributes
    ----------
    trials
        Those of this space, by their number.
    ended
        Key of a point -> the trial that settled it.
    foreign
        Trials that ran another point than those of this space.
    cut
        Trials of points that are not settled, as the tuner ended before them.
    """

    def __init__(
        self, found: Survey, options: Options, trials: Iterable[Trial], db: object
    ) -> None:
        self.trials: dict[int, Trial] = {}
        self.foreign = 0
        self._survey = found
        self._rule = options.error_stop == "symbol"
        self._grows = options.grows
        self._points = {point.key: point for point in found.points}
        self._shapes = {frozenset(point.values) for point in found.points}
        self.ended: dict[str, Trial] = {}
        self._judged: dict[str, Trial] = {}
        self._ruled_out: set[str] = set()
        cut: dict[str, Trial] = {}
        trials = list(trials)
        _refuse_other_points(found, trials, db)
        for trial in trials:
            self._take_over(trial, cut)
        self.cut = [trial for key, trial in cut.items() if key not in self.ended]
        self._rule_out(*self.ended.values())

    def _take_over(self, trial: Trial, cut: dict[str, Trial]) -> None:
        key, point = trial.key, self._points.get(trial.key)
        if point is not None and not trial.parameters:
            # Taken over from elsewhere: by its values it is this point.
            trial = replace(trial, choices=point.choices, parameters=point.parameters)
        # Of a space too large to see whole, a point is known by the names of its values.
        is_unseen = not self._survey.is_complete and frozenset(trial.values) in self._shapes
        is_mine = point is not None or is_unseen
        if trial.is_run and not is_mine:
            self.foreign += 1
            return
        self.trials[trial.number] = trial
        if trial.is_run:
            self.ended[key] = trial
        elif trial.outcome != "cut_off":
            self._judged[key] = trial
        elif is_mine:
            cut[key] = trial

    @property
    def best(self) -> Trial | None:
        """The one with the largest result."""
        return best_of(list(self.trials.values()))

    def count(self) -> int:
        """Points that were run."""
        return sum(trial.is_run for trial in self.ended.values())

    def add(self, trial: Trial) -> None:
        """Take a trial that ended now."""
        before = self.ended.get(trial.key)
        self.ended[trial.key] = self.trials[trial.number] = trial
        if before is not None and before.is_failure:
            self._ruled_out.clear()
            self._rule_out(*self.ended.values())
        else:
            self._rule_out(trial)

    def judged_before(self, key: str, outcome: Outcome) -> Trial | None:
        """The trial by which an earlier start said the same of a point that is not run."""
        same = self._judged.get(key)
        if same is None or (same.outcome, same.reason) != (outcome.kind, outcome.reason):
            return None
        self.ended[key] = same
        return same

    # The rule of --error-stop symbol.

    def _rule_out(self, *trials: Trial) -> None:
        for trial in trials if self._rule else ():
            points = self._survey.points
            larger = {p.key for p in points if _larger_in(p.choices, trial, self._grows)}
            self._ruled_out |= larger

    def ruled_out_by(self, point: Point) -> str:
        """Why a point is not run after a trial that failed; empty if it may run."""
        for failed in self.ended.values() if self._rule else ():
            name = _larger_in(point.choices, failed, self._grows)
            if name:
                less = failed.choices[name]
                return f"trial {failed.number} failed with {name}={less}: {failed.outcome}"
        return ""

    def left(self, points: Sequence[Point]) -> list[Point]:
        """Those to look at yet: that may run, and when none is left, that are to be skipped."""
        rest = [point for point in points if point.key not in self.ended]
        may_run = [point for point in rest if point.key not in self._ruled_out]
        known = {key for key, trial in self._judged.items() if trial.outcome == "skipped"}
        return may_run or [point for point in rest if point.key not in known]


def check_grows(found: Survey, options: Options) -> None:
    """Refuse names that the rule of ``--error-stop symbol`` could never be about."""
    names = {name for point in found.points for name in point.choices}
    for name in options.grows or () if options.error_stop == "symbol" else ():
        if name not in names:
            rest = f"this space chooses {sorted(names)}; mend grows"
            raise TuneError(
                f"grows has {name!r}, which no point chooses: {with_nearest(name, names, rest)}"
            )


def _refuse_other_points(found: Survey, trials: Sequence[Trial], db: object) -> None:
    """The same answers must still make the same point, or two spaces would be one search."""
    now = {_as_text(point.parameters): point for point in found.points}
    for trial in trials:
        point = now.get(_as_text(trial.parameters)) if trial.is_run and trial.parameters else None
        if point is not None and point.key != trial.key:
            raise TuneError(
                f"{db} is of another space: its trial {trial.number} ran {dict(trial.values)}, "
                f"of which the space now makes {dict(point.values)}; pass another --db, or the "
                "space that it was made with"
            )


def _larger_in(choices: dict[str, Any], failed: Trial, grows: Collection[str] | None) -> str:
    """The one name in which choices are larger than those of a failed trial, all others equal."""
    if not failed.is_failure or failed.choices.keys() != choices.keys():
        return ""
    names = differences(choices, failed.choices)
    if len(names) != 1 or (grows is not None and names[0] not in grows):
        return ""
    one, other = choices[names[0]], failed.choices[names[0]]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (one, other))
    return names[0] if numbers and one > other else ""


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names that only one has, or that have another value."""
    names = {**one, **other}
    missing = object()
    return [name for name in names if one.get(name, missing) != other.get(name, missing)]


def _as_text(parameters: dict[str, Any]) -> str:
    return json.dumps(parameters, sort_keys=True)
