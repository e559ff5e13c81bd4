"""Search for the primitive that makes a schedule wrong, or for a missing primitive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from slapo.agreement import all_ranks_or_none, has_peers
from slapo.errors import SlapoError
from slapo.history import Record, numberless
from slapo.logger import get_logger
from slapo.schedule import Schedule, create_schedule
from slapo.verify import Verify
from slapo.verify.finding import Remedy
from slapo.verify.placement import check

logger = get_logger()

#: Number of primitives to omit one by one, nearest to the finding first.
_TRIES = 48


@dataclass(frozen=True)
class Blame:
    """The cause of a wrong schedule."""

    #: ``"surplus"``: right without `record`; ``"missing"``: right with `call` after `record`;
    #: ``"different"``: right with `call` instead of `record`; ``"since"``: wrong from `record` on,
    #: and no tested change of one module's primitives fixes it; ``"beside"``: wrong because of
    #: something other than primitives in the function, such as hooks of its own
    kind: str
    #: the primitive; None if the first one is missing
    record: Record | None
    #: the line to write
    call: str
    #: the error of the full schedule
    error: Exception

    def __str__(self) -> str:
        shown = "the beginning" if self.record is None else str(self.record)
        return {
            "surplus": f"the schedule is right without {shown}",
            "missing": f"the schedule is right with {self.call} after {shown}",
            "different": f"the schedule is right with {self.call} instead of {shown}",
            "beside": f"the schedule is wrong due to code other than primitives: {self.error}",
            "since": f"the schedule is wrong from {shown} on: {self.error}",
        }[self.kind]


def bisect(
    make_model: Callable[[], nn.Module],
    schedule_fn: Callable[[Schedule], Any],
    inputs: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Blame | None:
    """Find the primitive that makes a schedule wrong, or the place of a missing primitive.

    Schedules new models, each time with a small change. It tries the call that the check advises
    and primitives of the same module in another layer. It also omits single primitives, or applies
    only the first ones. :func:`slapo.check` judges each one on several ranks. :class:`slapo.Verify`
    judges it if these ranks are real, or in one process.

    Parameters
    ----------
    make_model
        Function that returns the model, the same each time.
    schedule_fn
        Function that applies the primitives to a schedule.
    inputs
        As `example_inputs` of :func:`slapo.check`.
    loss_fn
        Function from the output to a scalar to differentiate.
    group
        As for :func:`slapo.create_schedule`. All ranks must call this function.

    Returns
    -------
    Blame or None
        None if nothing is wrong.

    Raises
    ------
    SlapoError
        If the checks reject the model before it is scheduled.
    Exception
        An error raised by a primitive of the schedule; it names the primitive.

    Examples
    --------
    >>> import torch
    >>> def make():
    ...     return nn.Sequential(nn.Linear(4, 4), nn.GELU())
    >>> def schedule(sch):
    ...     sch["0"].decompose()
    ...     sch["1"].replace(nn.ReLU())
    >>> blame = bisect(make, schedule, torch.ones(2, 4))
    >>> blame.kind, blame.record.path
    ('surplus', '1')
    """
    return _Search(make_model, schedule_fn, inputs, loss_fn, group).blame()


@dataclass(frozen=True)
class _Applied:
    """One call of a primitive with its arguments."""

    record: Record
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def at(self, path: str) -> Remedy:
        """The same call for another node."""
        return Remedy(path, ((self.record.primitive, self.args, self.kwargs),))


@dataclass(frozen=True)
class _Edit:
    """A change of a schedule that might fix it."""

    #: the module whose primitives change, or the common parent of several
    path: str = ""
    #: primitives by their index in the schedule
    left_out: Sequence[int] = ()
    added: tuple[Remedy, ...] = ()


def _first(count: int) -> _Edit:
    return _Edit(left_out=range(count, sys.maxsize))


class _OfPrimitive(Exception):
    """An error raised by a primitive, or by the function that applies the primitives."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class _Search:
    make: Callable[[], nn.Module]
    schedule: Callable[[Schedule], Any]
    inputs: Any
    loss_fn: Callable[[Any], Tensor] | None
    group: dist.ProcessGroup | None
    #: state of the last judged schedule: module paths before it, its primitives, and their error
    modules: set[str] = field(default_factory=set)
    applied: list[_Applied] = field(default_factory=list)
    raised: Exception | None = None

    def blame(self) -> Blame | None:
        """Return the first explanation that holds."""
        # From the most specific explanation to the least. An explanation counts only if the
        # schedule is right with it, so the order decides which of several fixes is reported.
        error, applied = self.judge(_Edit()), self.applied
        if self.raised is not None:
            raise self.raised
        if error is None:
            return None
        # All primitives are left out here, but the user's function still runs: hooks that it
        # registers itself stay, and only a model that fails without the function is the model's own
        # fault.
        if self.judge(_first(0)) is not None:
            self.schedule = lambda sch: None
            alone = self.judge(_Edit())
            if alone is not None:
                raise SlapoError(f"bisect: the model fails before it is scheduled: {alone}")
            return Blame("beside", None, "", error)
        for edit in self._explanations(applied, error):
            if self.judge(edit) is None:
                call = "; ".join(map(str, edit.added))
                if not edit.left_out:
                    last = _last_at(applied, edit.path or edit.added[0].path)
                    return Blame("missing", last, call, error)
                kind = "different" if edit.added else "surplus"
                return Blame(kind, applied[edit.left_out[0]].record, call, error)
        return Blame("since", applied[self._last_good(applied)].record, "", error)

    def judge(self, edit: _Edit) -> Exception | None:
        """Error of the schedule after a change; None if it is right."""
        self.raised, self.applied = None, []
        sch = create_schedule(self.make(), group=self.group)
        self.modules = {path for path, _ in sch.mod.named_modules()}
        verifies = sch.world_size == 1 or has_peers(sch.group)
        try:
            # A fake group has no other ranks to compare values with; there only placements are
            # judged.
            with Verify(sch, self.inputs, enable=verifies, loss_fn=self.loss_fn):
                self._apply(sch, edit)
                if sch.world_size > 1:  # Verify does so too, and also compares values
                    check(sch, self.inputs, self.loss_fn)
        except _OfPrimitive as error:
            self.raised = error.error
            return error.error
        except SlapoError as error:
            return error
        return None

    def _apply(self, sch: Schedule, edit: _Edit) -> None:
        """Apply the changed schedule; an error on one rank is raised on all ranks."""

        def admits(record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            self.applied.append(_Applied(record, args, kwargs))
            return len(self.applied) - 1 not in edit.left_out

        def scheduled() -> None:
            sch.state.admits = admits
            self.schedule(sch)
            # Remedies are not steps of the user's function: they are neither counted in `applied`,
            # whose indices the edits use, nor left out.
            sch.state.admits = None
            for remedy in edit.added:
                remedy.apply(sch)

        try:
            all_ranks_or_none("bisect", scheduled, sch.group)
        except Exception as error:
            raise _OfPrimitive(error) from error

    def _explanations(self, applied: Sequence[_Applied], error: Exception) -> Iterator[_Edit]:
        remedy = getattr(error, "remedy", None)
        if isinstance(remedy, Remedy):
            yield _Edit(remedy.path, added=(remedy,))
            like = numberless(remedy.path)
            paths = sorted(path for path in self.modules if numberless(path) == like)
            # A user who forgets a call in a loop has forgotten it in every layer.
            if len(paths) > 1:
                yield _Edit(added=tuple(replace(remedy, path=path) for path in paths))
        near = _nearness(error)
        yield from sorted(
            _against_siblings(applied, self.modules), key=lambda edit: near(edit.path)
        )
        for number, each in enumerate(applied):
            other = _other_gradient(each)
            # Only modules that share at least the first part of their path with the error's
            # location: a gather elsewhere may have the wrong flag too, but would not explain this
            # error.
            if other is not None and near(each.record.path) <= near(""):
                yield _Edit(other.path, (number,), (other,))
        # Last, because leaving out one primitive may also hide the fault of another. Each try costs
        # a whole check.
        by_nearness = sorted(range(len(applied)), key=lambda i: near(applied[i].record.path))
        for number in by_nearness[:_TRIES]:
            yield _Edit(applied[number].record.path, (number,))

    def _last_good(self, applied: Sequence[_Applied]) -> int:
        """Number of primitives after which the schedule is never right again."""
        # Between a shard and its sync every schedule is wrong, so single primitives do not tell
        # right from wrong. Bisect over the boundaries between layers (or modules outside layers),
        # where a schedule can be right, then walk back inside the one unit that is left.
        good, bad = 0, len(applied)
        units = [_layer(each.record.path) or each.record.path for each in applied]
        bounds = [n for n in range(1, bad) if units[n - 1] != units[n]]
        while inside := [bound for bound in bounds if good < bound < bad]:
            middle = inside[len(inside) // 2]
            if self.judge(_first(middle)) is None:
                good = middle
            else:
                bad = middle
        lengths = range(bad - 1, good, -1)
        return next((length for length in lengths if self.judge(_first(length)) is None), good)


def _against_siblings(applied: Sequence[_Applied], modules: set[str]) -> list[_Edit]:
    """Edits from differences between the same modules of different layers."""
    by_path: dict[str, list[int]] = {}
    for number, each in enumerate(applied):
        by_path.setdefault(each.record.path, []).append(number)
    found: list[_Edit] = []
    # Layers of a model are scheduled alike as a rule. A difference between `h.3.mlp` and `h.4.mlp`
    # is thus a likely fault, in either direction: an extra call, a missing one, or another
    # argument.
    likes, layers = set(map(numberless, by_path)), set(map(_layer, by_path))
    # Modules without primitives whose counterparts in another layer have some.
    absent = [
        path
        for path in sorted(modules - by_path.keys())
        if numberless(path) in likes and _layer(path) in layers
    ]
    for path in [*by_path, *absent]:
        for sibling in by_path:
            if sibling != path and numberless(sibling) == numberless(path):
                found += _differences(applied, path, by_path.get(path, []), by_path[sibling])
    single = list({repr(edit): edit for edit in found}.values())
    return [*single, *_together(single)]


def _differences(
    applied: Sequence[_Applied], path: str, mine: list[int], theirs: list[int]
) -> Iterator[_Edit]:
    own = [_text(applied[number]) for number in mine]
    others = [_text(applied[number]) for number in theirs]
    extra = [number for number, text in zip(mine, own, strict=True) if text not in others]
    lacking = [number for number, text in zip(theirs, others, strict=True) if text not in own]
    for number in extra:
        yield _Edit(path, (number,))
    for number in lacking:
        remedy = applied[number].at(path)
        yield _Edit(path, (), (remedy,))
        for i in extra:
            if applied[i].record.primitive == applied[number].record.primitive:
                yield _Edit(path, (i,), (remedy,))
    if len(lacking) > 1:
        steps = [step for number in lacking for step in applied[number].at(path).steps]
        yield _Edit(path, tuple(extra), (Remedy(path, tuple(steps)),))


def _together(found: Sequence[_Edit]) -> Iterator[_Edit]:
    """Combined differences of all modules of one block, and of one layer."""
    by_block: dict[str, list[_Edit]] = {}
    for each in found:
        for block in dict.fromkeys((each.path.rpartition(".")[0], _layer(each.path))):
            if block:
                by_block.setdefault(block, []).append(each)
    for block, parts in by_block.items():
        single = [
            part
            for part in parts
            if len(part.left_out) + sum(len(remedy.steps) for remedy in part.added) == 1
        ]
        added = {str(remedy): remedy for part in single for remedy in part.added}
        left_out = {number for part in single for number in part.left_out}
        if single:
            yield _Edit(block, tuple(sorted(left_out)), tuple(added.values()))


def _other_gradient(applied: _Applied) -> Remedy | None:
    record, kwargs = applied.record, dict(applied.kwargs)
    if record.primitive != "sync" or "'all_gather'" not in record.arguments.values():
        return None
    kwargs["tensor_parallel_output_grad"] = not kwargs.get("tensor_parallel_output_grad", True)
    return Remedy(record.path, (("sync", applied.args, kwargs),))


def _text(applied: _Applied) -> str:
    record = applied.record
    return f"{record.primitive} {dict(record.arguments)} {record.identity}"


def _nearness(error: Exception) -> Callable[[str], tuple[int, int]]:
    """Sort key for the distance of a path from the location of an error."""
    places = [getattr(error, name, "") for name in ("suspect", "path")]

    def near(path: str) -> tuple[int, int]:
        both = [zip(path.split("."), place.split("."), strict=False) for place in places if place]
        shared = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in both]
        return -max(shared, default=0), len(path)

    return near


def _last_at(applied: Sequence[_Applied], path: str) -> Record | None:
    """The last primitive of a module, or else of its nearest parent."""
    while True:
        inside = f"{path}."
        for each in reversed(applied):
            if each.record.path == path or (path and each.record.path.startswith(inside)):
                return each.record
        if not path:
            return applied[-1].record if applied else None
        path = path.rpartition(".")[0]


def _layer(path: str) -> str:
    """The path up to its first numeric part."""
    parts = path.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if index is None else ".".join(parts[: index + 1])
