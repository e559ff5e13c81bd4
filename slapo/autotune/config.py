"""Configuration files: a space as Python."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slapo.autotune.space import SpaceFunction, TuneError
from slapo.autotune.symbols import space_of_symbols
from slapo.errors import with_nearest

_OWN, _PUBLISHED = ("space",), ("get_bs_range", "update_space")
_MORE = ("predict", "constraint", "command")


@dataclass(frozen=True)
class Config:
    """What a configuration file says.

    Attributes
    ----------
    space, predict, constraint, command
        As :func:`slapo.autotune.tune` takes them.
    grows
        Names whose larger values need more memory; None if the file does not say.
    is_published
        Whether it has the form of the published package.
    """

    space: SpaceFunction
    predict: Callable[[dict[str, Any]], Any] | None
    constraint: Callable[[Any], Any] | None
    command: Callable[[dict[str, Any]], Sequence[str]] | None
    grows: Collection[str] | None
    is_published: bool


def load_config(path: str | Path, args: Any = None) -> Config:
    """Read a configuration file.

    It has a function ``space(choose)``, or those of the published package: ``get_bs_range(args)``
    and ``update_space(args, space)``. It may have ``predict``, ``constraint`` and ``command``.

    Parameters
    ----------
    path
        A Python file.
    args
        What the functions of the published package get.

    Raises
    ------
    TuneError
        If it is not there, fails, or has neither form.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "batches.py"
    >>> _ = path.write_text("def get_bs_range(args): return 4, 8, 2")
    >>> load_config(path).is_published
    True
    """
    module = _import(Path(path))
    functions = {name: _function(module, name, path) for name in (*_OWN, *_PUBLISHED, *_MORE)}
    own = functions["space"]
    published = any(functions[name] for name in _PUBLISHED)
    if (own is None) != published:
        known = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        what = "has both space(choose) and" if own else "has neither space(choose) nor"
        rest = "functions there are " + (", ".join(known[:8]) or "none") + "; write one of the two"
        near = [name for name in known if name in (*_OWN, *_PUBLISHED)]
        hint = rest if near else _nearest(known, rest)
        raise TuneError(f"{path} {what} get_bs_range(args) or update_space(args, space): {hint}")
    space = own or space_of_symbols(args, functions["get_bs_range"], functions["update_space"])
    grows = getattr(module, "grows", ("batch_size",) if published else None)
    if grows is not None and (
        isinstance(grows, str) or not all(isinstance(name, str) for name in grows)
    ):
        raise TuneError(f"{path}: grows is {grows!r}; write a list of names")
    return Config(
        space,
        functions["predict"],
        functions["constraint"],
        functions["command"],
        grows,
        published,
    )


def _nearest(known: Sequence[str], rest: str) -> str:
    for wanted in (*_OWN, *_PUBLISHED):
        hint = with_nearest(wanted, known, rest)
        if hint != rest:
            return f"{wanted} is missing; {hint}"
    return rest


def _function(module: ModuleType, name: str, path: str | Path) -> Any:
    found = getattr(module, name, None)
    if found is not None and not callable(found):
        raise TuneError(f"{path}: {name} is {found!r}; make it a function")
    return found


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise TuneError(f"there is no configuration file {path}; name a Python file by --config")
    name = f"slapo_tune_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TuneError(f"the configuration {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        # As for a script: what lies beside it can be imported.
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line = _line(error, path)
        raise TuneError(f"{path}{line} failed: {type(error).__name__}: {error}; mend it") from error
    return module


def _line(error: BaseException, path: Path) -> str:
    """Where in the file it failed."""
    number, trace = None, error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).resolve() == path.resolve():
            number = trace.tb_lineno
        trace = trace.tb_next
    return "" if number is None else f", line {number},"
