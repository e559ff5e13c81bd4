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
    """Create a schedule of `model` and apply the primitives of a record to it, in order.

    On the recorded model the schedule is the same, with the same ``digest()``. The group may have
    another size: records of ``shard`` and ``sync`` hold for any size. If a step fails, the model is
    left as it was.

    Parameters
    ----------
    model
        Any module; it is not copied.
    record
        A :class:`ScheduleRecord`, or the path of a file written by ``sch.record.save``.
    group
        The tensor-parallel group, as for :func:`create_schedule`.
    allow
        Packages, such as ``["mypackage"]``, from which a record file may import functions and
        classes, in addition to torch, slapo and transformers.

    Returns
    -------
    Schedule
        The root node. Its records keep the line numbers of the recorded program.

    Raises
    ------
    SlapoError
        If an argument cannot be rebuilt or imported, a file names something that is not allowed, a
        number would be wrong for another group size, or a graph differs from the recorded one.
    KeyError
        If the model lacks a path; the message has the nearest ones.
    ValueError
        If `record` is not a record, has an unknown version, or a primitive that is not registered.

    Warns
    -----
    UserWarning
        If a function or a module of the recorded name is a different one now.

    Notes
    -----
    A record file is data: it names classes of modules and functions of tensors in torch, slapo and
    transformers, and anything in the packages of `allow`. All names are checked before anything is
    imported from another package or called.

    Tensors and modules that a step removes, such as a replaced module or the rest of a sharded
    weight, are kept until the last step is done. So a failure can restore them. For a model on
    ``meta`` this costs no memory.

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
    # A record of this process may hold arguments as text only, which cannot be applied again.
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
            f"replay: {others[0]}{more}: the module or function of that name differs from the "
            "recorded one, or Python or torch has changed; check that it still does the same, "
            "and save the record again"
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
            "its module before replay; "
            + with_nearest(record.primitive, known, f"known are {known}")
        )
    return found


def _searches(record: ScheduleRecord) -> dict[int, list[tuple[str, Found]]]:
    """Step -> the searches that ran before it for a later step, each with the path of its node."""
    found: dict[int, list[tuple[str, Found]]] = {}
    for step, each, _, part in _parts(record):
        if isinstance(part, Found) and part.ago > 0:
            # Repeated at the step where it ran: steps between may have changed what it finds.
            found.setdefault(max(step - part.ago, 0), []).append((each.path, part))
    return found


def _search(sch: Schedule, path: str, part: Found, step: int) -> None:
    path = _below(sch, path)
    if path in sch or not path:
        part.search(sch[path], step)


def _below(sch: Schedule, path: str) -> str:
    return path[len(sch.path) :].lstrip(".") if sch.path else path


def _parts(record: ScheduleRecord) -> Iterator[tuple[int, Record, str, Part]]:
    """Yield all stand-ins in the arguments of a record, each with its step, record and argument."""
    for step, each in enumerate(record):
        for name, value in each.given.items():
            yield from ((step, each, name, p) for p in walk(value) if isinstance(p, Part))


def _check_imports(record: ScheduleRecord, allow: Collection[str]) -> None:
    """Import every allowed name before anything is changed."""
    for check in (check_package, check_value):  # all names are checked before the first import
        for step, each, name, part in _parts(record):
            named = part.cls if isinstance(part, ModuleSpec) else part
            if isinstance(named, Named):
                try:
                    check(named, allow)
                except SlapoError as error:
                    raise SlapoError(f"replay: step {step}, {each}: {name}: {error}") from error


#: Primitives whose integer arguments may depend on the number of ranks.
_PER_RANK = frozenset({"set", "replace", "replace_all"})
#: Arguments that do not depend on the number of ranks.
_FOR_ALL = frozenset({"axis", "dilation", "dim", "end_dim", "kernel_size", "start_dim", "stride"})


def _check_numbers(record: ScheduleRecord, world_size: int) -> None:
    """Refuse integers that may depend on the rank count, if the record has another world size."""
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
            else "record select(path).replace(make) or replace_all(cls, make) with a function "
            "that computes them"
        )
        raise SlapoError(
            f"replay: step {step}, {each}: the record was made at world_size "
            f"{record.world_size}, and {numbers} may differ at world_size {world_size}; "
            f"{remedy}, or replay on the recorded number of ranks"
        )


def _numbers(value: Any) -> Iterator[int]:
    """Yield the integers among a primitive's arguments that may be sizes or counts."""
    # Not bool, and no index from the end: -1 holds for any number of ranks.
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
    """Apply one record; False if an argument differs from the recorded one of the same name."""
    try:
        node = sch[_below(sch, record.path)]
        values = {name: revive(value, node) for name, value in record.given.items()}
        args, kwargs = _call(primitive, values, record.positional)
        identity = identify((*args, *kwargs.values()))
        made = dataclasses.replace(record, identity=identity)
        # trace() returns False instead of raising.
        if perform(node, primitive, args, kwargs, made) is False:
            raise SlapoError(f"{record.call()} failed, see the warning; fix its cause")
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        message = str(error.args[0]) if error.args else ""
        where = f"{what} (recorded at {record.location})"
        error.args = (f"{where}: {message}; the model is unchanged", *error.args[1:])
        raise
    # Modules made by a function for their place may differ in size at this world size.
    made_here = any(isinstance(value, MadeBy) for value in record.given.values())
    return made_here or identity == record.identity


def _call(
    primitive: type[Primitive], values: dict[str, Any], positional: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of the recorded call."""
    parameters = inspect.signature(primitive.apply).parameters
    rest = next((p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    names = list(values)
    if rest is not None and rest in values:
        before = names[: names.index(rest)]
        args = [values[name] for name in before] + list(values[rest])
        return tuple(args), {n: v for n, v in values.items() if n not in (*before, rest)}
    return tuple(values[n] for n in names[:positional]), {n: values[n] for n in names[positional:]}
