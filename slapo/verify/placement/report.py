"""What to tell of a finding: where, what of what, and the call that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from slapo.errors import PlacementError, SlapoError
from slapo.history import Record, applied_at, contains, listed, numberless, spelled
from slapo.schedule import Schedule
from slapo.sharding.numbers import sizes_kept
from slapo.sharding.state import sharding_of
from slapo.sharding.steps import REDUCE_SCATTER
from slapo.utils.raised import running_in
from slapo.verify.placement import remedy
from slapo.verify.placement.finding import OURS, Finding
from slapo.verify.placement.place import Origin, Place
from slapo.verify.placement.remedy import Remedy
from slapo.verify.placement.sizes import Operation
from slapo.wrapper import innermost


def explain(sch: Schedule, finding: Finding) -> PlacementError:
    """The error for an operation that misfits."""
    advice = _judge(sch, finding)
    shown = ", ".join(f"{shape} {place}" for shape, place in _telling(finding))
    why = f": {finding.why}" if finding.why else ""
    if finding.operation == "output":
        said = f"the output, or the loss, is {shown.partition(') ')[2]}"
    else:
        said = (
            f"{_where(sch, finding.path, finding.in_backward)}: {finding.operation} of {shown}{why}"
        )
    further = "" if finding.fits else _numbers(sch, finding.path)
    error = _error(sch, said, finding.path, advice, further)
    error.is_certain = finding.is_certain and finding.fits
    return error


def explain_gradient(sch: Schedule, name: str, wanted: Place, found: Place) -> PlacementError:
    """The error for a gradient that lies otherwise than its parameter."""
    path, _, leaf = name.rpartition(".")
    said = f"{name!r} is {wanted}, and its gradient is {found}"
    if not (wanted.is_whole and found.is_partial):
        return _error(sch, said, path, Advice(path))
    birth = found.birth
    sent_back = birth is not None and birth.in_backward and not contains(path, birth.path)
    if birth is not None and sent_back and not _is_split_around(sch, path):
        advice = _sum_of_gradients(sch, birth.path)
        return _error(sch, f"{said}: nobody has summed what that sends back", path, advice)
    said += ": each rank sees a part of the tokens, or of the heads"
    return _error(sch, said, path, Advice(path, remedy.annotate(path, leaf)))


def explain_difference(
    sch: Schedule, found: Operation | None, wanted: Operation | None
) -> PlacementError:
    """The error for an operation that is not that of one process."""
    path, *others = [each.path for each in (found, wanted) if each is not None]
    while not all(contains(path, other) for other in others):
        path = path.rpartition(".")[0]
    said = (
        f"{_where(sch, path, False)}: {_shown(found, wanted, path)} over all ranks, and "
        f"{_shown(wanted, found, path)} in one process{_changed(sch, path)}"
    )
    words = (
        "a size or a branch there depends on a number of the whole model or on the size of a "
        f"slice: set the number to this rank's share, {spelled(path)}.set(name, whole=...), or "
        "write the size as -1"
    )
    return _error(sch, said, path, Advice(path, words=words))


def unrunnable(sch: Schedule, error: Exception) -> SlapoError:
    """The error for a model that fails by itself."""
    path = running_in(error, sch.mod) or ""
    said = f"{_where(sch, path, False)} fails with {type(error).__name__}: {error}"
    found = _error(sch, said, path, Advice(path), _numbers(sch, path))
    found.is_certain = False
    return found


def _numbers(sch: Schedule, path: str) -> str:
    """Numbers of a module that holds shards, as far as they may be the cause."""
    module = _module(sch, path)
    full = ".".join(filter(None, (sch.path, path)))
    return "" if module is None else sizes_kept(module, full, sch.history, sch.world_size)


# --- judgement -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Advice:
    """The module where the fault most likely is, the call that mends it, or else what to do."""

    suspect: str
    remedy: Remedy | None = None
    words: str = ""

    def __str__(self) -> str:
        added = "" if self.remedy is None else f"add {self.remedy}"
        return ", or ".join(filter(None, (added, self.words)))


def _judge(sch: Schedule, finding: Finding) -> Advice:
    partial = _latest(p.birth for _, p in finding.given if p.is_partial)
    if OURS in finding.why:
        return Advice(finding.path, words="pass group=sch.group to the collective")
    if "random numbers" in finding.why:
        return _about_random(sch, finding)
    if partial is not None and not (finding.step and finding.step.takes == "partial"):
        return _about_partial(sch, finding, partial)
    if finding.step is not None:
        return _about_step(finding)
    return _about_slice(sch, finding)


def _latest(births: Iterable[Origin | None]) -> Origin | None:
    return max((b for b in births if b is not None), key=lambda birth: birth.number, default=None)


def _about_random(sch: Schedule, finding: Finding) -> Advice:
    birth = _latest(p.blank_of or p.birth for _, p in finding.given)
    if "partial sum" in finding.why and birth is not None:
        return _about_partial(sch, finding, birth)
    if "all ranks share" in finding.why:
        return Advice(finding.path, remedy.fork_rng(finding.path))
    unfork = f"leave fork_rng out around {finding.path!r}"
    if _spreads_tokens(sch) and birth is not None and birth.operation == "all_reduce":
        instead = remedy.sync(birth.path, "fwd_post", "reduce_scatter", axis=1)
        return Advice(birth.path, words=f"write {instead} in place of its all_reduce, or {unfork}")
    return Advice(finding.path, words=f"{unfork}, or fork what draws for slices alone")


def _about_step(finding: Finding) -> Advice:
    (_, place), step = finding.given[0], finding.step
    words = ""
    if step == REDUCE_SCATTER and finding.in_backward and place.is_whole:
        words = (
            "every rank has the whole gradient of what was gathered: pass "
            "tensor_parallel_output_grad=False to that all_gather"
        )
    elif step is not None and place.is_whole and step.takes == "partial":
        what = "the sum of its gradient" if finding.in_backward else step.name
        words = f"leave {what} out there: it would count once per rank"
    return Advice(finding.path, words=words)


def _about_partial(sch: Schedule, finding: Finding, birth: Origin) -> Advice:
    path = birth.path
    if birth.in_backward:
        return _sum_of_gradients(sch, path)
    if path == finding.path and not finding.in_backward:
        known = "slapo.op.LinearWithSyncFunc adds its bias behind the sum"
        return Advice(path, words=f"add what is whole behind the sum, not before it: {known}")
    if _reduces_by_tokens(sch, path):
        return Advice(path, remedy.sync(path, "fwd_post", "reduce_scatter", axis=1))
    return Advice(path, remedy.sync(path, "fwd_post", "all_reduce"))


def _sum_of_gradients(sch: Schedule, path: str) -> Advice:
    """Where a module takes what is whole, and sends back parts of its gradient."""
    entry = _entry(sch, path)
    sums = [record for record in sch.history if _names(record, "bwd_post")]
    if any(record.path == entry for record in sums):
        words = (
            f"{remedy.sync(entry, 'bwd_post', 'all_reduce')} sums the gradients of some of its "
            "inputs, or of what comes behind them: name all that are whole in its argument=, or "
            "add sync('fwd_post', 'all_reduce_grad') to the module that makes them"
        )
        return Advice(entry, words=words)
    like = [r for r in sums if numberless(r.path) == numberless(entry) and "argument" in r.given]
    named = {"argument": like[0].given["argument"]} if like else {}
    return Advice(entry, remedy.sync(entry, "bwd_post", "all_reduce", **named))


def _reduces_by_tokens(sch: Schedule, path: str) -> bool:
    """Whether its siblings in other layers do."""
    like = numberless(path)
    return any(numberless(r.path) == like and _names(r, "reduce_scatter") for r in sch.history)


def _spreads_tokens(sch: Schedule) -> bool:
    return any(_names(record, "reduce_scatter") for record in sch.history)


def _names(record: Record, text: str) -> bool:
    """Whether one of the arguments of a primitive is this text."""
    return repr(text) in record.arguments.values()


def _is_split_around(sch: Schedule, path: str) -> bool:
    """Whether a module around this one takes whole inputs into a split region."""
    return any(
        contains(r.path, path)
        and r.path != path
        and (_names(r, "bwd_post") or _names(r, "fwd_pre"))
        for r in sch.history
    )


def _entry(sch: Schedule, path: str) -> str:
    """The module whose input is whole: where its siblings in other layers sum, or itself."""
    sums = {numberless(r.path) for r in sch.history if _names(r, "bwd_post")}
    parts = path.split(".")
    around = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((above for above in around if numberless(above) in sums), path)


def _about_slice(sch: Schedule, finding: Finding) -> Advice:
    slices = [p for _, p in finding.given if p.is_slice]
    birth = _latest(p.birth for p in slices)
    packed = next((p for p in slices if p.blocks and p.birth and p.birth.path), None)
    if packed is not None and packed.birth is not None and "other blocks" in finding.why:
        words = (
            f"{spelled(packed.birth.path)} is sharded in {len(packed.blocks)} blocks: leave "
            "blocks= out if nothing is packed there, or cut what it meets alike"
        )
        return Advice(packed.birth.path, words=words)
    module = _module(sch, finding.path)
    is_row = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    if birth and is_row and module and sharding_of(module) is None and not finding.in_backward:
        split = remedy.row(finding.path, 1 if isinstance(module, nn.Linear) else 0)
        gather = remedy.sync(birth.path, "fwd_post", "all_gather", axis=-1)
        return Advice(finding.path, split, str(gather))
    whole = _latest(p.birth for _, p in finding.given if p.is_whole)
    if slices and whole is not None and whole.operation == "all_reduce" and _spreads_tokens(sch):
        instead = remedy.sync(whole.path, "fwd_post", "reduce_scatter", axis=1)
        return Advice(whole.path, words=f"write {instead} in place of its all_reduce")
    return Advice(finding.path)


# --- words ---------------------------------------------------------------------------------------
def _error(
    sch: Schedule, said: str, path: str, advice: Advice, further: str = ""
) -> PlacementError:
    does = f"; {advice}" if str(advice) else ""
    records = applied_at(sch.history, [*filter(None, (path, advice.suspect))])
    applied = f"; {listed(records)}" if records else ""
    text = f"check: {said}{does}{applied}{further}"
    return PlacementError(text, path, advice.suspect, advice.remedy)


def _telling(finding: Finding) -> list[tuple[tuple[int, ...], Place]]:
    """What is not whole, and the first that is."""
    parts = [each for each in finding.given if not each[1].is_whole]
    wholes = [each for each in finding.given if each[1].is_whole and len(each[0])]
    return parts + wholes[: max(1, 3 - len(parts))]


def _where(sch: Schedule, path: str, in_backward: bool) -> str:
    module = _module(sch, path)
    kind = "" if module is None else f" ({type(module).__name__})"
    place = f"{path!r}{kind}" if path else "the model"
    return f"in the backward pass of {place}" if in_backward else place


def _module(sch: Schedule, path: str) -> nn.Module | None:
    try:
        return innermost(sch.mod.get_submodule(path))
    except AttributeError:
        return None


def _shown(operation: Operation | None, other: Operation | None, path: str) -> str:
    if operation is None:
        return "nothing more runs"
    part, _ = (other and operation.difference(other)) or (operation.parts[-1], None)
    name, numbers, *shapes = part
    within = "" if operation.path == path else f" of {operation.path!r}"
    given = (("works on", numbers), ("gives", shapes))
    said = [f"{verb} {' and '.join(map(str, values))}" for verb, values in given if values]
    return f"{operation.name or name}{within} {' and '.join(said)}"


def _changed(sch: Schedule, path: str) -> str:
    """Numbers of a module, or of those around it, that are not those from before."""
    module = _module(sch, path)
    for ref, own in sch.state.numbers:
        if ref() is module and module is not None:
            changed = {
                n: (v, vars(module).get(n)) for n, v in own.items() if vars(module).get(n) != v
            }
            if changed:
                listed = ", ".join(f"{n} was {a} and is {b}" for n, (a, b) in changed.items())
                return f"; of its numbers, {listed}"
    return ""
