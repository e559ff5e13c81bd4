"""Which runtimes there are."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

# Those of Slapo by name: they are imported when somebody builds for them.
_DIALECTS: dict[tuple[str, str], type[Any] | str] = {
    ("runtime", "deepspeed"): "slapo.framework_dialect.deepspeed.runtime:DeepSpeedRuntime",
    ("runtime", "megatron"): "slapo.framework_dialect.megatron.runtime:MegatronRuntime",
    ("runtime", "torch"): "slapo.framework_dialect.pytorch.runtime:TorchRuntime",
}


def register_framework_dialect(target: str, kind: str = "runtime") -> Callable[[C], C]:
    """Class decorator that adds a plug-in for the runtime `target`.

    Parameters
    ----------
    target
        Name that users give to :func:`slapo.build`.
    kind
        What the plug-in does; ``"runtime"`` is a :class:`Runtime`, which lowers a schedule.

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
            # Of one that was not asked for yet, the name alone: importing it takes seconds.
            taken = held.rpartition(":")[2] if isinstance(held, str) else held.__name__
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
    if isinstance(found, str):
        found = _DIALECTS[kind, target] = resolve_name(found)
    return found
