"""The loop of a search: best predictions first, then what a sampler makes of the results."""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo.autotune.launch import Launcher
from slapo.autotune.options import Options, Result, Watcher
from slapo.autotune.prediction import Prediction, Predictor
from slapo.autotune.settled import Settled, differences
from slapo.autotune.space import (
    Choices,
    Point,
    Question,
    Refused,
    SpaceFunction,
    Survey,
    TuneError,
    make_point,
)
from slapo.autotune.study import (
    Trial,
    check_search,
    close,
    import_optuna,
    open_study,
    read_trial,
    report_of,
    state_of,
)
from slapo.autotune.trial import Outcome, default_logs, run_command, run_function

#: Share of the trials that the best predictions get.
_PREDICTED = 2 / 3
#: Proposals in a row that need no run, until a point is taken that does.
_MISSES = 3
#: After so many the space gives other points than it was asked for.
_HOPELESS = 200


@dataclass(frozen=True)
class _Plan:
    """A point to run next, as the study holds it, and why."""

    parameters: dict[str, Any]
    source: str


class Search:
    """One search that goes on; see :func:`slapo.autotune.tune`."""

    def __init__(
        self,
        space: SpaceFunction,
        constraint: Callable[[Any], Any] | None,
        runner: Launcher | Callable[[dict[str, Any]], Any] | None,
        db: Path | None,
        found: Survey,
        options: Options,
        watcher: Watcher | None,
    ) -> None:
        self._space, self._constraint, self._runner = space, constraint, runner
        self._survey, self._options, self._watcher = found, options, watcher
        self._logs = None if not isinstance(runner, Launcher) else default_logs(db)
        self._db = db
        self._predict: Predictor | None = None
        self._study = open_study(db)
        questions = sorted(found.questions)[:200]
        command = runner.text if isinstance(runner, Launcher) else ""
        mine = {"space": found.digest, "metric": options.metric, "command": command}
        check_search(self._study, db, {**mine, "questions": questions})
        self._settled = Settled(found, options, self._read(), db)
        self._random = random.Random(options.seed)
        self._fresh: list[Trial] = []
        seed = options.seed + len(self._study.get_trials(deepcopy=False))
        self._study.sampler = _sampler(seed % 2**32)
        ended = self._settled.ended.values()
        again = [trial for trial in ended if options.retry and self._may_retry(trial)]
        self._again = {trial.key for trial in again}
        self._first = [_Plan(trial.parameters, "cut_off") for trial in self._settled.cut]
        self._first += [_Plan(trial.parameters, "retry") for trial in again]
        self._ranked: list[Point] = []
        self._proposals = 0
        size = found.size
        self._total = options.trials or min(size, max(10, min(math.ceil(size / 10), 200)))

    def _read(self) -> list[Trial]:
        """All that the database holds; what still runs there was cut off with its tuner."""
        numbers = range(len(self._study.get_trials(deepcopy=False)))
        found = [read_trial(close(self._study, number)) for number in numbers]
        return [trial for trial in found if trial is not None]

    def _may_retry(self, trial: Trial) -> bool:
        is_ill = trial.is_failure and trial.outcome != "out_of_memory"
        # In a space too large to see whole, nobody knows how to ask for one that ran elsewhere.
        return is_ill and (bool(trial.parameters) or self._survey.is_complete)

    # Predictions.

    def predict_all(self, predict: Callable[[dict[str, Any]], Any] | None) -> None:
        """Ask for the prediction of every point, and rank those that fit."""
        if predict is None:
            return
        self._predict = Predictor(predict, self._db)
        ranked: list[tuple[float, int, Point]] = []
        refused: Counter[str] = Counter()
        try:
            for at, point in enumerate(self._survey.points):
                found = self._predict(point)
                if found.refused:
                    refused[found.refused] += 1
                elif found.fits:
                    ranked.append((-found.throughput, at, point))
                if self._watcher is not None:
                    self._watcher.predicted(at + 1, len(self._survey.points))
        finally:
            self._predict.save()
        self._survey.refused.update(refused)
        self._ranked = [point for _, _, point in sorted(ranked, key=lambda entry: entry[:2])]
        if not self._ranked:
            raise TuneError(self._nothing_fits(refused))
        if self._survey.is_complete and self._options.trials is None:
            self._total = min(self._total, len(self._ranked))

    def _nothing_fits(self, refused: Counter[str]) -> str:
        points = self._survey.points
        text = f"by their predictions none of {len(points)} points can run"
        found = [self._predict(point) for point in points] if self._predict else []
        sizes = [one for one in found if not one.refused]
        if sizes:
            text += f"; the smallest needs {min(sizes, key=lambda one: one.memory)}"
        for reason, number in refused.most_common(1):
            text += f"; {number} are refused, the first: {reason}"
        return f"{text}; add points that need less, such as smaller batches or more checkpoints"

    # The loop.

    def run(self) -> Result:
        """Run trials until there are enough."""
        misses = 0
        while self._first or self._settled.count() < self._total:
            left = self._settled.left(self._ranked or self._survey.points)
            if not self._first and not left and (self._survey.is_complete or misses >= _MISSES):
                break
            plan = self._next(left, misses)
            if plan is not None:
                self._study.enqueue_trial(plan.parameters, user_attrs={"source": plan.source})
            trial = self._one(self._study.ask())
            misses = 0 if trial is not None and trial.is_run else misses + 1
            if misses > _HOPELESS or (trial is not None and self._must_stop(trial)):
                break
        return self._result()

    def _next(self, left: list[Point], misses: int) -> _Plan | None:
        """The point to run, one of those left; None to let the sampler propose one."""
        if self._first:
            return self._first.pop(0)
        ended = self._settled.ended.values()
        by_prediction = sum(trial.source == "prediction" for trial in ended if trial.is_run)
        if self._ranked and left and by_prediction < math.ceil(self._total * _PREDICTED):
            return _Plan(left[0].parameters, "prediction")
        self._proposals += 1
        if misses < _MISSES:
            near = self._neighbours(left) if self._proposals % 2 == 0 else []
            return _Plan(self._one_of(near).parameters, "neighbour") if near else None
        return _Plan(self._one_of(left).parameters, "unseen") if left else None

    def _neighbours(self, left: list[Point]) -> list[Point]:
        """Points that differ from the best one in as few choices as there are left.

        The sampler alone is slow to try them: a space with conditions has many names, as the study
        sees it, and each is learned by itself.
        """
        best = self._settled.best
        if best is None:
            return []
        distances = [len(differences(point.choices, best.choices)) for point in left]
        nearest = min(distances, default=0)
        return [p for p, far in zip(left, distances, strict=True) if far == nearest]

    def _one_of(self, points: list[Point]) -> Point:
        """The best by its prediction, as they are ranked, or any."""
        return points[0] if self._ranked else self._random.choice(points)

    def _one(self, asked: Any) -> Trial | None:
        """Look at a point that the study gave, and run it if need be; None of a repetition."""
        try:
            return self._look_at(asked)
        except BaseException:
            # Interrupted, or ended by an error: no longer running, and first when it goes on.
            close(self._study, asked.number)
            raise

    def _look_at(self, asked: Any) -> Trial | None:
        choices = Choices(lambda question: _suggest(asked, question))
        outcome: Outcome | None = None
        try:
            point = make_point(self._space, choices, self._constraint)
        except Refused as reason:
            point = Point(choices.values, choices.values, {})
            outcome = Outcome("refused", reason=str(reason))
        predicted, command = None, None
        same = None if point.key in self._again else self._settled.ended.get(point.key)
        if same is None and outcome is None:
            predicted = self._predicted(point)
            outcome = self._ruled_out(point, predicted)
        if same is None and outcome is None:
            outcome, command = self._command(point)
        if same is None and outcome is not None:
            same = self._settled.judged_before(point.key, outcome)
        self._again.discard(point.key)
        if same is not None:
            asked.set_user_attr("same_as", same.number)
            self._study.tell(asked, same.result, state=state_of(same.outcome))
            return None
        if point.choices != point.values:
            asked.set_user_attr("choices", point.choices)
        asked.set_user_attr("values", point.values)
        log, is_started = "", outcome is None
        if outcome is None:
            outcome, log = self._execute(point, command, asked.number)
        asked.set_user_attr("report", report_of(outcome, predicted, log, is_started))
        close(self._study, asked.number)
        return self._take(asked.number)

    def _predicted(self, point: Point) -> Prediction | None:
        if self._predict is None:
            return None
        found = self._predict(point)
        self._predict.save()
        return found

    def _ruled_out(self, point: Point, predicted: Prediction | None) -> Outcome | None:
        """Why a point is not run, by its prediction or by trials that failed."""
        if predicted is not None and predicted.refused:
            return Outcome("refused", reason=predicted.refused)
        if predicted is not None and not predicted.fits:
            return Outcome("does_not_fit", reason=f"predicted {predicted}")
        # What is to run again may have failed for the same passing reason as what rules it out.
        reason = "" if point.key in self._again else self._settled.ruled_out_by(point)
        return Outcome("skipped", reason=reason) if reason else None

    def _command(self, point: Point) -> tuple[Outcome | None, list[str] | None]:
        """The command of a point, or why it has none."""
        if not isinstance(self._runner, Launcher):
            return None, None
        try:
            return None, self._runner(point.values)
        except Refused as reason:
            return Outcome("refused", reason=str(reason)), None

    def _execute(self, point: Point, command: list[str] | None, number: int) -> tuple[Outcome, str]:
        if self._watcher is not None:
            self._watcher.started(point, self._settled.count(), self._total)
        metric = self._options.metric
        if command is not None:
            log = (self._logs or Path()) / f"trial-{number:04}.log"
            timeout = self._options.timeout
            return run_command(command, point.values, log, timeout, metric), str(log)
        if self._runner is None or isinstance(self._runner, Launcher):
            raise TuneError("there is nothing to run; give a command")
        return run_function(self._runner, point.values, metric), ""

    def _take(self, number: int) -> Trial:
        trial = read_trial(self._study.get_trials(deepcopy=False)[number])
        if trial is None:
            raise RuntimeError(f"trial {number} is not in the study")
        self._settled.add(trial)
        if trial.is_run:
            self._fresh.append(trial)
        if self._watcher is not None:
            count = self._settled.count()
            self._watcher.ended(trial, self._settled.best, count, self._total)
        return trial

    def _must_stop(self, trial: Trial) -> bool:
        silent = [one.outcome in ("no_result", "garbage") for one in self._fresh]
        is_silent = all(silent) and len(silent) == min(2, self._total)
        if is_silent and self._logs is not None and self._settled.best is None:
            raise TuneError(
                f"the script gives no result: {trial.reason}. Call "
                "slapo.autotune.report_result(samples_per_second) at its end, or print a line such "
                f'as {{"{self._options.metric}": 12.5}}; then start again with --retry'
                + (f". Its log: {trial.log}" if trial.log else "")
            )
        return self._options.error_stop == "all" and trial.is_failure

    def _result(self) -> Result:
        trials = [trial for _, trial in sorted(self._settled.trials.items())]
        best = self._settled.best
        fits_not = 0
        if self._predict is not None:
            found = [self._predict(point) for point in self._survey.points]
            fits_not = sum(not one.fits and not one.refused for one in found)
        line = ""
        if best is not None and isinstance(self._runner, Launcher):
            line = self._runner.line(best.values)
        return Result(
            best,
            trials,
            self._survey.size,
            dict(self._survey.refused),
            fits_not,
            line,
            self._options.metric,
            self._settled.foreign,
        )


def _sampler(seed: int) -> Any:
    optuna = import_optuna()
    with warnings.catch_warnings():
        # Older versions call some of these options experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)


def _suggest(asked: Any, question: Question) -> int:
    """The position that the study proposes."""
    count = len(question.values)
    if count == 1:
        return 0
    if question.is_ordered:
        return int(asked.suggest_int(question.key, 0, count - 1))
    labels = [str(question.label(position)) for position in range(count)]
    return labels.index(asked.suggest_categorical(question.key, labels))
