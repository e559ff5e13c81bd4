"""The runs of a verification, and the checks of each run.

1. Forward in the model's own dtype and in train mode, without randomness: the scheduled model must
   run as it is, return the same types and dtypes, and drop with the same probabilities.
2. Forward and backward in float64: compares all values. In train mode if it computes something else
   than eval mode, as with batch statistics; otherwise in eval mode.
3. Forward in the other mode if the two differ.

Models that do not support float64 are compared in float32, or in their own dtype.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
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

#: Relative difference between outputs of the two modes that exceeds rounding.
_OTHER_MODE = 1e-2

logger = get_logger()


def compare_all(sides: ModelPair, eval_mode: bool) -> None:
    """Make the runs."""
    output, dropouts = _run_plainly(sides, eval_mode)
    if not eval_mode:
        _compare_numbers(sides, RunMode(training=True))
    elif dropouts is not None and dropouts.differs:
        _compare_numbers(sides, RunMode(training=True, quiet=True))
        _compare_numbers(sides, RunMode(training=False, gradients=False))
    else:
        wanted = _compare_numbers(sides, RunMode(training=False))
        if dropouts is not None and sides.any_rank(_are_apart(output, wanted)):
            _compare_numbers(sides, RunMode(training=True, quiet=True))


def _run_plainly(sides: ModelPair, eval_mode: bool) -> tuple[Any, DropoutRecorder | None]:
    """Make the first run, in eval mode if train mode fails for this model.

    Returns the output and the dropouts of the original; None instead of the latter in eval mode.
    """
    # A graph traced in eval mode may be valid for eval mode only.
    may_refuse = eval_mode and not sides.any_rank(sides.sch.mod.training)
    try:
        return _plain_in(sides, True, may_refuse, eval_mode)
    except Refused as refused:
        logger.info("Verify compares in eval mode only, because in train mode: %s", refused)
    return _plain_in(sides, False, False, False)


def _plain_in(
    sides: ModelPair, training: bool, may_refuse: bool, original_may: bool
) -> tuple[Any, DropoutRecorder | None]:
    trial = PairedRun(sides, RunMode(training, quiet=True, gradients=False))
    theirs, mine = DropoutRecorder(), DropoutRecorder()
    with trial.prepared():
        with trial.attempt() if original_may else nullcontext():
            wanted = trial.run_original(theirs)
        sides.peers.meet("original")
        with trial.attempt() if may_refuse else nullcontext():
            given = trial.run_scheduled(mine)
        sides.peers.meet("forward")
        compare_kinds(trial, given.output, wanted.output)
        compare_finite(trial, given.output, wanted.output)
        if training:
            compare_drops(trial, mine, theirs)
    return wanted.output, theirs if training else None


def _compare_numbers(sides: ModelPair, way: RunMode) -> Any:
    """Compare values as precisely as possible; return the original's output."""
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
        with trial.attempt() if may_refuse else nullcontext():
            stack.enter_context(trial.prepared())  # may run out of memory
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
    """Return True if outputs of train and eval mode differ by more than rounding."""
    others = dict(tensors_in(double))
    for name, tensor in tensors_in(own):
        if tensor.dtype not in (torch.float32, torch.float64) or name not in others:
            continue
        if difference(tensor, others[name]) > _OTHER_MODE * scale_of(others[name]):
            return True
    return False
