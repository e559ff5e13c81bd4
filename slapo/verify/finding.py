"""Findings of all checks, and the common form of their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from slapo.errors import VerificationError
from slapo.history import Record, applied_at, contains, listed, spelled
from slapo.pipeline.pipelined import unstaged
from slapo.schedule import Schedule
from slapo.sharding.numbers import sizes_kept
from slapo.wrapper import innermost

E = TypeVar("E", bound=VerificationError)

#: A primitive, its positional and its keyword arguments.
PrimitiveCall = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Remedy:
    """Primitives for one node in order, to print and to try."""

    path: str
    steps: tuple[PrimitiveCall, ...]

    def __str__(self) -> str:
        return spelled(self.path) + "".join(map(_written, self.steps))

    def apply(self, sch: Schedule) -> None:
        """Apply the primitives."""
        node: Any = sch[self.path] if self.path else sch
        for name, args, kwargs in self.steps:
            node = getattr(node, name)(*args, **kwargs)


def _written(step: PrimitiveCall) -> str:
    name, args, kwargs = step
    shown = [*map(_quoted, args), *(f"{key}={_quoted(value)}" for key, value in kwargs.items())]
    return f".{name}({', '.join(shown)})"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def add_sync(path: str, mode: str, op: str, **kwargs: Any) -> Remedy:
    """Remedy that adds a collective."""
    return Remedy(path, (("sync", (mode, op), kwargs),))


def module_at(sch: Schedule, path: str) -> nn.Module | None:
    """The module at a path of the model, which stages do not change."""
    named = sch.mod.named_modules(remove_duplicate=False)
    return next((innermost(m) for name, m in named if unstaged(sch.mod, name) == path), None)


def kept_sizes(sch: Schedule, path: str, records: Sequence[Record]) -> str:
    """A line for an error message on global sizes in a module with shards."""
    module = module_at(sch, path)
    return sizes_kept(module, _full(sch, path), records, sch.world_size) if module else ""


def _full(sch: Schedule, path: str) -> str:
    """Path from the root of the model, for a path relative to `sch`."""
    return ".".join(filter(None, (sch.path, path)))


@dataclass(frozen=True)
class Finding:
    """A fault of a schedule."""

    #: the fault, with the module and the values
    said: str
    #: the module where it shows
    path: str = ""
    #: the module that most likely contains the fault, if different
    suspect: str = ""
    #: the missing call
    remedy: Remedy | None = None
    #: alternative fix, in words
    advice: str = ""
    #: a line for the end of the message
    further: str = ""

    def error(self, kind: type[E], what: str, sch: Schedule, records: Sequence[Record]) -> E:
        """Error of class `kind` that lists the primitives applied at the location.

        `what` names the check that found it; paths are relative to `sch`.
        """
        add = "" if self.remedy is None else f"add {self.remedy}"
        fix = ", or ".join(filter(None, (add, self.advice)))
        applied = "no primitive was applied"
        if records:
            paths = [_full(sch, path) for path in (self.path, self.suspect)]
            there = applied_at(records, [*filter(None, paths)]) or records
            # The suspect's primitives first, since a long list is cut.
            there = sorted(
                there, key=lambda record: not contains(paths[1] or paths[0], record.path)
            )
            applied = listed(there)
        message = "; ".join(filter(None, (f"{what}: {self.said}", fix, applied)))
        return kind(message + self.further, self.path, self.suspect, self.remedy)
