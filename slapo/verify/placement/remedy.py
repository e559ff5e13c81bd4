"""Calls that mend a schedule, as data: to be read, and to be tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slapo.history import spelled
from slapo.schedule import Schedule

#: Primitive, positional and keyword arguments.
Step = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Remedy:
    """Primitives to apply to one node, one after the other."""

    path: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return spelled(self.path) + "".join(map(_written, self.steps))

    def apply(self, sch: Schedule) -> None:
        """Apply them."""
        node: Any = sch[self.path] if self.path else sch
        for name, args, kwargs in self.steps:
            node = getattr(node, name)(*args, **kwargs)


def _written(step: Step) -> str:
    name, args, kwargs = step
    shown = [*map(_quoted, args), *(f"{key}={_quoted(value)}" for key, value in kwargs.items())]
    return f".{name}({', '.join(shown)})"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def sync(path: str, mode: str, op: str, **kwargs: Any) -> Remedy:
    """A collective to add."""
    return Remedy(path, (("sync", (mode, op), kwargs),))


def annotate(path: str, leaf: str) -> Remedy:
    """A gradient to sum."""
    return Remedy(path, (("annotate", (leaf, "partial_grad", True), {}),))


def fork_rng(path: str) -> Remedy:
    """A random state to draw from."""
    return Remedy(path, (("fork_rng", (), {}),))


def row(path: str, axis: int) -> Remedy:
    """A layer to split along its inputs."""
    shard: Step = ("shard", ("weight",), {"axis": axis})
    return Remedy(path, (shard, ("sync", ("fwd_post", "all_reduce"), {})))
