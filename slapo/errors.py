"""Exceptions of this library; wrong arguments are ``ValueError``, ``KeyError`` or ``TypeError``."""

import difflib
from collections.abc import Iterable


class SlapoError(RuntimeError):
    """A schedule that cannot be carried out in the present state of model or machine."""


class TraceError(SlapoError):
    """A module that cannot be turned into a graph; the message says why and what to pass."""


class VerificationError(SlapoError):
    """A schedule that changed what the model computes, found by :class:`slapo.Verify`.

    Attributes
    ----------
    path : str
        The module in which it shows; empty for the whole model.
    suspect : str
        The module where the fault most likely is; often the same.
    remedy
        The missing call, whose text is the line to write; None where it is not known.
    """

    def __init__(
        self, message: str, path: str = "", suspect: str = "", remedy: object = None
    ) -> None:
        super().__init__(message)
        self.path, self.suspect, self.remedy = path, suspect or path, remedy


class PlacementError(VerificationError):
    """A schedule that would train something else than the model, found by :func:`slapo.check`.

    Attributes
    ----------
    is_certain : bool
        False where no rule covers an operation, or the model does not run.
    """

    is_certain = True


class MissingPackageError(SlapoError, ImportError):
    """An optional package that a feature needs is not installed."""


def with_nearest(name: str, known: Iterable[str], rest: str) -> str:
    """`rest` of a message about an unknown name, after the nearest known one if one is near.

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
    """Refuse values that cannot count things, such as 0, 1.5 or True."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; pass a whole number from 1 on")
