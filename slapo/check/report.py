"""What to tell of a finding: where, what of what, and the call that mends it."""

from __future__ import annotations

from torch import nn

from slapo.check.mode import Finding, Sized
from slapo.check.place import Birth, Place
from slapo.errors import PlacementError, SlapoError
from slapo.history import spelled
from slapo.schedule import Schedule
from slapo.sharding.state import sharding_of
from slapo.utils.raised import running_in
from slapo.wrapper import innermost


def explain(sch: Schedule, finding: Finding) -> PlacementError:
    """The error for an operation that misfits."""
    suspect, remedy = _judge(sch, finding)
    shown = ", ".join(f"{shape} {place}" for shape, place in _telling(finding))
    why = f": {finding.why}" if finding.why else ""
    if finding.operation == "output":
        said = f"the output, or the loss, is {shown.partition(') ')[2]}"
    else:
        said = (
            f"{_where(sch, finding.path, finding.in_backward)}: {finding.operation} of {shown}{why}"
        )
    return _error(sch, said, finding.path, suspect, remedy)


def explain_gradient(sch: Schedule, name: str, wanted: Place, found: Place) -> PlacementError:
    """The error for a gradient that lies otherwise than its parameter."""
    path, _, leaf = name.rpartition(".")
    suspect, remedy = path, ""
    if wanted.is_whole and found.is_partial:
        remedy = f'{spelled(path)}.annotate("{leaf}", "partial_grad", True)'
    said = f"{name!r} is {wanted}, and its gradient is {found}"
    if remedy:
        said += ": each rank sees a part of the tokens, or of the heads"
    return _error(sch, said, path, suspect, remedy)


def explain_sizes(sch: Schedule, found: list[Sized], wanted: list[Sized]) -> PlacementError | None:
    """The first module that runs the same operations on other sizes than in one process."""
    mine, theirs = _by_path(found), _by_path(wanted)
    for path, before in theirs.items():
        now = mine.get(path, [])
        if [each.name for each in now] != [each.name for each in before] or now == before:
            continue
        new, old = next(pair for pair in zip(now, before, strict=True) if pair[0] != pair[1])
        said = (
            f"{_where(sch, path, False)}: {new.name} works on {_sizes(new)} over all ranks, and on "
            f"{_sizes(old)} in one process{_changed(sch, path)}"
        )
        return _error(sch, said, path, path, "")
    return None


def unrunnable(sch: Schedule, error: Exception) -> SlapoError:
    """The error for a model that fails by itself."""
    path = running_in(error, sch.mod) or ""
    said = f"{_where(sch, path, False)} fails with {type(error).__name__}: {error}"
    hint = _changed(sch, path) or "; divide the sizes that count what is split, by set(name, value)"
    is_sharded = any(record.primitive == "shard" for record in sch.history)
    return _error(sch, said + (hint if is_sharded else ""), path, path, "")


# --- judgement -----------------------------------------------------------------------------------
def _judge(sch: Schedule, finding: Finding) -> tuple[str, str]:
    """The module where the fault most likely is, and the call that mends it."""
    if "random numbers" in finding.why:
        return finding.path, _about_random(finding)
    if finding.step is not None:
        return finding.path, _about_step(finding)
    partial = next((p.birth for _, p in finding.given if p.is_partial and p.birth), None)
    if partial is not None:
        return _about_partial(sch, finding, partial)
    return _about_slice(sch, finding)


def _about_random(finding: Finding) -> str:
    if "all ranks share" in finding.why:
        return f"{spelled(finding.path)}.fork_rng()"
    return f"leave fork_rng out around {finding.path!r}, or fork what draws for slices alone"


def _about_step(finding: Finding) -> str:
    (_, place), step = finding.given[0], finding.step
    assert step is not None, "asked for steps"
    if place.is_whole and step.takes == "partial":
        what = "the sum of its gradient" if finding.in_backward else step.name
        return f"leave {what} out there: it would count once per rank"
    if place.is_partial and step.takes == "replicate" and not finding.in_backward:
        return "sum it first, by all_reduce"
    return ""


def _about_partial(sch: Schedule, finding: Finding, birth: Birth) -> tuple[str, str]:
    if birth.in_backward:
        entry = _entry(sch, birth.path)
        return entry, f'{spelled(entry)}.sync("bwd_post", "all_reduce")'
    if birth.path == finding.path and not finding.in_backward:
        return birth.path, (
            f"add what is whole behind the sum: {spelled(birth.path)} is no layer whose bias is "
            "known; slapo.op.LinearWithSyncFunc adds its bias behind the reduction"
        )
    scatters = any("reduce_scatter" in r.arguments.values() for r in _plain(sch))
    op = '"reduce_scatter", axis=1' if scatters else '"all_reduce"'
    return birth.path, f'{spelled(birth.path)}.sync("fwd_post", {op})'


def _plain(sch: Schedule) -> list[_Texts]:
    return [
        _Texts(r.path, r.primitive, {k: v.strip("'\"") for k, v in r.arguments.items()})
        for r in sch.history
    ]


class _Texts:
    """A record with its texts unquoted."""

    def __init__(self, path: str, primitive: str, arguments: dict[str, str]) -> None:
        self.path, self.primitive, self.arguments = path, primitive, arguments


def _entry(sch: Schedule, path: str) -> str:
    """The module whose input is whole: where its siblings in other layers sum, or itself."""
    sums = [_numberless(r.path) for r in _plain(sch) if "bwd_post" in r.arguments.values()]
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        above = ".".join(parts[:count])
        if _numberless(above) in sums:
            return above
    return path


def _numberless(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _about_slice(sch: Schedule, finding: Finding) -> tuple[str, str]:
    births = [p.birth for _, p in finding.given if p.is_slice and p.birth]
    module = _module(sch, finding.path)
    own = sharding_of(module) if module is not None else None
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    if births and linear and own is None and not finding.in_backward:
        axis = 0 if type(module).__name__ == "Conv1D" else 1
        return finding.path, (
            f'{spelled(finding.path)}.shard("weight", axis={axis}).sync("fwd_post", "all_reduce"), '
            f'or {spelled(births[0].path)}.sync("fwd_post", "all_gather", axis=-1)'
        )
    return finding.path, ""


# --- words ---------------------------------------------------------------------------------------
def _error(sch: Schedule, said: str, path: str, suspect: str, remedy: str) -> PlacementError:
    does = f"; {'add ' if remedy.startswith('sch') else ''}{remedy}" if remedy else ""
    records = _applied(sch, path, suspect)
    return PlacementError(f"check: {said}{does}{records}", path, suspect, remedy)


def _applied(sch: Schedule, *paths: str) -> str:
    """Records of the modules, of what is in them, or else of what is around them."""
    history = sch.history
    below = [r for r in history if any(_contains(path, r.path) for path in paths if path)]
    above = [r for r in history if any(_contains(r.path, path) for path in paths) and r.path]
    chosen = below or above
    if not chosen:
        return ""
    lines = "\n  ".join(map(str, chosen[:8]))
    return f"; primitives applied there:\n  {lines}"


def _contains(path: str, inner: str) -> bool:
    return not path or inner == path or inner.startswith(f"{path}.")


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


def _by_path(sized: list[Sized]) -> dict[str, list[Sized]]:
    found: dict[str, list[Sized]] = {}
    for each in sized:
        found.setdefault(each.path, []).append(each)
    return found


def _sizes(each: Sized) -> str:
    return " and ".join(map(str, each.shapes))


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
