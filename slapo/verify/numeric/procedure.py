"""The runs of a verification, and what each of them shows.

1. Forward, in the model's own dtype and in train mode, without chance: whether the scheduled model
   runs as it is, gives the same kinds and dtypes, and drops with the same probabilities.
2. Forward and backward in float64: all numbers. In train mode where it computes something else than
   eval mode does, as with statistics of batches; else in eval mode.
3. Forward in the other mode where the two differ.

What refuses float64 is compared in float32, or in its own dtype.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from slapo.logger import get_logger
from slapo.utils.outputs import tensors_in
from slapo.verify.numeric.compare import (
    compare_buffers,
    compare_drops,
    compare_finite,
    compare_gradients,
    compare_kinds,
    compare_outputs,
)
from slapo.verify.numeric.harness import difference, scale_of
from slapo.verify.numeric.pair import ModelPair
from slapo.verify.numeric.precision import wider
from slapo.verify.numeric.randomness import DropoutRecorder
from slapo.verify.numeric.run import PairedRun, Refused, RunMode

#: Outputs of the two modes that are further apart, relative to their scale, come of more than
#: rounding.
_OTHER_MODE = 1e-2

logger = get_logger()


@dataclass(frozen=True)
class _Plain:
    """The first run: the original's output, and what both drop; None in eval mode."""

    trial: PairedRun
    wanted: Any
    drops: tuple[DropoutRecorder, DropoutRecorder] | None


def compare_all(sides: ModelPair, eval_mode: bool) -> None:
    """Make the runs."""
    plain = _run_plainly(sides, eval_mode)
    if not eval_mode:
        _compare_drops(plain)  # first: masks of other probabilities are other numbers
        _compare_numbers(sides, RunMode(training=True))
        return
    if plain.drops is not None and plain.drops[1].differs:
        _compare_numbers(sides, RunMode(training=True, quiet=True))
        _compare_numbers(sides, RunMode(training=False, gradients=False))
    else:
        wanted = _compare_numbers(sides, RunMode(training=False))
        if plain.drops is not None and sides.any_rank(_are_apart(plain.wanted, wanted)):
            _compare_numbers(sides, RunMode(training=True, quiet=True))
    _compare_drops(plain)


def _compare_drops(plain: _Plain) -> None:
    if plain.drops is not None:
        with plain.trial.prepared():
            compare_drops(plain.trial, *plain.drops)


def _run_plainly(sides: ModelPair, eval_mode: bool) -> _Plain:
    """The first run, in eval mode where there is no other for this model."""
    # A graph of a model in eval mode may hold for that alone.
    may_refuse = eval_mode and not sides.any_rank(sides.sch.mod.training)
    try:
        return _plain_in(sides, True, may_refuse, eval_mode)
    except Refused as refused:
        logger.info("Verify compares in eval mode alone, as in train mode: %s", refused)
    return _plain_in(sides, False, False, False)


def _plain_in(sides: ModelPair, training: bool, may_refuse: bool, original_may: bool) -> _Plain:
    trial = PairedRun(sides, RunMode(training, quiet=True, gradients=False))
    theirs, mine = DropoutRecorder(), DropoutRecorder()
    with trial.prepared():
        with trial.attempt(whatever=True) if original_may else nullcontext():
            wanted = trial.run_original(theirs)
        sides.peers.meet("original")
        with trial.attempt(whatever=True) if may_refuse else nullcontext():
            given = trial.run_scheduled(mine)
        sides.peers.meet("forward")
        compare_kinds(trial, given.output, wanted.output)
        compare_finite(trial, given.output, wanted.output)
    return _Plain(trial, wanted.output, (mine, theirs) if training else None)


def _compare_numbers(sides: ModelPair, way: RunMode) -> Any:
    """One comparison of numbers, as precise as may be; returns the original's output."""
    *wide, own = wider(sides.reference, sides.sch.mod)
    for dtype in wide:
        try:
            return _numbers(sides, replace(way, wide=dtype))
        except Refused as refused:
            logger.info("Verify does not compare in %s: %s", dtype, refused)
    return _numbers(sides, replace(way, wide=own))


def _numbers(sides: ModelPair, way: RunMode) -> Any:
    trial, may_refuse = PairedRun(sides, way), way.wide is not None
    with ExitStack() as stack:
        with trial.attempt(whatever=True) if may_refuse else nullcontext():
            stack.enter_context(trial.prepared())  # for which there may be no room
            wanted = trial.run_original()
            given = trial.run_scheduled()
        sides.peers.meet("numbers")
        compare_outputs(trial, given.output, wanted.output)
        if way.gradients:
            with trial.attempt() if may_refuse else nullcontext():
                trial.backward(wanted)
                trial.backward_scheduled(given)
            sides.peers.meet("backward")
            compare_gradients(trial, given, wanted)
        compare_buffers(trial)
    return wanted.output


def _are_apart(own: Any, double: Any) -> bool:
    """Return whether outputs of train and eval mode differ by more than rounding."""
    others = dict(tensors_in(double))
    for name, tensor in tensors_in(own):
        if tensor.dtype not in (torch.float32, torch.float64) or name not in others:
            continue
        if difference(tensor, others[name]) > _OTHER_MODE * scale_of(others[name]):
            return True
    return False
