"""Which runtimes there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Dialect(Protocol):
    """What a runtime of kind ``"runtime"`` offers."""

    def lower(self, sch: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The engine and its optimizer for a checked and materialised schedule."""


C = TypeVar("C", bound=type)

_DIALECTS: dict[tuple[str, str], type[Any]] = {}


def register_framework_dialect(target: str, kind: str = "runtime") -> Callable[[C], C]:
    """Class decorator that adds a plug-in for the runtime `target`.

    Parameters
    ----------
    target
        Name that users give to :func:`slapo.build`.
    kind
        What the plug-in does; ``"runtime"`` lowers a schedule to an engine.

    Raises
    ------
    ValueError
        If there is one of that kind already.

    Examples
    --------
    >>> @register_framework_dialect("mine")
    ... class Mine:
    ...     def lower(self, sch, **kwargs):
    ...         return sch.mod, None
    >>> get_dialect_cls("runtime", "mine") is Mine
    True
    """

    def register(cls: C) -> C:
        if (kind, target) in _DIALECTS:
            taken = _DIALECTS[kind, target].__name__
            raise ValueError(f"{kind} {target!r} is taken by {taken}; choose another name")
        _DIALECTS[kind, target] = cls
        return cls

    return register


def get_dialect_cls(kind: str, target: str) -> type[Any]:
    """The plug-in of a kind for a runtime.

    Raises
    ------
    ValueError
        Naming the runtimes there are.
    """
    found = _DIALECTS.get((kind, target))
    if found is None:
        known = sorted(t for k, t in _DIALECTS if k == kind)
        raise ValueError(
            f"no {kind} is registered for target {target!r}; known are {known}, and target=None "
            "builds the plain module"
        )
    return found
