"""Searching a space."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from slapo.autotune.launch import Launcher
from slapo.autotune.loop import Search
from slapo.autotune.options import Options, Result, Watcher
from slapo.autotune.settled import check_grows
from slapo.autotune.space import SpaceFunction, TuneError, survey
from slapo.autotune.study import import_optuna, locked


def tune(
    space: SpaceFunction,
    command: str | Sequence[str] | Callable[[dict[str, Any]], Sequence[str]] | None = None,
    *,
    db: str | Path | None = None,
    predict: Callable[[dict[str, Any]], Any] | None = None,
    constraint: Callable[[Any], Any] | None = None,
    run: Callable[[dict[str, Any]], Any] | None = None,
    watcher: Watcher | None = None,
    trials: int | None = None,
    timeout: float = 1800.0,
    seed: int = 0,
    metric: str = "throughput",
    error_stop: str = "none",
    grows: Collection[str] | None = None,
    retry: bool = False,
) -> Result:
    """Search a space for the point with the largest throughput.

    A trial is a process that gets its values as JSON in the environment's ``SLAPO_TRIAL``
    (:func:`slapo.autotune.trial_values`) and in its arguments, and prints its result
    (:func:`slapo.autotune.report_result`). Points that do not fit the memory by their prediction
    are not run; the best predictions run first and get two thirds of the trials, optuna's TPE
    sampler [1]_ proposes the others. With a database the same call goes on where the last one
    ended, however it did.

    Parameters
    ----------
    space
        Calls its argument as ``choose(name, candidates)``, where candidates may depend on earlier
        answers, and returns a dict of values; None, or :class:`slapo.autotune.Refused` raised, for
        a point that nothing can run.
    command
        The program of a trial and its arguments, with ``{name}`` where a value goes; or a function
        from the values to that list.
    db
        The file of the search; without one, it is kept in memory.
    predict
        Values -> what is predicted of them, as keys or attributes: ``memory`` and ``capacity`` in
        bytes, ``throughput``, optionally ``fits``.
    constraint
        Values -> whether they may run.
    run
        In place of a command: a function of this process, from the values to the throughput.
    watcher
        Is told how it goes on.
    trials
        Points to run in all, those in the database included; a tenth of the space by default, from
        10 to 200.
    timeout
        Seconds that a trial may take.
    seed
        Of the sampler.
    metric
        Which figure of the line of JSON that a trial prints is made large.
    error_stop
        ``"none"``: go on after a trial that failed. ``"symbol"``: points that are like one that
        failed, but for a larger value of one name, are not run. ``"all"``: end.
    grows
        The names that ``"symbol"`` is about; by default all whose candidates are numbers.
    retry
        Run again what crashed, took too long, or gave no result.

    Returns
    -------
    Result
        The best trial and all others.

    Raises
    ------
    TuneError
        If something given cannot be searched; the message says what.
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
    options = Options(trials, timeout, seed, metric, error_stop, grows, retry)
    if (command is None) == (run is None):
        raise TuneError("give either a command or a function run=, and not both")
    launcher = None if command is None else Launcher(command)
    return search(space, launcher or run, db, predict, constraint, watcher, options)


def search(
    space: SpaceFunction,
    runner: Launcher | Callable[[dict[str, Any]], Any] | None,
    db: str | Path | None,
    predict: Callable[[dict[str, Any]], Any] | None,
    constraint: Callable[[Any], Any] | None,
    watcher: Watcher | None,
    options: Options,
) -> Result:
    """:func:`tune` with its arguments in objects."""
    path = None if db is None else Path(db)
    found = survey(space, constraint, seed=options.seed)
    check_grows(found, options)
    if isinstance(runner, Launcher):
        kinds = {frozenset(point.values): point.values for point in found.points}
        runner.check(frozenset[str]().union(*kinds), kinds.values())
    with locked(path):
        going = Search(space, constraint, runner, path, found, options, watcher)
        going.predict_all(predict)
        return going.run()
