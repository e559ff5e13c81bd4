"""Record of a full schedule: save, load, compare."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any, overload

from slapo.errors import SlapoError
from slapo.history import Record, digest
from slapo.record.parts import Part, decode, encode, walk

FORMAT = "slapo.schedule"
#: Format version. Increase it whenever older programs would misread a file.
VERSION = 1
_MOST_SHOWN = 5


class ScheduleRecord(Sequence[Record]):
    """The primitives of a schedule in order, as data; a sequence of :class:`.history.Record`.

    ``sch.record`` is the current record of a schedule; :func:`slapo.replay` applies it to another
    model.

    Parameters
    ----------
    records
        Applied primitives, in order.
    world_size
        Size of the tensor-parallel group.
    root
        Path of the schedule's root, if it has one.

    Examples
    --------
    >>> import slapo, torch
    >>> sch = slapo.create_schedule(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    >>> _ = sch["0"].shard("weight", axis=0).sync("fwd_post", "all_gather", axis=-1)
    >>> record = sch.record
    >>> len(record), record[0].primitive, record[0].arguments["axis"]
    (2, 'shard', '0')
    """

    def __init__(self, records: Sequence[Record], world_size: int = 1, root: str = "") -> None:
        self.records = tuple(records)
        self.world_size = world_size
        self.root = root

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> ScheduleRecord: ...
    def __getitem__(self, index: int | slice) -> Record | ScheduleRecord:
        """Return the record of a step, counted from 0; for a slice, that part of the schedule."""
        if isinstance(index, slice):
            return ScheduleRecord(self.records[index], self.world_size, self.root)
        return self.records[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __str__(self) -> str:
        return "\n".join(f"{step}: {record}" for step, record in enumerate(self.records))

    def __repr__(self) -> str:
        return f"<ScheduleRecord of {len(self)} primitives, world_size {self.world_size}>"

    def digest(self) -> str:
        """Return the fingerprint, equal to that of the schedule; see :meth:`Schedule.digest`."""
        return digest(self.records)

    def diff(self, other: ScheduleRecord) -> str:
        """Return the differences between two records, in the form of ``diff -u0``.

        It is empty if there are none. Source lines and group sizes are not compared. Functions and
        modules of one name differ in the fingerprint behind the call.

        Examples
        --------
        >>> import slapo, torch
        >>> def record(axis):
        ...     sch = slapo.create_schedule(torch.nn.Sequential(torch.nn.Linear(4, 4)))
        ...     return sch["0"].shard("weight", axis=axis).record
        >>> print(record(0).diff(record(1)))
        @@ -1 +1 @@
        -sch["0"].shard(tensor_name='weight', axis=0)
        +sch["0"].shard(tensor_name='weight', axis=1)
        >>> record(0).diff(record(0))
        ''
        """
        if not isinstance(other, ScheduleRecord):
            raise TypeError(
                f"diff compares with another record, got {type(other).__name__}; pass sch.record, "
                "or slapo.ScheduleRecord.load(path)"
            )
        first, second = (list(map(_comparable, each.records)) for each in (self, other))
        return "\n".join([*unified_diff(first, second, n=0, lineterm="")][2:])

    # --- files -------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON. Every rank may call it, as the file is written atomically.

        Raises
        ------
        SlapoError
            If no file can hold an argument; the message names the line that passed it, and what to
            pass instead.
        """
        self.check_holds()
        # One line per step, so that a diff of two files shows steps.
        lines = ",\n".join(
            f"  {json.dumps(_encoded(record), allow_nan=False)}" for record in self.records
        )
        head = {"format": FORMAT, "version": VERSION, "world_size": self.world_size}
        head |= {"root": self.root} if self.root else {}
        text = f'{json.dumps(head)[:-1]}, "steps": [\n{lines}\n]}}\n'
        target = Path(path)
        # In the same folder, since replace() is atomic within one file system only. Ranks that save
        # to one path need different names.
        scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            scratch.write_text(text)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)

    def check_holds(self) -> None:
        """Refuse arguments that no file can hold."""
        wrong = [
            f"- step {step}, {record}: {name} is {part.text!r}, {problem}"
            for step, record in enumerate(self.records)
            for name, value in record.given.items()
            for part in walk(value)
            if isinstance(part, Part) and (problem := part.problem())
        ]
        if wrong:
            more = f"\n(and {len(wrong) - _MOST_SHOWN} more)" if len(wrong) > _MOST_SHOWN else ""
            raise SlapoError(
                "the record has arguments that cannot be rebuilt from a file:\n"
                + "\n".join(wrong[:_MOST_SHOWN])
                + more
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ScheduleRecord:
        """Read a file of :meth:`save`. Nothing is imported until :func:`slapo.replay`.

        Raises
        ------
        ValueError
            If it is no such file, or has an unsupported version.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}; {_WRITE_ANEW}") from error
        found = data.get("format") if isinstance(data, dict) else None
        if found != FORMAT:
            raise ValueError(
                f"{path} is not the record of a schedule: its format is {found!r}, not {FORMAT!r}; "
                f"{_WRITE_ANEW}"
            )
        if data.get("version") != VERSION:
            raise ValueError(
                f"{path} has version {data.get('version')!r} of the format, but this library reads "
                f"version {VERSION}; use the library that wrote it, or {_WRITE_ANEW}"
            )
        try:
            steps, world_size = data["steps"], data["world_size"]
            records = [_decoded(step, each, path) for step, each in enumerate(steps)]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: {_described(error)}; {_WRITE_ANEW}") from error
        return cls(records, world_size, data.get("root", ""))


def _comparable(record: Record) -> str:
    return record.call() + (f"  # {record.identity}" if record.identity else "")


_WRITE_ANEW = "write it again with sch.record.save(path)"


def _described(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _encoded(record: Record) -> dict[str, Any]:
    step = {
        "path": record.path,
        "primitive": record.primitive,
        "arguments": {name: encode(value) for name, value in record.given.items()},
        "positional": record.positional,
        "location": record.location,
    }
    return step | ({"identity": record.identity} if record.identity else {})


def _decoded(step: int, data: Mapping[str, Any], path: str | os.PathLike[str]) -> Record:
    try:
        given = {name: decode(value) for name, value in data["arguments"].items()}
        texts = [data[key] for key in ("path", "primitive", "location")]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"path, primitive and location are {texts}, not strings")
        name, primitive, location = texts
        positional, identity = data["positional"], data.get("identity", "")
        return Record(name, primitive, given, location, positional, identity)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: step {step}: {_described(error)}; {_WRITE_ANEW}") from error
