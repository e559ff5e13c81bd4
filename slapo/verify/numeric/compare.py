"""What two runs of a trial gave: outputs, gradients, buffers, probabilities of dropouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from slapo.errors import SlapoError, VerificationError
from slapo.history import spelled
from slapo.sharding.numbers import sizes_kept
from slapo.utils.outputs import constants_in, tensors_in
from slapo.verify.numeric.blame import Blame, Guess
from slapo.verify.numeric.harness import (
    Outcome,
    full_tensors,
    gathered_gradients,
    gradient_of,
)
from slapo.verify.numeric.module_calls import Comparison, amount, hookable, recorded
from slapo.verify.numeric.precision import is_compiled
from slapo.verify.numeric.randomness import Drop, DropoutRecorder
from slapo.verify.numeric.run import PairedRun
from slapo.verify.numeric.tensors import difference, scale_of
from slapo.weights.slots import slots

#: Gradients far below the largest are rounding of sums that cancel: they are compared on this
#: fraction of the largest one's scale.
_GRADIENT_FLOOR = 1e-2


def compare_outputs(trial: PairedRun, given: Any, wanted: Any) -> None:
    """Every tensor of the outputs, their kinds and names."""
    sides = trial.sides
    left, right = dict(tensors_in(given)), dict(tensors_in(wanted))
    _check_comparable(wanted, right, sides.loss_fn is not None)
    worst = 0.0
    for name in left.keys() & right.keys():
        limit = trial.rtol(right[name]) * scale_of(right[name])
        error = difference(left[name], right[name])
        worst = max(worst, error if error > limit else 0.0)
    compare_kinds(trial, given, wanted)
    if not sides.any_rank(worst > 0.0):
        return
    pairs = [(left[name], right[name]) for name in left]
    shapes = [amount(0.0, 0.0, *both) for both in pairs if both[0].shape != both[1].shape]
    _raise_output(trial, sides.largest(worst), shapes)


def _check_comparable(wanted: Any, tensors: dict[str, Tensor], has_loss: bool) -> None:
    if any(tensor.numel() for tensor in tensors.values()) or has_loss:
        return
    raise SlapoError(
        f"Verify: the output of the original, a {type(wanted).__name__}, holds no number "
        "that could be compared; pass example_inputs that are not empty, a loss_fn that "
        "makes one of the output, or verify a node below that returns tensors, in a tuple, "
        "a dict or a dataclass"
    )


def compare_kinds(trial: PairedRun, given: Any, wanted: Any) -> None:
    """Types, names, dtypes, numbers and texts of the outputs."""
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
        guess = _guess_output(trial)
        where = f", most likely for {guess.path!r}{guess.why}" if guess else ""
        raise VerificationError(
            f"Verify: {name} is of {mine}, the original's of {theirs}{where}; "
            f"{trial.sides.applied(guess.path if guess else '')}"
        )
    raise VerificationError(
        f"Verify: the output is a {type(given).__name__} with {list(left)} and "
        f"{dict(constants_in(given))}, the original's a {type(wanted).__name__} with "
        f"{list(right)} and {dict(constants_in(wanted))}"
    )


def _raise_output(trial: PairedRun, worst: float, shapes: Sequence[str]) -> None:
    sides, mode = trial.sides, _in_mode(trial)
    guess = _guess_output(trial)
    if guess is None:
        how = shapes[0] if shapes else f" by {worst:.3g}"
        raise VerificationError(f"Verify: the output differs{mode}{how}; {sides.applied('')}")
    said = f", first at {guess}" if guess.seen is None else f". {guess}"
    raise VerificationError(
        f"Verify: the output differs{mode}{said}{_sizes(trial, guess)}; "
        f"{sides.applied(guess.path, guess.seen)}"
    )


def _in_mode(trial: PairedRun) -> str:
    return " in train mode" if trial.way.training else ""


def _sizes(trial: PairedRun, guess: Guess) -> str:
    """Numbers that count the whole, in a module that holds shards."""
    sides = trial.sides
    full = ".".join(filter(None, (sides.sch.path, guess.path)))
    return sizes_kept(guess.module, full, sides.records(), sides.sch.world_size)


def _guess_output(trial: PairedRun) -> Guess | None:
    return _blame(trial, gradients=False).output()


def _blame(trial: PairedRun, gradients: bool) -> Blame:
    """Run both models again, and note what each module gives."""
    sides, runs = trial.sides, []
    for model in (sides.reference, sides.sch.mod):
        with recorded(model) as run:
            outcome = trial.run(model)
            run.ended = True
            if gradients:
                trial.backward(outcome)
        runs.append(run)
    comparison = Comparison(sides.sch.group, trial.rtol, sides.any_rank, sides.largest)
    return Blame(runs[0], runs[1], comparison, sides.sch.path)


# --- gradients -----------------------------------------------------------------------------------
def compare_gradients(trial: PairedRun, given: Outcome, wanted: Outcome) -> None:
    """Gradients of parameters, whole, and of inputs."""
    sides = trial.sides
    expected: dict[str, Tensor] = {}
    found = sides.origins.gradients()
    for index, (mine, theirs) in enumerate(zip(given.inputs, wanted.inputs, strict=True)):
        if theirs.grad is not None:
            expected[f"<input {index}>"] = theirs.grad
            found[f"<input {index}>"] = gradient_of(mine)
    expected |= gathered_gradients(sides.reference, sides.sch.group)
    floor = _GRADIENT_FLOOR * max((scale_of(g) for g in expected.values()), default=0.0)
    failures = []
    for name, grad in expected.items():
        if name not in found:
            continue
        limit = trial.rtol(grad) * max(scale_of(grad), floor)
        error = difference(found[name], grad)
        if error > limit:
            failures.append((name, error, limit))
    failures = sides.first(failures)
    if failures:
        _raise_gradients(trial, failures, expected)


def _raise_gradients(
    trial: PairedRun, failures: list[tuple[str, float, float]], expected: dict[str, Tensor]
) -> None:
    sides = trial.sides
    partial = _partial_wholes(trial, [name for name, *_ in failures], expected)
    names = [name for name, *_ in failures]
    blame = _blame(trial, gradients=True)
    owners = {name.rpartition(".")[0] for name in names}
    # In one order on all ranks: each look is a collective.
    alone = len(partial) == len(names) and all(map(blame.gets_it_right, sorted(owners)))
    guess = None if alone else blame.gradient()
    start = f"Verify: outputs agree{_in_mode(trial)}, but {_listed(failures)}"
    if guess is not None:
        raise VerificationError(f"{start}. Most likely {guess}; {sides.applied(guess.path)}")
    name = (partial or names)[-1]  # the last in the model is the first in the backward
    path, _, leaf = name.rpartition(".")
    node = spelled(".".join(filter(None, (sides.sch.path, path))))
    remedy = (
        f". Most likely {path!r}: each rank has a part of the gradient of {name!r}, of its tokens "
        f'or its heads: add {node}.annotate("{leaf}", "partial_grad", True)'
        if partial
        else f". Most likely {path!r}"
    )
    raise VerificationError(f"{start}{remedy}; {sides.applied(path)}")


def _listed(failures: list[tuple[str, float, float]]) -> str:
    """Whose gradients differ, and by how much."""
    name, error, limit = failures[-1]
    by = f"by {error:.3g} where {limit:.3g} is allowed"
    if len(failures) == 1:
        return f"the gradient of {name!r} differs {by}"
    shown = ", ".join(repr(name) for name, *_ in failures[:6])
    more = f" and {len(failures) - 6} more" if failures[6:] else ""
    return f"the gradients of {shown}{more} differ, that of {name!r} {by}"


def _partial_wholes(
    trial: PairedRun, names: Sequence[str], expected: dict[str, Tensor]
) -> list[str]:
    """Whole parameters of which the ranks' gradients add up to the original's."""
    sides = trial.sides
    if sides.sch.group is None or sides.sch.world_size == 1:
        return []
    whole = {p.name: p.tensor for p in slots(sides.sch.mod) if p.spec is None}
    found = []
    for name in names:
        grad = gradient_of(whole[name]).clone() if name in whole else None
        if grad is not None and grad.shape == expected[name].shape:
            dist.all_reduce(grad, group=sides.sch.group)
            scale = max(scale_of(expected[name]), 1e-30)
            if difference(grad, expected[name]) <= max(trial.rtol(grad), 1e-6) * scale:
                found.append(name)
    return found


# --- what is left behind, and what is drawn ------------------------------------------------------
def compare_buffers(trial: PairedRun) -> None:
    """Running statistics and the like after the run."""
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
    raise VerificationError(
        f"Verify: outputs agree{_in_mode(trial)}, but the buffer {name!r} differs by {error:.3g} "
        f"after the run where {limit:.3g} is allowed; {sides.applied(name.rpartition('.')[0])}"
    )


def compare_finite(trial: PairedRun, given: Any, wanted: Any) -> None:
    """In the model's own dtype, of which the numbers are not compared: NaN where there was none."""
    left, right = dict(tensors_in(given)), dict(tensors_in(wanted))
    lost = [
        name
        for name in left.keys() & right.keys()
        if left[name].is_floating_point()
        and bool(left[name].isnan().any())
        and not bool(right[name].isnan().any())
    ]
    if trial.sides.any_rank(bool(lost)):
        _raise_output(trial, float("inf"), [])


def compare_drops(trial: PairedRun, given: DropoutRecorder, wanted: DropoutRecorder) -> None:
    """Probabilities of dropouts, in the order of their calls, and whose numbers they draw."""
    sides = trial.sides
    mine, theirs = ([drop.p for drop in side.drops] for side in (given, wanted))
    if is_compiled(sides.sch.mod):  # what is in there draws out of sight
        wrong = bool(Counter(mine) - Counter(theirs))
    else:
        wrong = mine != theirs
    if sides.any_rank(wrong):
        _raise_drops(trial)
    if sides.any_rank(mine != theirs):
        return
    pairs = zip(given.drops, wanted.drops, strict=True)
    apart = sides.sch.world_size > 1 and any(m.forked and m.shape == t.shape for m, t in pairs)
    if sides.any_rank(apart):
        _raise_forked(trial)


def _raise_drops(trial: PairedRun) -> None:
    sides = trial.sides
    theirs, mine = (
        {path: [d.p for d in drops] for path, drops in _drops_by_module(trial, model).items()}
        for model in (sides.reference, sides.sch.mod)
    )
    wrong = sides.first([p for p in {**mine, **theirs} if mine.get(p) != theirs.get(p)])
    path = wrong[0] if wrong else ""
    raise VerificationError(
        f"Verify: in train mode {path!r} drops with p={_list(mine.get(path))}, the original with "
        f"p={_list(theirs.get(path))}; {sides.applied(path)}"
    )


def _raise_forked(trial: PairedRun) -> None:
    """Ranks go apart: each drops other numbers of what they all hold."""
    sides = trial.sides
    theirs, mine = (_drops_by_module(trial, m) for m in (sides.reference, sides.sch.mod))
    wrong = [
        path
        for path, drops in mine.items()
        if any(
            m.forked and m.shape == t.shape
            for m, t in zip(drops, theirs.get(path, []), strict=False)
        )
    ]
    path = (sides.first(wrong) or [""])[0]
    raise VerificationError(
        f"Verify: in train mode {path!r} drops with numbers of each rank's own, under fork_rng(), "
        "and what it drops is whole: ranks that hold the same would go apart; leave fork_rng() "
        f"out there, or put it on the part that holds slices; {sides.applied(path)}"
    )


def _list(values: list[float] | None) -> str:
    return ", ".join(map(str, values or [0]))


def _drops_by_module(trial: PairedRun, model: nn.Module) -> dict[str, list[Drop]]:
    """Run again and note where the dropouts are."""
    open_paths = [""]
    quiet = DropoutRecorder(lambda: open_paths[-1])
    with ExitStack() as stack:
        for path, module in hookable(model):
            enter, leave = _entering(open_paths, path)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        trial.run(model, quiet)
    found: dict[str, list[Drop]] = {}
    for drop in quiet.drops:
        found.setdefault(drop.where, []).append(drop)
    return found


def _entering(open_paths: list[str], path: str) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(*_: Any) -> None:
        open_paths.append(path)

    def leave(*_: Any) -> None:
        open_paths.pop()

    return enter, leave
