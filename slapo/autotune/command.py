"""The command line of the tuner."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slapo.autotune.config import Config, load_config
from slapo.autotune.launch import Launcher
from slapo.autotune.options import Options, Result
from slapo.autotune.report import Progress, save_plot, summary
from slapo.autotune.search import search
from slapo.autotune.space import TuneError
from slapo.autotune.study import import_optuna
from slapo.errors import MissingPackageError


def main(arguments: Sequence[str] | None = None, prog: str = "slapo tune") -> int:
    """Search as the command line says.

    Parameters
    ----------
    arguments
        Of the command line; those of this process by default.
    prog
        How the command is called.

    Returns
    -------
    int
        0 if a trial gave a result, 1 if none did, 2 for wrong usage, 130 if it was interrupted.
    """
    parser = _parser(prog)
    given = parser.parse_args(arguments)
    try:
        with _ended_by_signals():
            return _tune(given)
    except (TuneError, MissingPackageError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Find the values with which a script trains fastest. Each trial is a process "
        "that gets them as JSON in SLAPO_TRIAL and in the place of {name} in its arguments. The "
        "same command goes on with a search that was interrupted.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="a Python file with space(choose)")
    add("--db", default="trials.db", metavar="FILE", help="where trials are kept (%(default)s)")
    add("--trials", type=int, metavar="N", help="points to run in all (a tenth, from 10 to 200)")
    add("--timeout", type=float, default=1800.0, metavar="S", help="for a trial (%(default)s)")
    add("--seed", type=int, default=0, help="of the sampler (%(default)s)")
    add("--metric", default="throughput", help="what to make large (%(default)s)")
    add("--retry", action="store_true", help="run again what crashed, hung or gave no result")
    add(
        "--error-stop",
        choices=("none", "symbol", "all"),
        default="none",
        help="after a trial that failed: go on; leave out points that differ by a larger value of "
        "one name; end",
    )
    add("script", nargs="?", help="what a trial runs: a file .py or .sh, or a program")
    add("script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _tune(given: argparse.Namespace) -> int:
    import_optuna()
    config = load_config(given.config, given)
    db = Path(given.db)
    options = Options(
        trials=given.trials,
        timeout=given.timeout,
        seed=given.seed,
        metric=given.metric,
        error_stop=given.error_stop,
        grows=config.grows,
        retry=given.retry,
    )
    launcher = _launcher(given, config)
    with Progress() as progress:
        result = search(
            config.space, launcher, db, config.predict, config.constraint, progress, options
        )
    try:
        _show(result, db)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has left; what was measured is in the database
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return 0 if result.best is not None else 1


def _launcher(given: argparse.Namespace, config: Config) -> Launcher:
    words = [] if given.script is None else [given.script, *given.script_args]
    if config.command is not None and words:
        raise TuneError(
            f"{given.config} has command(point), and the command line a script, {given.script}; "
            "leave one of them out"
        )
    return Launcher(config.command or words, bare=config.is_published)


def _show(result: Result, db: Path) -> None:
    print(summary(result))
    picture = db.with_name(db.name + ".png")
    why = "matplotlib is not installed"
    try:
        is_saved = save_plot(result, picture)
    except OSError as error:
        is_saved, why = False, f"{picture} cannot be written: {error.strerror}"
    if is_saved:
        print(f"\nthe search as a plot: {picture}")
    else:
        print(f"\nno plot: {why}", file=sys.stderr)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the search as Ctrl-C does, with its trial."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    # What is ignored stays so: under nohup a search outlives its terminal.
    numbers = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
