"""Messages of the placement check: location, placements, and the call to add."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from slapo.errors import PlacementError
from slapo.history import Record, contains, numberless, spelled
from slapo.schedule import Schedule
from slapo.sharding.state import layout_of, sharding_of
from slapo.sharding.steps import REDUCE_SCATTER
from slapo.utils.raised import running_in
from slapo.verify.finding import Finding, PrimitiveCall, Remedy, add_sync, kept_sizes, module_at
from slapo.verify.placement.place import Fault, Origin, Place, Stop
from slapo.verify.placement.sizes import Operation
from slapo.wrapper import innermost


def wrong_operation(sch: Schedule, stop: Stop) -> PlacementError:
    """Error for an operation that computes something else than in one process."""
    # All inputs that are not replicated, and the first that are.
    parts = [each for each in stop.given if not each[1].is_whole]
    wholes = [each for each in stop.given if each[1].is_whole and len(each[0])]
    shown = ", ".join(f"{s} {p}" for s, p in parts + wholes[: max(1, 3 - len(parts))])
    if stop.operation == "output":
        said = f"the output, or the loss, is {shown.partition(') ')[2]}"
    else:
        why = f": {stop}" if str(stop) else ""
        said = f"{_where(sch, stop.path, stop.in_backward)}: {stop.operation} of {shown}{why}"
    further = "" if stop.fits else kept_sizes(sch, stop.path, sch.history)
    finding = replace(_judged(sch, stop), said=said, path=stop.path, further=further)
    return _error(sch, finding, stop.is_certain and stop.fits, [place for _, place in parts])


def wrong_gradient(sch: Schedule, name: str, wanted: Place, found: Place) -> PlacementError:
    """Error for a gradient with another placement than its parameter."""
    path, _, leaf = name.rpartition(".")
    said = f"{name!r} is {wanted}, and its gradient is {found}"
    if not (wanted.is_whole and found.is_partial):
        return _error(sch, Finding(said, path))
    # Partial since before it came back to the parameter's module: the sharded region behind does
    # not sum the gradient of its input. Otherwise the parameter itself is used on this rank's part,
    # as a norm between sharded layers is, and its own gradient must be summed.
    origin = found.origin
    sent_back = origin is not None and origin.in_backward and not contains(path, origin.path)
    if origin is not None and sent_back and not _is_split_around(sch, path):
        said += ": missing reduction in the backward pass"
        return _error(sch, replace(_sum_of_gradients(sch, origin.path), said=said, path=path))
    said += ": each rank sees only part of the tokens or heads"
    remedy = Remedy(path, (("annotate", (leaf, "partial_grad", True), {}),))
    return _error(sch, Finding(said, path, remedy=remedy))


def wrong_sizes(sch: Schedule, found: Operation | None, wanted: Operation | None) -> PlacementError:
    """Error for an operation that differs from that of one process."""
    path, *others = [each.path for each in (found, wanted) if each is not None]
    # The runs may have reached different modules by then; their common parent has taken the branch.
    while not all(contains(path, other) for other in others):
        path = path.rpartition(".")[0]
    said = (
        f"{_where(sch, path, False)}: {_shown(found, wanted, path)} over all ranks, and "
        f"{_shown(wanted, found, path)} in one process"
    )
    advice = (
        "a size or a branch there depends on a full-model number or on a local size: set the "
        f"number to this rank's share, {spelled(path)}.set(name, whole=...), or write the size "
        "as -1"
    )
    return _error(sch, Finding(said, path, advice=advice))


def unrunnable(sch: Schedule, error: Exception, before: Iterable[Place]) -> PlacementError:
    """Error for a model that fails on its own, after an operation with these results."""
    path = running_in(error, sch.mod) or ""
    said = f"{_where(sch, path, False)} fails with {type(error).__name__}: {error}"
    finding = Finding(said, path, further=kept_sizes(sch, path, sch.history))
    return _error(sch, finding, False, before)


def _error(
    sch: Schedule, finding: Finding, is_certain: bool = True, places: Iterable[Place] = ()
) -> PlacementError:
    error = finding.error(PlacementError, "check", sch, sch.history)
    origins = (place.origin for place in places if not place.is_whole)
    error.is_certain = is_certain
    error.origins = tuple({origin.path: None for origin in origins if origin is not None})
    return error


# --- judgment: the module most likely at fault, and the fix ---------------------------------------
def _judged(sch: Schedule, stop: Stop) -> Finding:
    step = stop.step
    partial = _latest(p.origin for _, p in stop.given if p.is_partial)
    if stop.fault is Fault.GROUP:
        return _advised(stop.path, "pass group=sch.group to the collective")
    if stop.fault in (Fault.SAME_DRAWS, Fault.OWN_DRAWS, Fault.DRAWS_FOR_PARTIAL):
        return _about_random(sch, stop)
    # A partial sum at a step that does not take one lacks its own reduction, wherever it was made.
    if partial is not None and not (step and step.takes == "partial"):
        return _about_partial(sch, stop, partial)
    return _about_slice(sch, stop) if step is None else _advised(stop.path, _about_step(stop))


def _advised(suspect: str, advice: str = "", remedy: Remedy | None = None) -> Finding:
    return Finding("", "", suspect, remedy, advice)


def _latest(origins: Iterable[Origin | None]) -> Origin | None:
    return max(
        (b for b in origins if b is not None), key=lambda origin: origin.number, default=None
    )


def _about_random(sch: Schedule, stop: Stop) -> Finding:
    origin = _latest(p.blank_of or p.origin for _, p in stop.given)
    if stop.fault is Fault.DRAWS_FOR_PARTIAL and origin is not None:
        return _about_partial(sch, stop, origin)
    if stop.fault is Fault.SAME_DRAWS:
        return _advised(stop.path, remedy=Remedy(stop.path, (("fork_rng", (), {}),)))
    unfork = f"remove fork_rng around {stop.path!r}"
    # With sequence parallelism, tokens (dimension 1, behind the batch) are sharded between the
    # regions.
    if _spreads_tokens(sch) and origin is not None and origin.operation == "all_reduce":
        instead = add_sync(origin.path, "fwd_post", "reduce_scatter", axis=1)
        return _advised(origin.path, f"write {instead} instead of its all_reduce, or {unfork}")
    return _advised(stop.path, f"{unfork}, or apply it only to modules that draw for shards")


def _about_step(stop: Stop) -> str:
    (_, place), step = stop.given[0], stop.step
    if step == REDUCE_SCATTER and stop.in_backward and place.is_whole:
        return (
            "every rank has the full gradient of the gathered tensor: pass "
            "tensor_parallel_output_grad=False to that all_gather"
        )
    if step is not None and place.is_whole and step.takes == "partial":
        what = "the sum of its gradient" if stop.in_backward else step.name
        return f"leave {what} out there: it would count once per rank"
    return ""


def _about_partial(sch: Schedule, stop: Stop, origin: Origin) -> Finding:
    path = origin.path
    if origin.in_backward:
        return _sum_of_gradients(sch, path)
    if path == stop.path and not stop.in_backward:
        known = "slapo.op.LinearWithSyncFunc adds its bias after the sum"
        return _advised(path, f"add replicated tensors after the sum, not before it: {known}")
    # Advise what the same module of other layers does.
    like = numberless(path)
    if any(numberless(r.path) == like and _names(r, "reduce_scatter") for r in sch.history):
        return _advised(path, remedy=add_sync(path, "fwd_post", "reduce_scatter", axis=1))
    return _advised(path, remedy=add_sync(path, "fwd_post", "all_reduce"))


def _sum_of_gradients(sch: Schedule, path: str) -> Finding:
    """Advise a gradient sum at the module that takes replicated inputs of a sharded region."""
    entry = _entry(sch, path)
    sums = [record for record in sch.history if _names(record, "bwd_post")]
    if any(record.path == entry for record in sums):
        advice = (
            f"{add_sync(entry, 'bwd_post', 'all_reduce')} sums the gradients of only some of its "
            "inputs, or of tensors derived from them: name all whole inputs in its argument=, or "
            "add sync('fwd_post', 'all_reduce_grad') to the module that creates them"
        )
        return _advised(entry, advice)
    like = [r for r in sums if numberless(r.path) == numberless(entry) and "argument" in r.given]
    named = {"argument": like[0].given["argument"]} if like else {}
    return _advised(entry, remedy=add_sync(entry, "bwd_post", "all_reduce", **named))


def _spreads_tokens(sch: Schedule) -> bool:
    return any(_names(record, "reduce_scatter") for record in sch.history)


def _names(record: Record, text: str) -> bool:
    return repr(text) in record.arguments.values()


def _is_split_around(sch: Schedule, path: str) -> bool:
    """Return True if an enclosing module takes replicated inputs into a sharded region."""
    return any(
        contains(r.path, path)
        and r.path != path
        and (_names(r, "bwd_post") or _names(r, "fwd_pre"))
        for r in sch.history
    )


def _entry(sch: Schedule, path: str) -> str:
    """The module with the replicated input: where other layers sum gradients, or itself."""
    sums = {numberless(r.path) for r in sch.history if _names(r, "bwd_post")}
    parts = path.split(".")
    around = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    known = next((above for above in around if numberless(above) in sums), None)
    return known or _shared_by_columns(sch, path) or path


def _shared_by_columns(sch: Schedule, path: str) -> str | None:
    """The parent, if several of its layers are column-sharded and none is replicated."""
    above = path.rpartition(".")[0]
    module = module_at(sch, above) if above else None
    children = [] if module is None else map(innermost, module.children())
    matrices = [
        m for m in children if any(p.dim() > 1 for p in m._parameters.values() if p is not None)
    ]
    outputs = [layout_of(matrix).output for matrix in matrices]
    columns = [output for output in outputs if output is not None and output.kind == "shard"]
    return above if len(columns) > 1 and None not in outputs else None


def _about_slice(sch: Schedule, stop: Stop) -> Finding:
    slices = [p for _, p in stop.given if p.is_slice]
    origin = _latest(p.origin for p in slices)
    packed = next((p for p in slices if p.blocks and p.origin and p.origin.path), None)
    if packed is not None and packed.origin is not None and stop.fault is Fault.BLOCKS:
        advice = (
            f"{spelled(packed.origin.path)} is sharded in {len(packed.blocks)} blocks: leave "
            "blocks= out if nothing is packed there, or shard the tensors that it meets the "
            "same way"
        )
        return _advised(packed.origin.path, advice)
    if stop.fault is Fault.PACKED and origin is not None and origin.path:
        return _advised(origin.path)
    module = module_at(sch, stop.path)
    # A layer without shards gets slices: either it was forgotten, or a gather in front of it.
    is_row = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    if origin and is_row and module and sharding_of(module) is None and not stop.in_backward:
        axis = 1 if isinstance(module, nn.Linear) else 0
        shard: PrimitiveCall = ("shard", ("weight",), {"axis": axis})
        split = Remedy(stop.path, (shard, ("sync", ("fwd_post", "all_reduce"), {})))
        gather = add_sync(origin.path, "fwd_post", "all_gather", axis=-1)
        return _advised(stop.path, str(gather), split)
    whole = _latest(p.origin for _, p in stop.given if p.is_whole)
    if slices and whole is not None and whole.operation == "all_reduce" and _spreads_tokens(sch):
        instead = add_sync(whole.path, "fwd_post", "reduce_scatter", axis=1)
        return _advised(whole.path, f"write {instead} instead of its all_reduce")
    return _advised(stop.path)


# --- wording -------------------------------------------------------------------------------------
def _where(sch: Schedule, path: str, in_backward: bool) -> str:
    module = module_at(sch, path)
    kind = "" if module is None else f" ({type(module).__name__})"
    place = f"{path!r}{kind}" if path else "the model"
    return f"in the backward pass of {place}" if in_backward else place


def _shown(operation: Operation | None, other: Operation | None, path: str) -> str:
    if operation is None:
        return "nothing more runs"
    part, _ = (other and operation.difference(other)) or (operation.parts[-1], None)
    name, numbers, *shapes = part
    within = "" if operation.path == path else f" of {operation.path!r}"
    given = (("works on", numbers), ("gives", shapes))
    said = [f"{verb} {' and '.join(map(str, values))}" for verb, values in given if values]
    return f"{operation.name or name}{within} {' and '.join(said)}"
