"""Registry of runtimes and log parsers."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

_LOG_PARSER = "slapo.framework_dialect.log_parsers:LogParser"
# Slapo's own plug-ins by name: each is imported on first use.
_DIALECTS: dict[tuple[str, str], type[Any] | str] = {
    ("log_parser", "deepspeed"): _LOG_PARSER,
    ("log_parser", "megatron"): _LOG_PARSER,
    ("log_parser", "torch"): _LOG_PARSER,
    ("runtime", "deepspeed"): "slapo.framework_dialect.deepspeed.runtime:DeepSpeedRuntime",
    ("runtime", "megatron"): "slapo.framework_dialect.megatron.runtime:MegatronRuntime",
    ("runtime", "torch"): "slapo.framework_dialect.pytorch.runtime:TorchRuntime",
}


def register_framework_dialect(target: str, kind: str = "runtime") -> Callable[[C], C]:
    """Register the decorated class as a plug-in for the runtime `target`.

    Parameters
    ----------
    target
        Name that users pass to :func:`slapo.build`.
    kind
        Kind of plug-in: ``"runtime"`` is a :class:`Runtime`, which lowers a schedule;
        ``"log_parser"`` has a ``parse_log(path_or_text)``.

    Raises
    ------
    ValueError
        If there is one of that kind already.

    Examples
    --------
    >>> from slapo.framework_dialect import Runtime
    >>> @register_framework_dialect("mine")
    ... class Mine(Runtime):
    ...     def __init__(self, sch, **options):
    ...         pass
    ...     def lower(self, lowering):
    ...         return lowering.model, None
    >>> get_dialect_cls("runtime", "mine") is Mine
    True
    """

    def register(cls: C) -> C:
        if (kind, target) in _DIALECTS:
            held = _DIALECTS[kind, target]
            # Importing an unused plug-in takes seconds, so the message has its name only.
            taken = held.rpartition(":")[2] if isinstance(held, str) else held.__name__
            raise ValueError(f"{kind} {target!r} is taken by {taken}; choose another name")
        _DIALECTS[kind, target] = cls
        return cls

    return register


def get_dialect_cls(kind: str, target: str) -> type[Any]:
    """Return the plug-in of a kind for a runtime.

    Parameters
    ----------
    kind
        ``"runtime"``, or ``"log_parser"``: see
        :class:`slapo.framework_dialect.log_parsers.LogParser`.
    target
        Name of the runtime.

    Raises
    ------
    ValueError
        If there is none; the message has the known kinds or runtimes.

    Examples
    --------
    >>> get_dialect_cls("log_parser", "deepspeed").parse_log("").error_code
    2
    """
    found = _DIALECTS.get((kind, target))
    if found is None:
        raise ValueError(_unknown(kind, target))
    if isinstance(found, str):
        found = _DIALECTS[kind, target] = resolve_name(found)
    return found


def _unknown(kind: str, target: str) -> str:
    known = sorted(t for k, t in _DIALECTS if k == kind)
    if not known:
        kinds = sorted({k for k, _ in _DIALECTS})
        return f"no kind of plug-in is called {kind!r}; known are {kinds}, as first argument"
    remedy = ", or pass target=None for the plain module" if kind == "runtime" else ""
    return f"no {kind} is registered for target {target!r}; known are {known}{remedy}"
