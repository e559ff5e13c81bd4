"""Comparisons of two runs: outputs, gradients, buffers, dropout probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from slapo.errors import SlapoError, VerificationError
from slapo.utils.outputs import constants_in, tensors_in
from slapo.verify.finding import kept_sizes
from slapo.verify.numeric.harness import (
    Outcome,
    difference,
    full_tensors,
    gathered_gradients,
    gradient_of,
    scale_of,
)
from slapo.verify.numeric.module_calls import Call, Comparison, amount, recorded
from slapo.verify.numeric.precision import is_compiled
from slapo.verify.numeric.randomness import Drop, DropoutRecorder
from slapo.verify.numeric.run import PairedRun
from slapo.verify.placement.paths import Paths
from slapo.weights.slots import slots
from slapo.wrapper import innermost

#: Gradients far below the largest are rounding errors of canceling sums. Their tolerance is
#: relative to this fraction of the largest gradient's scale.
_GRADIENT_FLOOR = 1e-2


def compare_outputs(trial: PairedRun, given: Any, wanted: Any) -> None:
    """Compare every tensor of the outputs, and the outputs' types and names."""
    sides = trial.sides
    left, right = dict(tensors_in(given)), dict(tensors_in(wanted))
    _check_comparable(wanted, right, sides.loss_fn is not None)
    worst = 0.0
    for name in left.keys() & right.keys():
        limit = trial.rtol(right[name]) * scale_of(right[name])
        error = difference(left[name], right[name])
        worst = max(worst, error if error > limit else 0.0)
    # Every rank gets here, whatever it has found: from here on each line is a collective.
    compare_kinds(trial, given, wanted)
    if not sides.any_rank(worst > 0.0):
        return
    pairs = [(left[name], right[name]) for name in left]
    shapes = [amount(0.0, 0.0, *both) for both in pairs if both[0].shape != both[1].shape]
    worst = sides.largest(worst)
    raise _wrong_output(trial, shapes[0] if shapes else f" by {worst:.3g}")


def _check_comparable(wanted: Any, tensors: dict[str, Tensor], has_loss: bool) -> None:
    if any(tensor.numel() for tensor in tensors.values()) or has_loss:
        return
    raise SlapoError(
        f"Verify: the output of the original, a {type(wanted).__name__}, holds no values to "
        "compare; pass example_inputs that are not empty, a loss_fn that computes a scalar, or "
        "verify a node below that returns tensors, in a tuple, a dict or a dataclass"
    )


def compare_kinds(trial: PairedRun, given: Any, wanted: Any) -> None:
    """Compare types, names, dtypes and constants of the outputs."""
    left, right = dict(tensors_in(given)), dict(tensors_in(wanted))
    same = type(given) is type(wanted) and left.keys() == right.keys()
    same = same and dict(constants_in(given)) == dict(constants_in(wanted))
    dtypes = [
        (name, left[name].dtype, right[name].dtype)
        for name in left
        if same and left[name].dtype != right[name].dtype
    ]
    if not trial.sides.any_rank(not same or bool(dtypes)):
        return
    if dtypes:
        name, mine, theirs = dtypes[0]
        raise _wrong_output(trial, "", f"{name} has dtype {mine}, the original's has {theirs}")
    raise trial.sides.error(
        f"the output is a {type(given).__name__} with {list(left)} and "
        f"{dict(constants_in(given))}, the original's a {type(wanted).__name__} with "
        f"{list(right)} and {dict(constants_in(wanted))}"
    )


def _wrong_output(
    trial: PairedRun, how: str, what: str = "the output differs"
) -> VerificationError:
    sides = trial.sides
    said, found = f"{what}{_in_mode(trial)}", _recorded(trial, False).output()
    if found is None:
        return sides.error(said + how)
    call, by, seen = found
    further = kept_sizes(sides.sch, call.path, sides.records())
    return sides.error(f"{said}, first at {_named(call)}{by}", seen, call.path, further)


def _in_mode(trial: PairedRun) -> str:
    return " in train mode" if trial.way.training else ""


def _named(call: Call) -> str:
    return f"{call.path!r} ({type(innermost(call.module)).__name__})"


def _recorded(trial: PairedRun, gradients: bool) -> Comparison:
    """Run both models again, and record the outputs of each module."""
    # Again, so that only a failed verification pays for copies of all modules' tensors.
    sides, runs = trial.sides, []
    for model in (sides.reference, sides.sch.mod):
        with recorded(model) as run:
            outcome = trial.run(model)
            run.ended = True
            if gradients:
                trial.backward(outcome)
        runs.append(run)
    return Comparison(trial, *runs)


# --- gradients -----------------------------------------------------------------------------------
def compare_gradients(trial: PairedRun, given: Outcome, wanted: Outcome) -> None:
    """Compare the gradients of inputs, and the gathered gradients of parameters."""
    sides = trial.sides
    expected: dict[str, Tensor] = {}
    found = sides.origins.gradients(sides.full)
    for index, (mine, theirs) in enumerate(zip(given.inputs, wanted.inputs, strict=True)):
        if theirs.grad is not None:
            expected[f"<input {index}>"] = theirs.grad
            found[f"<input {index}>"] = gradient_of(mine)
    expected |= gathered_gradients(sides.reference, sides.sch.group)
    scales = {name: scale_of(grad) for name, grad in expected.items()}
    floor = _GRADIENT_FLOOR * max(scales.values(), default=0.0)
    failures = []
    for name, grad in expected.items():
        if name not in found:
            continue
        limit = trial.rtol(grad) * max(scales[name], floor)
        error = difference(found[name], grad)
        if error > limit:
            failures.append((name, error, limit))
    failures = sides.first(failures)
    if failures:
        _raise_gradients(trial, failures)


def _raise_gradients(trial: PairedRun, failures: list[tuple[str, float, float]]) -> None:
    said = f"outputs agree{_in_mode(trial)}, but {_listed(failures)}"
    # The backward pass reaches the last tensor of the model first.
    seen = failures[-1][0].rpartition(".")[0]
    found = _recorded(trial, True).gradient()
    if found is None:
        raise trial.sides.error(said, seen)
    call, by = found
    said += f". {_named(call)} is the first to return a different gradient{by}"
    raise trial.sides.error(said, seen, call.path)


def _listed(failures: list[tuple[str, float, float]]) -> str:
    name, error, limit = failures[-1]
    by = f"by {error:.3g} where {limit:.3g} is allowed"
    if len(failures) == 1:
        return f"the gradient of {name!r} differs {by}"
    shown = ", ".join(repr(name) for name, *_ in failures[:6])
    more = f" and {len(failures) - 6} more" if failures[6:] else ""
    return f"the gradients of {shown}{more} differ, that of {name!r} {by}"


# --- side effects and random numbers -------------------------------------------------------------
def compare_buffers(trial: PairedRun) -> None:
    """Compare running statistics and other buffers after the run."""
    sides = trial.sides
    wanted = full_tensors(sides.reference, sides.sch.group)
    differing = []
    for slot in slots(sides.sch.mod):
        name = sides.origins.original_name(slot)
        if isinstance(slot.tensor, nn.Parameter) or name not in wanted:
            continue
        mine = slot.tensor
        mine = slot.spec.gather(mine, sides.sch.group) if slot.spec is not None else mine
        limit = trial.rtol(mine) * scale_of(wanted[name])
        error = difference(mine, wanted[name])
        if error > limit:
            differing.append((slot.name, error, limit))
    differing = sides.first(differing)
    if not differing:
        return
    name, error, limit = differing[0]
    raise sides.error(
        f"outputs agree{_in_mode(trial)}, but the buffer {name!r} differs by {error:.3g} after the "
        f"run where {limit:.3g} is allowed",
        name.rpartition(".")[0],
    )


def compare_finite(trial: PairedRun, given: Any, wanted: Any) -> None:
    """Raise if the model's own dtype, where values are not compared, gives additional NaN."""
    left, right = dict(tensors_in(given)), dict(tensors_in(wanted))
    lost = [
        name
        for name in left.keys() & right.keys()
        if left[name].is_floating_point()
        and bool(left[name].isnan().any())
        and not bool(right[name].isnan().any())
    ]
    if trial.sides.any_rank(bool(lost)):
        raise _wrong_output(trial, f": {sorted(lost)} has NaN where the original has none")


def compare_drops(trial: PairedRun, given: DropoutRecorder, wanted: DropoutRecorder) -> None:
    """Compare dropout probabilities in call order, and the random states that they use."""
    sides = trial.sides
    mine, theirs = ([drop.p for drop in side.drops] for side in (given, wanted))
    if is_compiled(sides.sch.mod):  # draws in compiled code are not recorded
        wrong = bool(Counter(mine) - Counter(theirs))
    else:
        wrong = mine != theirs
    wrong, differ = sides.any_rank(wrong), sides.any_rank(mine != theirs)
    is_split = sides.sch.world_size > 1 and not differ
    if wrong or (is_split and sides.any_rank(_are_apart(given.drops, wanted.drops))):
        _raise_drops(trial, wrong)


def _are_apart(mine: Sequence[Drop], theirs: Sequence[Drop]) -> bool:
    """Return True if ranks drop other elements of a replicated tensor, and so diverge."""
    return any(m.forked and m.shape == t.shape for m, t in zip(mine, theirs, strict=False))


def _raise_drops(trial: PairedRun, by_value: bool) -> None:
    """Raise for other probabilities, or else for other random states."""
    sides = trial.sides
    theirs, mine = (_drops_by_module(trial, m) for m in (sides.reference, sides.sch.mod))
    if by_value:
        wrong = [p for p in {**mine, **theirs} if _values(mine, p) != _values(theirs, p)]
    else:
        wrong = [p for p in mine if _are_apart(mine[p], theirs.get(p, []))]
    path = (sides.first(wrong) or [""])[0]
    if by_value:
        mine_there, theirs_there = (", ".join(_values(drops, path)) for drops in (mine, theirs))
        raise sides.error(
            f"in train mode {path!r} drops with p={mine_there or 0}, the original with "
            f"p={theirs_there or 0}",
            path,
        )
    raise sides.error(
        f"in train mode {path!r} draws different random numbers on each rank, under fork_rng(), "
        "for a replicated tensor, which would diverge",
        path,
        advice="remove that fork_rng(), or put it on the part that holds shards",
    )


def _values(drops: Mapping[str, list[Drop]], path: str) -> list[str]:
    return [str(drop.p) for drop in drops.get(path, [])]


def _drops_by_module(trial: PairedRun, model: nn.Module) -> dict[str, list[Drop]]:
    paths = Paths(model)
    quiet = DropoutRecorder(lambda: paths.now()[0])
    with paths.followed():
        trial.run(model, quiet)
    found: dict[str, list[Drop]] = {}
    for drop in quiet.drops:
        found.setdefault(drop.where, []).append(drop)
    return found
