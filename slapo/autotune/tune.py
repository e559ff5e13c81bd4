"""Command line of the tuner; also ``python -m slapo.autotune.tune``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from slapo.autotune import search
from slapo.autotune.database import Database, import_optuna
from slapo.autotune.report import Progress, save_plot, summary
from slapo.autotune.space import TuneError
from slapo.autotune.symbols import Space, Symbol, load_config
from slapo.autotune.trial import Launcher
from slapo.errors import MissingPackageError

#: Database, Space and Symbol are names of the published package.
__all__ = ["Database", "Space", "Symbol", "main"]


def main(arguments: Sequence[str] | None = None, prog: str = "slapo tune") -> int:
    """Run the tuner; exit status 0 with a result, 1 without, 2 for wrong usage, 130 interrupted."""
    given = _parser(prog).parse_args(arguments)
    try:
        with _ended_by_signals():
            return _tune(given)
    except (TuneError, MissingPackageError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; the same command continues from here", file=sys.stderr)
        return 130


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Find the values that make a script train fastest. A trial is a process that "
        "gets them as JSON in SLAPO_TRIAL, and in its arguments instead of {name}. The same "
        "command resumes an interrupted search.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="a Python file with space(choose)")
    add("--db", default="trials.db", metavar="FILE", help="database of trials (%(default)s)")
    add("--trials", type=int, metavar="N", help="total points to run (a tenth, from 10 to 200)")
    add(
        "--timeout", type=float, default=1800.0, metavar="S", help="seconds per trial (%(default)s)"
    )
    add("--seed", type=int, default=0, help="sampler seed (%(default)s)")
    add("--metric", default="throughput", help="figure to maximize (%(default)s)")
    add("--retry", action="store_true", help="rerun trials that crashed, hung or gave no result")
    add(
        "--error-stop",
        choices=("none", "symbol", "all"),
        default="none",
        help="after a failed trial: continue; skip points that differ only by a larger value; stop",
    )
    add("script", nargs="?", help="the script of a trial: a .py or .sh file, or a program")
    add("script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _tune(given: argparse.Namespace) -> int:
    import_optuna()
    config = load_config(given.config, given)
    words = [] if given.script is None else [given.script, *given.script_args]
    if config.command is not None and words:
        raise TuneError(
            f"{given.config} has command(point), but the command line has a script, "
            f"{given.script}; leave one of them out"
        )
    result = search.tune(
        config.space,
        Launcher(config.command or words, bare=config.is_published),
        db=given.db,
        predict=config.predict,
        constraint=config.constraint,
        watcher=Progress(),
        trials=given.trials,
        timeout=given.timeout,
        seed=given.seed,
        metric=given.metric,
        error_stop=given.error_stop,
        grows=config.grows,
        retry=given.retry,
    )
    print(summary(result))
    image = f"{given.db}.png"
    try:
        save_plot(result, image)
        print(f"\nthe search as a plot: {image}")
    except (ImportError, OSError) as error:
        print(f"\nno plot: {error}", file=sys.stderr)
    return 0 if result.best is not None else 1


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the search and its trial as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    # An ignored signal stays ignored: under nohup a search outlives its terminal.
    both = (signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Callable(ModuleType):
    """Module that can be called as the function :func:`slapo.autotune.tune`.

    Importing it replaces the package's attribute of the same name, the function.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return search.tune(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main(prog="python -m slapo.autotune.tune"))
