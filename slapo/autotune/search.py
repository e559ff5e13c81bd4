"""Search: the best predictions first, then a sampler's proposals."""

from __future__ import annotations

import math
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slapo.autotune.database import (
    Predictor,
    best_of,
    check_search,
    finish,
    import_optuna,
    locked,
    open_study,
    read_trial,
    state_of,
)
from slapo.autotune.report import Progress, Result
from slapo.autotune.space import (
    Choices,
    Point,
    Question,
    Refused,
    SpaceFunction,
    Survey,
    TuneError,
    are_numbers,
    make_point,
    point_key,
    survey,
)
from slapo.autotune.trial import (
    Launcher,
    Trial,
    end_leftovers,
    judged,
    run_command,
    run_function,
)
from slapo.errors import with_nearest

#: Fraction of the trials for the best predictions.
_PREDICTED = 2 / 3
#: Consecutive proposals without a run, after which an unseen point is chosen.
_MISSES = 3
#: Consecutive proposals without a run, after which the search stops: the space does not return the
#: proposed points.
_HOPELESS = 200
_STOPS = ("none", "symbol", "all")


def tune(
    space: SpaceFunction,
    command: Launcher | str | Sequence[str] | Callable[..., Sequence[str]] | None = None,
    *,
    db: str | Path | None = None,
    predict: Callable[[dict[str, Any]], Any] | None = None,
    constraint: Callable[[Any], Any] | None = None,
    run: Callable[[dict[str, Any]], Any] | None = None,
    watcher: Progress | None = None,
    trials: int | None = None,
    timeout: float = 1800.0,
    seed: int = 0,
    metric: str = "throughput",
    error_stop: str = "none",
    grows: Collection[str] | None = None,
    retry: bool = False,
) -> Result:
    """Search a space for the point with the largest throughput.

    A trial is a process. It gets its values as JSON in the environment variable ``SLAPO_TRIAL``
    (:func:`slapo.autotune.trial_values`) and in its arguments. It reports its result by
    :func:`slapo.autotune.report_result`. Points that do not fit into memory by their prediction are
    not run. The best predictions run first and get two thirds of the trials; optuna's TPE sampler
    [1]_ proposes the others. With a database the same call continues the last search, however that
    ended.

    Parameters
    ----------
    space
        Function that calls its argument as ``choose(name, candidates)`` and returns a dict of
        values. Candidates may depend on earlier answers. For a point that cannot run, it returns
        None or raises :class:`slapo.autotune.Refused`.
    command
        Program of a trial and its arguments, with ``{name}`` as placeholders of values; or a
        function from the values to that list.
    db
        File of the search; in memory by default.
    predict
        Function from values to a prediction with the keys or attributes ``memory`` and ``capacity``
        in bytes, ``throughput``, and optionally ``fits``.
    constraint
        Function from values to True if they may run.
    run
        Function from the values to the throughput, run in this process instead of a command.
    watcher
        Object that prints the events of the search.
    trials
        Number of points to run, including those in the database; by default a tenth of the space,
        from 10 to 200.
    timeout
        Seconds until a trial is ended.
    seed
        Seed of the sampler.
    metric
        Name of the reported figure to maximize.
    error_stop
        ``"none"`` continues after a failed trial. ``"symbol"`` skips points that differ from it
        only by a larger value of one name. ``"all"`` ends the search.
    grows
        Names for ``"symbol"``; by default all with numeric candidates.
    retry
        True reruns trials that crashed, timed out, or gave no result.

    Returns
    -------
    Result
        The best trial and all others.

    Raises
    ------
    TuneError
        If an argument is invalid, or the space has no point to run.
    MissingPackageError
        If optuna is not installed.

    References
    ----------
    .. [1] Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011.

    Examples
    --------
    >>> def space(choose):
    ...     tp = choose("tp", [1, 2, 4])
    ...     return {"tp": tp, "micro": choose("micro", [1, 2, 4, 8] if tp > 1 else [1, 2])}
    >>> found = tune(space, run=lambda point: point["micro"] / point["tp"] ** 0.5)
    >>> found.size, found.best.values
    (10, {'tp': 2, 'micro': 8})
    """
    import_optuna()
    is_positive = (trials is None or trials > 0) and 0 < timeout < math.inf and seed >= 0
    if not is_positive or error_stop not in _STOPS:
        raise TuneError(
            f"trials={trials}, timeout={timeout}, seed={seed}, error_stop={error_stop!r}: give "
            f"numbers above 0, a seed of at least 0, and one of {', '.join(_STOPS)}"
        )
    if (command is None) == (run is None):
        raise TuneError("give either a command or a function run=, and not both")
    launcher = command if command is None or isinstance(command, Launcher) else Launcher(command)
    found = survey(space, constraint, seed=seed)
    _check_names(found, grows if error_stop == "symbol" else None, launcher)
    path = None if db is None else Path(db)
    with locked(path):
        search = _Search(
            space, constraint, launcher, run, watcher, found, timeout, metric, error_stop, grows
        )
        search.open(path, trials, seed, retry)
        if predict is not None:
            search.predict_all(predict)
        return search.run()


def _check_names(found: Survey, grows: Collection[str] | None, launcher: Launcher | None) -> None:
    names = {name for point in found.points for name in point.choices}
    for name in grows or ():
        if name not in names:
            rest = f"a point chooses {sorted(names)}"
            raise TuneError(f"grows has {name!r}: {with_nearest(name, names, rest)}")
    if launcher is not None:
        launcher.check({frozenset(point.values): point.values for point in found.points}.values())


@dataclass(eq=False)
class _Search:
    """One start of a search.

    Only trials that ran settle a point for good. Points that were refused, did not fit or were
    skipped are judged again at each start, as the constraint, prediction or options may differ.
    """

    _space: SpaceFunction
    _constraint: Callable[[Any], Any] | None
    _launcher: Launcher | None
    _function: Callable[[dict[str, Any]], Any] | None
    _watcher: Progress | None
    _survey: Survey
    _timeout: float
    _metric: str
    _error_stop: str
    _grows: Collection[str] | None

    def open(self, db: Path | None, trials: int | None, seed: int, retry: bool) -> None:
        """Open the study of the search, and load its trials."""
        self._study = open_study(db)
        mine = {
            "space": sorted(self._survey.questions)[:1000],
            "metric": self._metric,
            "command": self._launcher.text if self._launcher else "",
        }
        check_search(self._study, db, mine)
        if self._launcher is not None:
            named = db or Path(tempfile.mkdtemp(prefix="slapo-tune-"), "memory")
            self._logs = named.with_name(named.name + ".logs")
            end_leftovers(self._logs)
        #: Trials of this space by number, and the trials that settle a point in this start.
        self._trials: dict[int, Trial] = {}
        self._ended: dict[str, Trial] = {}
        #: Points that ``error_stop="symbol"`` skips, with the reason.
        self._skipped: dict[str, str] = {}
        self._queue: list[tuple[dict[str, Any], str]] = []
        self._predict: Predictor | None = None
        self._ranked: list[Point] = []
        self._foreign = self._proposals = self._does_not_fit = 0
        held = list(map(read_trial, self._study.get_trials(deepcopy=False)))
        for number, trial in enumerate(held):
            is_cut = trial is None or trial.outcome == "cut_off"
            # Trials that a killed search left as running would stay so in the study.
            finish(self._study, number, None if is_cut else trial)
        self._take_over(held, db, retry)
        # Another seed at each start: the same one would propose the first points again.
        self._study.sampler = _sampler((seed + len(held)) % 2**32)
        self._random = random.Random(seed)
        size = self._survey.size
        self._total = trials or min(size, max(10, min(math.ceil(size / 10), 200)))
        self._is_default = trials is None

    def _take_over(self, trials: Iterable[Trial | None], db: Path | None, retry: bool) -> None:
        points = {point.key: point for point in self._survey.points}
        by_answers = {point_key(point.parameters): point for point in self._survey.points}
        shapes = {frozenset(point.values) for point in self._survey.points}
        cut: dict[str, Trial] = {}
        for trial in trials:
            if trial is None or not (trial.is_run or trial.outcome == "cut_off"):
                continue
            point = points.get(trial.key)
            if point is not None and not trial.parameters:
                # An imported trial has no parameters; its values determine the point.
                trial = replace(trial, choices=point.choices, parameters=point.parameters)
            now = by_answers.get(point_key(trial.parameters)) if trial.parameters else None
            if now is not None and now.key != trial.key:
                raise TuneError(
                    f"{db} belongs to another space: its trial {trial.number} ran "
                    f"{dict(trial.values)}, which is now {dict(now.values)}; name another "
                    "database, or restore the space"
                )
            # In a space too large to enumerate, the names of the values identify its points.
            is_unseen = not self._survey.is_complete and frozenset(trial.values) in shapes
            if point is None and not is_unseen:
                self._foreign += trial.is_run
                continue
            self._trials[trial.number] = trial
            (self._ended if trial.is_run else cut)[trial.key] = trial
        self._queue += [(t.parameters, "cut_off") for k, t in cut.items() if k not in self._ended]
        for trial in [*self._ended.values()] if retry else []:
            # An imported trial of such a large space has no parameters to repeat.
            is_known = bool(trial.parameters) or self._survey.is_complete
            if trial.is_failure and trial.outcome != "out_of_memory" and is_known:
                self._queue.append((trial.parameters, "retry"))
                del self._ended[trial.key]
        for trial in self._ended.values():
            self._skip_larger(trial)

    # Predictions.

    def predict_all(self, predict: Callable[[dict[str, Any]], Any]) -> None:
        """Predict every point, and rank those that fit."""
        self._predict = Predictor(predict, self._study)
        ranked: list[tuple[float, int, Point]] = []
        refused: Counter[str] = Counter()
        points = self._survey.points
        try:
            for at, point in enumerate(points):
                found = self._predict(point)
                if found.refused:
                    refused[found.refused] += 1
                elif found.fits:
                    ranked.append((-found.throughput, at, point))
                if self._watcher is not None:
                    self._watcher.predicted(at + 1, len(points))
        finally:
            self._predict.save()
        self._survey.refused.update(refused)
        self._ranked = [point for _, _, point in sorted(ranked, key=lambda entry: entry[:2])]
        self._does_not_fit = len(points) - len(ranked) - refused.total()
        if not self._ranked:
            text = f"none of {len(points)} points is predicted to run"
            found_sizes = [found for found in map(self._predict, points) if not found.refused]
            if found_sizes:
                text += f"; the smallest needs {min(found_sizes, key=lambda one: one.memory)}"
            for reason, number in refused.most_common(1):
                text += f"; {number} are refused, the first: {reason}"
            raise TuneError(
                f"{text}; add points that need less, such as smaller batches or more checkpoints"
            )
        if self._survey.is_complete and self._is_default:
            self._total = min(self._total, len(self._ranked))

    # The loop.

    def run(self) -> Result:
        """Run trials until the requested number is reached."""
        misses = 0
        while self._queue or self._count() < self._total:
            left = self._left()
            if not (self._queue or left) and (self._survey.is_complete or misses >= _MISSES):
                break
            plan = self._next(left, misses)
            if plan is not None:
                self._study.enqueue_trial(plan[0], user_attrs={"source": plan[1]})
            asked = self._study.ask()
            try:
                trial = self._settle(asked)
            except BaseException:
                # the point runs first when the search continues
                finish(self._study, asked.number, None)
                raise
            misses = 0 if trial is not None and trial.is_run else misses + 1
            if misses > _HOPELESS or (trial is not None and self._must_stop(trial)):
                break
        return self._result()

    def _count(self) -> int:
        return sum(trial.is_run for trial in self._ended.values())

    def _left(self) -> list[Point]:
        """Return points without a trial: those that may run, or at the end those to skip."""
        points = [p for p in self._ranked or self._survey.points if p.key not in self._ended]
        return [point for point in points if point.key not in self._skipped] or points

    def _next(self, left: list[Point], misses: int) -> tuple[dict[str, Any], str] | None:
        """Return parameters and source of the next point, or None for the sampler's proposal."""
        if self._queue:
            return self._queue.pop(0)
        by_prediction = sum(t.source == "prediction" for t in self._ended.values() if t.is_run)
        if self._ranked and left and by_prediction < math.ceil(self._total * _PREDICTED):
            return left[0].parameters, "prediction"
        self._proposals += 1
        if misses >= _MISSES:
            return (self._one_of(left).parameters, "unseen") if left else None
        # Every second proposal is a neighbor of the best point, the others are the sampler's.
        near = self._neighbors(left) if self._proposals % 2 == 0 else []
        return (self._one_of(near).parameters, "neighbor") if near else None

    def _neighbors(self, left: list[Point]) -> list[Point]:
        """Return points that differ from the best one in as few choices as possible.

        The sampler rarely proposes these: a space with conditions has many parameters in the study,
        and each is modeled separately.
        """
        best = best_of(list(self._trials.values()))
        if best is None:
            return []
        distances = [len(_differences(point.choices, best.choices)) for point in left]
        nearest = min(distances, default=0)
        return [p for p, far in zip(left, distances, strict=True) if far == nearest]

    def _one_of(self, points: list[Point]) -> Point:
        return points[0] if self._ranked else self._random.choice(points)

    def _settle(self, asked: Any) -> Trial | None:
        """Judge a point from the study, and run it; None for a repetition."""
        choices = Choices(lambda question: _suggest(asked, question))
        point: Point | None = None
        trial: Trial | None = None
        command: list[str] | None = None
        try:
            point = make_point(self._space, choices, self._constraint)
            if point.key not in self._ended:
                trial = self._judge(point)
            if self._launcher is not None and trial is None:
                command = self._launcher(point.values)
        except Refused as reason:
            point = point or Point(choices.values, choices.values, {})
            trial = judged("refused", reason=str(reason))
        same = self._ended.get(point.key)
        if same is not None:
            asked.set_user_attr("same_as", same.number)
            # The sampler learns the known result, which moves it on to other points.
            self._study.tell(asked, same.result, state=state_of(same.outcome))
            return None
        # Written before the run: if the tuner is killed in it, the next start finds the point.
        asked.set_user_attr("point", {"values": point.values, "choices": point.choices})
        trial = replace(
            trial or self._execute(point, command, asked.number),
            number=asked.number,
            values=point.values,
            choices=point.choices,
            predicted=self._predict.get(point) if self._predict else None,
            parameters=asked.params,
            source=asked.user_attrs.get("source", "sampler"),
        )
        # a single write, so a trial is stored completely or not at all
        asked.set_user_attr("trial", asdict(trial))
        finish(self._study, asked.number, trial)
        self._add(trial)
        return trial

    def _judge(self, point: Point) -> Trial | None:
        """Return the trial of a point that is not run, or None."""
        if self._predict is not None:
            found = self._predict(point)
            self._predict.save()
            if found.refused:
                return judged("refused", reason=found.refused)
            if not found.fits:
                return judged("does_not_fit", reason=f"predicted {found}")
        reason = self._skipped.get(point.key)
        return None if reason is None else judged("skipped", reason=reason)

    def _execute(self, point: Point, command: list[str] | None, number: int) -> Trial:
        metric = self._metric
        if self._watcher is not None:
            self._watcher.started(point, self._count(), self._total)
        if self._function is not None:
            return replace(run_function(self._function, point.values, metric), started=True)
        log = self._logs / f"trial-{number:04}.log"
        trial = run_command(command or [], point.values, log, self._timeout, metric)
        return replace(trial, started=True, log=str(log))

    def _add(self, trial: Trial) -> None:
        self._ended[trial.key] = self._trials[trial.number] = trial
        self._skip_larger(trial)
        if self._watcher is not None:
            best = best_of(list(self._trials.values()))
            self._watcher.ended(trial, best, self._count(), self._total)

    def _skip_larger(self, trial: Trial) -> None:
        """Skip points that differ from a failed trial only by a larger value of one name."""
        if self._error_stop != "symbol" or not trial.is_failure:
            return
        grows = self._grows
        for point in self._survey.points:
            name, *more = _differences(point.choices, trial.choices) or [""]
            if more or name not in (trial.choices if grows is None else grows):
                continue
            pair: list[Any] = [trial.choices.get(name), point.choices.get(name)]
            if are_numbers(pair) and pair[0] < pair[1]:
                reason = f"trial {trial.number} failed with {name}={pair[0]}: {trial.outcome}"
                self._skipped.setdefault(point.key, reason)

    def _must_stop(self, trial: Trial) -> bool:
        run = [one.outcome for one in self._trials.values() if one.is_run]
        # Two silent trials are enough: the script, and not the points, is at fault.
        is_silent = set(run) <= {"no_result", "garbage"} and len(run) >= min(2, self._total)
        if is_silent and trial.log:
            raise TuneError(
                f"the script reports no result: {trial.reason}. Call "
                "slapo.autotune.report_result(samples_per_second) at its end, or print a line "
                f'such as {{"{self._metric}": 12.5}}; then restart with --retry. Its log: '
                f"{trial.log}"
            )
        return self._error_stop == "all" and trial.is_failure

    def _result(self) -> Result:
        best = best_of(list(self._trials.values()))
        return Result(
            best,
            [trial for _, trial in sorted(self._trials.items())],
            self._survey.size,
            dict(self._survey.refused),
            self._does_not_fit,
            self._launcher.line(best.values) if best is not None and self._launcher else "",
            self._metric,
            self._foreign,
        )


def _sampler(seed: int) -> Any:
    optuna = import_optuna()
    with warnings.catch_warnings():
        # Older versions of optuna call some of these options experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # multivariate models values together, such as batch and tensor-parallel size; group does so
        # in spaces whose points have different names.
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)


def _suggest(asked: Any, question: Question) -> int:
    count = len(question.values)
    # A study has no use for a parameter with one value, and make_point() leaves it out too.
    if count == 1:
        return 0
    if question.is_ordered:
        # The index and not the value, so that uneven steps such as 1, 2, 4, 8 are modeled as
        # neighbors.
        return int(asked.suggest_int(question.key, 0, count - 1))
    labels = [str(question.label(position)) for position in range(count)]
    return labels.index(asked.suggest_categorical(question.key, labels))


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names with different values, or present in one point only."""
    missing = object()
    names = {**one, **other}
    return [name for name in names if one.get(name, missing) != other.get(name, missing)]
