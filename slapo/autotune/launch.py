"""The command line of a trial: which program, and the values in its arguments."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slapo.autotune.prediction import source_of
from slapo.autotune.space import Refused, TuneError, configured
from slapo.autotune.values import VARIABLE
from slapo.errors import with_nearest

_PLACE = re.compile(r"\{\{([^{}]+)\}\}|\{([^{}]+)\}")
#: What is meant as a name, if it is in braces; others, as of JSON, stay unless points have them.
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


class Launcher:
    r"""Makes the command line of a point.

    Parameters
    ----------
    command
        A program and its arguments, as a list or as one line, with ``{name}`` where a value goes
        and ``{{name}}`` for braces; or a function from the values to a list. A file ``.py`` runs
        by this Python, a file ``.sh`` by ``bash``.
    bare
        Whether an argument that is a name, without braces, stands for its value, as scripts of the
        published package write it.

    Raises
    ------
    TuneError
        If there is no such program.

    Examples
    --------
    >>> launcher = Launcher(["echo", "--tp={tp}", "{{tp}}"])
    >>> launcher({"tp": 2})
    ['echo', '--tp=2', '{tp}']
    >>> launcher.line({"tp": 2})
    'SLAPO_TRIAL=\'{"tp": 2}\' echo --tp=2 \'{tp}\''
    """

    def __init__(
        self,
        command: str | Sequence[str] | Callable[[dict[str, Any]], Sequence[str]],
        bare: bool = False,
    ) -> None:
        self._bare = bare
        self._names: set[str] = set()
        self._make = command if callable(command) else None
        words = [] if callable(command) else command
        self._words = shlex.split(words) if isinstance(words, str) else [str(w) for w in words]
        if self._make is None:
            self._words = with_program(self._words)

    def __call__(self, values: Mapping[str, Any]) -> list[str]:
        """The program and its arguments for the values of a point.

        Raises
        ------
        Refused
            If the point lacks a value that the command has a place for, or a function refuses it.
        TuneError
            If the function fails, or returns no command.
        """
        if self._make is None:
            return [self._filled(word, values) for word in self._words]
        call = f"command({dict(values)})"
        with configured(call):
            made = self._make(dict(values))
        is_list = isinstance(made, list | tuple)
        if not is_list or not all(isinstance(w, str | int | float | Path) for w in made):
            raise TuneError(
                f"{call} returned {made!r}; return a list of the program and its arguments"
            )
        return with_program([str(word) for word in made])

    def line(self, values: Mapping[str, Any]) -> str:
        """What to type in a shell to run a point; empty where there is no command for it."""
        setting = f"{VARIABLE}={shlex.quote(json.dumps(dict(values)))}"
        try:
            words = self(values)
        except (Refused, TuneError):  # such as of one that was run elsewhere
            return ""
        found = shutil.which("python")
        # By its folder, too: Pythons of two environments may be links to one file.
        is_beside = found is not None and Path(found).parent == Path(sys.executable).parent
        if found is not None and is_beside and os.path.samefile(found, sys.executable):
            words = ["python" if word == sys.executable else word for word in words]
        return f"{setting} {shlex.join(words)}"

    @property
    def text(self) -> str:
        """What tells this command from others."""
        if self._make is not None:
            name, source = getattr(self._make, "__qualname__", "command"), source_of(self._make)
            return f"the function {name}" + (f" (text {source})" if source else "")
        return shlex.join("python" if word == sys.executable else word for word in self._words)

    def check(self, names: Collection[str], points: Iterable[Mapping[str, Any]] = ()) -> None:
        """Refuse a placeholder that no value belongs to, or that one of `points` has none for.

        Raises
        ------
        TuneError
            Naming the nearest name, or the point.
        """
        self._names = set(names)
        for word in self._words:
            for _, name in _PLACE.findall(word):
                if _NAME.fullmatch(name) and name not in names:
                    rest = f"points of this space have {sorted(names)}; write {{{{{name}}}}} for "
                    raise TuneError(
                        f"the argument {word!r} has the placeholder {{{name}}}: "
                        + with_nearest(name, names, rest + "braces that are no placeholder")
                    )
        try:
            for values in points:
                _ = [self._filled(word, values) for word in self._words]
        except Refused as reason:
            raise TuneError(
                f"{reason}; let the space give every point a value of it, or write a function "
                "command(point)"
            ) from None

    def _filled(self, word: str, values: Mapping[str, Any]) -> str:
        if self._bare and word in self._names | values.keys():
            return _value(word, word, values)

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            if not _NAME.fullmatch(name) and name not in self._names | values.keys():
                return found[0]
            return f"{{{name}}}" if found[1] else _value(name, word, values)

        return _PLACE.sub(value, word)


def _value(name: str, word: str, values: Mapping[str, Any]) -> str:
    if name not in values:
        raise Refused(f"the argument {word!r} has a place for {name!r}, which {dict(values)} lacks")
    return text_of(values[name])


def text_of(value: Any) -> str:
    """A value as an argument: texts as they are, lists as JSON.

    Examples
    --------
    >>> text_of(0.5), text_of("flash"), text_of([1, 2])
    ('0.5', 'flash', '[1, 2]')
    """
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def with_program(words: Sequence[str]) -> list[str]:
    """A command whose first word the system can run.

    Raises
    ------
    TuneError
        If it cannot.
    """
    if not words:
        raise TuneError("there is no script to run; name one, and its arguments, after the options")
    first, *rest = words
    if first.endswith((".py", ".sh")):
        if not Path(first).is_file():
            raise TuneError(
                f"there is no script {first!r} in {Path.cwd()}; name one that exists, before its "
                "arguments"
            )
        return [sys.executable if first.endswith(".py") else "bash", first, *rest]
    if first in ("python", "python3"):
        return [sys.executable, *rest]
    if shutil.which(first) is not None:
        return list(words)
    if os.sep in first and Path(first).is_file():
        raise TuneError(f"the program {first!r} may not be executed; run: chmod +x {first}")
    # Such as torchrun, of an environment that is not activated.
    beside = shutil.which(first, path=str(Path(sys.executable).parent))
    if beside is None:
        raise TuneError(
            f"there is no program {first!r}; name a file .py or .sh, or a program on the PATH"
        )
    return [beside, *rest]
