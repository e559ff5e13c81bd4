"""Apply the record of one schedule to another model."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Collection, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import SlapoError, with_nearest
from slapo.history import Record, identify, warn_caller
from slapo.primitives.base import Primitive, find_primitive, list_primitives
from slapo.primitives.run import perform
from slapo.record import ModuleSpec, Part, ScheduleRecord, revive, walk
from slapo.record.parts import MadeBy, Named, check_package, check_value
from slapo.record.subgraphs import Found, searches_kept
from slapo.schedule import Schedule, create_schedule
from slapo.snapshot import restored_on_error


def replay(
    model: nn.Module,
    record: ScheduleRecord | str | os.PathLike[str],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    allow: Collection[str] = (),
) -> Schedule:
    """Make a schedule of `model` and apply the primitives of a record to it, in order.

    On the model that was recorded the schedule is the same, with the same ``digest()``. The group
    may have another size: what is recorded of ``shard`` and ``sync`` holds for any. When a step
    fails, the model is left as it was.

    Parameters
    ----------
    model
        Any module; it is not copied.
    record
        The path of what ``sch.record.save`` wrote, or a :class:`ScheduleRecord`.
    group
        The tensor-parallel group, as for :func:`create_schedule`.
    allow
        Packages, such as ``["mypackage"]``, that a record from a file may import functions and
        classes from, besides torch, slapo and transformers.

    Returns
    -------
    Schedule
        The root node. The lines of its records are those of the program that was recorded.

    Raises
    ------
    SlapoError
        If an argument cannot be rebuilt or imported, a file names something that is not allowed, a
        number would be wrong for another size of the group, or a graph is not the recorded one.
    KeyError
        If the model lacks a path; the nearest are named.
    ValueError
        If it is not a record, has an unknown version, or a primitive that is not registered.

    Warns
    -----
    UserWarning
        If a function or a module is another one than was recorded, though the name is the same.

    Notes
    -----
    A record from a file is data: it names classes of modules and functions of tensors in torch,
    slapo and transformers, and whatever the packages in `allow` have. All names are checked before
    anything is imported from another package or called.

    Until the last step is done, what each took away (the rest of a sharded weight, a module that
    was replaced) is held, to be put back if one fails. Of a model on ``meta`` that is nothing.

    Examples
    --------
    >>> def mlp():
    ...     return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> sch = create_schedule(mlp())
    >>> _ = sch["1"].replace(nn.GELU())
    >>> _ = sch.select("*").checkpoint()
    >>> again = replay(mlp(), sch.record)
    >>> again.digest() == sch.digest()
    True
    """
    loaded = _loaded(record)
    loaded.check_holds()
    primitives = [_primitive(step, each) for step, each in enumerate(loaded)]
    _check_imports(loaded, [allow] if isinstance(allow, str) else allow)
    sch = create_schedule(model, path=loaded.root, group=group)
    _check_numbers(loaded, sch.world_size)
    searches = _searches(loaded)
    others = []
    with restored_on_error(sch), searches_kept():
        for step, each in enumerate(loaded):
            for path, part in searches.get(step, ()):
                _search(sch, path, part, step)
            if not _apply(sch, primitives[step], each, f"replay: step {step}"):
                others.append(f"step {step}, {each}")
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        warn_caller(
            f"replay: {others[0]}{more}: a module or function of that name is another one now, or "
            "of another version of Python or torch; see that it does what was recorded, and save "
            "the record again"
        )
    return sch


def _loaded(record: Any) -> ScheduleRecord:
    if isinstance(record, ScheduleRecord):
        return record
    if isinstance(record, (str, os.PathLike)):
        return ScheduleRecord.load(record)
    remedy = "its .record" if isinstance(record, Schedule) else "the path of a file, or sch.record"
    raise TypeError(
        f"replay: a record is data or a file, got {type(record).__name__}; pass {remedy}"
    )


def _primitive(step: int, record: Record) -> type[Primitive]:
    found = find_primitive(record.primitive)
    if found is None:
        known = list_primitives()
        raise ValueError(
            f"replay: step {step}, {record}: no primitive is called {record.primitive!r}; import "
            "what registers it before replay; "
            + with_nearest(record.primitive, known, f"known are {known}")
        )
    return found


def _searches(record: ScheduleRecord) -> dict[int, list[tuple[str, Found]]]:
    """Step -> searches that were made before it for a later step, each with the node's path."""
    found: dict[int, list[tuple[str, Found]]] = {}
    for step, each, _, part in _parts(record):
        if isinstance(part, Found) and part.ago > 0:
            found.setdefault(max(step - part.ago, 0), []).append((each.path, part))
    return found


def _search(sch: Schedule, path: str, part: Found, step: int) -> None:
    path = _below(sch, path)
    if path in sch or not path:
        part.search(sch[path], step)


def _below(sch: Schedule, path: str) -> str:
    return path[len(sch.path) :].lstrip(".") if sch.path else path


def _parts(record: ScheduleRecord) -> Iterator[tuple[int, Record, str, Part]]:
    """All stand-ins in the arguments of a record, and where they stand."""
    for step, each in enumerate(record):
        for name, value in each.given.items():
            yield from ((step, each, name, p) for p in walk(value) if isinstance(p, Part))


def _check_imports(record: ScheduleRecord, allow: Collection[str]) -> None:
    """Import all that is named and may be, before anything is changed."""
    for check in (check_package, check_value):  # nothing is imported before all may be
        for step, each, name, part in _parts(record):
            named = part.cls if isinstance(part, ModuleSpec) else part
            if isinstance(named, Named):
                try:
                    check(named, allow)
                except SlapoError as error:
                    raise SlapoError(f"replay: step {step}, {each}: {name}: {error}") from error


#: Primitives whose integers may count something that another number of ranks has less of.
_PER_RANK = frozenset({"set", "replace", "replace_all"})
#: Arguments that are the same for any number of ranks.
_FOR_ALL = frozenset({"axis", "dilation", "dim", "end_dim", "kernel_size", "start_dim", "stride"})


def _check_numbers(record: ScheduleRecord, world_size: int) -> None:
    """Refuse numbers that may be those of a rank, where there are more ranks or less."""
    if record.world_size == world_size:
        return
    for step, each in enumerate(record):
        given = {k: v for k, v in each.given.items() if (each.primitive, k) != ("set", "whole")}
        numbers = list(_numbers(given)) if each.primitive in _PER_RANK else []
        if not numbers:
            continue
        remedy = (
            f"record set({given.get('name')!r}, whole=...)"
            if each.primitive == "set"
            else "record select(path).replace(make) or replace_all(cls, make) with a function that "
            "works them out"
        )
        raise SlapoError(
            f"replay: step {step}, {each}: the record was made at world_size {record.world_size}, "
            f"and does not say what {numbers} would be at world_size {world_size}; {remedy}, or "
            "replay on as many ranks"
        )


def _numbers(value: Any) -> Iterator[int]:
    """Integers among the arguments of a primitive that may be the number of something."""
    if type(value) is int and value > 0:
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from () if name in _FOR_ALL else _numbers(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, Part) and not isinstance(value, Found):
        for item in value.inner():
            yield from _numbers(item)


def _apply(sch: Schedule, primitive: type[Primitive], record: Record, what: str) -> bool:
    """Apply one record; False where an argument is not what it was, though called the same."""
    try:
        node = sch[_below(sch, record.path)]
        values = {name: revive(value, node) for name, value in record.given.items()}
        args, kwargs = _call(primitive, values, record.positional)
        identity = identify((*args, *kwargs.values()))
        made = dataclasses.replace(record, identity=identity)
        if perform(node, primitive, args, kwargs, made) is False:
            raise SlapoError(f"{record.call()}: it could not, see the warning; fix what that names")
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        message = str(error.args[0]) if error.args else ""
        where = f"{what} (recorded at {record.location})"
        error.args = (f"{where}: {message}; the model is as it was", *error.args[1:])
        raise
    # What a function makes for its place may well have other sizes at this one.
    made_here = any(isinstance(value, MadeBy) for value in record.given.values())
    return made_here or identity == record.identity


def _call(
    primitive: type[Primitive], values: dict[str, Any], positional: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by position and by name, as the recorded call had them."""
    parameters = inspect.signature(primitive.apply).parameters
    rest = next((p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    names = list(values)
    if rest is not None and rest in values:
        before = names[: names.index(rest)]
        args = [values[name] for name in before] + list(values[rest])
        return tuple(args), {n: v for n, v in values.items() if n not in (*before, rest)}
    return tuple(values[n] for n in names[:positional]), {n: values[n] for n in names[positional:]}
