"""Findings of all checks, and the one form of their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from slapo.errors import VerificationError
from slapo.history import Record, applied_at, contains, listed, spelled
from slapo.schedule import Schedule
from slapo.sharding.numbers import sizes_kept

E = TypeVar("E", bound=VerificationError)

#: A primitive, its positional and its keyword arguments.
Step = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Remedy:
    """Primitives to apply to one node, one after the other: to be read, and to be tried."""

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


def add_sync(path: str, mode: str, op: str, **kwargs: Any) -> Remedy:
    """A collective to add."""
    return Remedy(path, (("sync", (mode, op), kwargs),))


def kept_sizes(sch: Schedule, module: nn.Module, path: str, records: Sequence[Record]) -> str:
    """A line on whole sizes that a module with shards keeps, for the end of a message."""
    return sizes_kept(module, _full(sch, path), records, sch.world_size)


def _full(sch: Schedule, path: str) -> str:
    """The path from the root of the model, of a module by its path from `sch`."""
    return ".".join(filter(None, (sch.path, path)))


@dataclass(frozen=True)
class Finding:
    """A fault of a schedule."""

    #: what is wrong, with the module and the values
    said: str
    #: the module in which it shows
    path: str = ""
    #: the module where the fault most likely is, if it is another one
    suspect: str = ""
    #: the missing call
    remedy: Remedy | None = None
    #: what to do instead, in words
    advice: str = ""
    #: a line for the end of the message
    further: str = ""

    def error(self, kind: type[E], what: str, sch: Schedule, records: Sequence[Record]) -> E:
        """The error of `kind`, with the primitives that were applied there.

        `what` has found it; paths are relative to `sch`.
        """
        add = "" if self.remedy is None else f"add {self.remedy}"
        fix = ", or ".join(filter(None, (add, self.advice)))
        applied = "no primitive was applied"
        if records:
            paths = [_full(sch, path) for path in (self.path, self.suspect)]
            there = applied_at(records, [*filter(None, paths)]) or records
            # Of many, those of the suspect first.
            there = sorted(
                there, key=lambda record: not contains(paths[1] or paths[0], record.path)
            )
            applied = listed(there)
        message = "; ".join(filter(None, (f"{what}: {self.said}", fix, applied)))
        return kind(message + self.further, self.path, self.suspect, self.remedy)
