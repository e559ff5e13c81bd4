"""Exceptions of Slapo. Wrong arguments raise ``ValueError``, ``KeyError`` or ``TypeError``."""

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class SlapoError(RuntimeError):
    """Raised if a schedule cannot be carried out in the present state of the model or machine."""


class TraceError(SlapoError):
    """Raised if a module cannot be traced; the message has the reason and the arguments to pass."""


class VerificationError(SlapoError):
    """Raised by :class:`slapo.Verify` if a schedule changed what the model computes.

    Attributes
    ----------
    path : str
        The module in which the difference shows; empty for the whole model.
    suspect : str
        The module where the fault most likely is; often the same as `path`.
    remedy
        The missing call, whose text is the line to write; None if unknown.
    """

    def __init__(
        self, message: str, path: str = "", suspect: str = "", remedy: object = None
    ) -> None:
        super().__init__(message)
        self.path, self.suspect, self.remedy = path, suspect or path, remedy


class PlacementError(VerificationError):
    """Raised by :func:`slapo.check` if a schedule would train something other than the model.

    Attributes
    ----------
    is_certain : bool
        False if no rule covers an operation, or the model does not run.
    origins : tuple of str
        Paths of the modules that the shards and partial sums of the refused operation come from.
    """

    is_certain = True
    origins: tuple[str, ...] = ()


class MissingPackageError(SlapoError, ImportError):
    """Raised if an optional package that a feature needs is not installed."""


def import_package(name: str, what: str, extra: str) -> Any:
    """Import an optional package, or raise an error that names the extra to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"{what} needs the package {name}; install it with: pip install 'slapo[{extra}]'"
        ) from error


def with_nearest(name: str, known: Iterable[str], rest: str) -> str:
    """Prefix `rest`, the end of a message on an unknown name, with the nearest known name.

    Examples
    --------
    >>> with_nearest("shrad", ["shard", "sync"], "its primitives are")
    "did you mean 'shard'? Its primitives are"
    >>> with_nearest("fold", ["shard", "sync"], "its primitives are")
    'its primitives are'
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? {rest[:1].upper()}{rest[1:]}" if near else rest


def require_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is an integer of at least 1; bools are refused."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; pass a positive integer")
