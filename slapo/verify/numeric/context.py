"""The context manager :class:`Verify`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from slapo.agreement import has_peers, same_on_all_ranks
from slapo.errors import PlacementError, SlapoError, VerificationError
from slapo.graph.trace.leaves import attributes_kept
from slapo.logger import get_logger
from slapo.primitives.base import find_primitive
from slapo.random import states_kept
from slapo.schedule import Schedule
from slapo.sharding.checks import check_modules
from slapo.utils.calls import as_call, outline, refuse_batch
from slapo.utils.outputs import tensors_in
from slapo.verify.numeric.compare import (
    compare_buffers,
    compare_drops,
    compare_finite,
    compare_gradients,
    compare_kinds,
    compare_outputs,
)
from slapo.verify.numeric.harness import SEED, copy_model, difference, scale_of
from slapo.verify.numeric.origins import Origins
from slapo.verify.numeric.pair import ModelPair
from slapo.verify.numeric.precision import wider
from slapo.verify.numeric.randomness import DropoutRecorder
from slapo.verify.numeric.rank_sync import RankSync
from slapo.verify.numeric.run import PairedRun, Refused, RunMode
from slapo.verify.numeric.state import changes, check_replicas, finding_of
from slapo.verify.placement import check
from slapo.weights.materialize import default_device, materialize
from slapo.weights.slots import check_ties
from slapo.wrapper import innermost

#: Relative difference between outputs of the two modes that exceeds rounding.
_OTHER_MODE = 1e-2

logger = get_logger()


class Verify:
    """Check that the schedule inside a ``with`` block does not change the model's results.

    On entry the module is copied. On exit the tensors of the module and the copy are compared. Then
    both run forward and backward on the same inputs, weights and random state. Outputs, and
    parameter gradients gathered from all ranks, must agree, in float64 if the model supports it.
    Constant parameters get some noise for these runs. The model's weights, gradients, buffers, mode
    and random states are restored.

    Parameters
    ----------
    sch
        Schedule whose module is verified; any node.
    example_inputs
        A tensor, a tuple of positional arguments or a dict of keyword arguments. All ranks use the
        inputs of rank 0.
    device
        Device to run on; the default is the model's device. A model on ``meta`` runs where it would
        be built.
    eval_mode
        Compare in eval mode and, with dropout disabled and compared by probability, in train mode.
        False compares in train mode only. Random masks must then be the same on both sides, which
        tensor parallelism does not allow.
    enable
        False disables the check.
    loss_fn
        Function from the output to a scalar to differentiate. The default multiplies every output
        tensor by fixed random values.
    rtol
        Largest difference relative to the largest value of a tensor; the default depends on the
        dtype of the run (1e-9 for float64, 2e-5 for float32, 3e-2 for bfloat16).

    Raises
    ------
    VerificationError
        On every rank. The message names the tensor that the schedule changed, or the module most
        likely at fault, the parameters whose gradients differ, and the primitives applied there.
    SlapoError
        If ranks hold different originals, or the original cannot run.

    Examples
    --------
    >>> import torch, slapo
    >>> from torch import nn
    >>> sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    >>> with Verify(sch, torch.ones(2, 4)):
    ...     _ = sch["0"].decompose()
    >>> try:
    ...     with Verify(sch, torch.ones(2, 4)):
    ...         _ = sch["1"].replace(nn.ReLU())
    ... except slapo.VerificationError as error:
    ...     print(str(error)[:47])
    Verify: the output differs, first at '1' (ReLU)
    """

    def __init__(
        self,
        sch: Schedule,
        example_inputs: Any,
        device: torch.device | str | None = None,
        eval_mode: bool = True,
        enable: bool = True,
        loss_fn: Callable[[Any], Tensor] | None = None,
        rtol: float | None = None,
    ) -> None:
        if not isinstance(sch, Schedule):
            raise TypeError(
                f"Verify takes a schedule, got {type(sch).__name__}; pass the result of "
                "slapo.create_schedule(model)"
            )
        self.sch = sch
        self.args, self.kwargs = as_call(example_inputs)
        refuse_batch(innermost(sch.mod), self.args)
        self.device = torch.device(device) if device is not None else None
        self.eval_mode, self.enable = eval_mode, enable
        self.loss_fn, self.rtol = loss_fn, rtol

    # --- the block ---------------------------------------------------------------------------
    def __enter__(self) -> Verify:
        if self.enable:
            if self.sch.world_size > 1 and not has_peers(self.sch.group):
                raise SlapoError(
                    f"Verify compares values of {self.sch.world_size} ranks, but this group is "
                    "fake, and its other ranks do not exist; verify in real processes: torchrun "
                    "--nproc-per-node 2, with gloo if there is no GPU, or pass enable=False"
                )
            if not self.sch.path:  # for build(check=True)
                self.sch.state.example_inputs = outline(self.kwargs or self.args)
            peers, reference = RankSync(self.sch.group), copy_model(self.sch)
            self.sides = ModelPair(
                self.sch,
                reference,
                Origins(self.sch, reference),
                peers,
                len(self.sch.history),
                self.args,
                self.kwargs,
                self.loss_fn,
                self.rtol,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # Perhaps only this rank failed: the others are about to wait for it in `meet`.
            if self.enable and error is not None:
                self.sides.peers.report(error)
            elif self.enable:
                with self.sides.peers.reported():
                    self._check_primitives()
                    self._verify(self.sides)
        finally:
            self.__dict__.pop("sides", None)

    def _check_primitives(self) -> None:
        for record in self.sides.records():
            primitive = find_primitive(record.primitive)
            if primitive is not None and not primitive.is_verifiable():
                raise SlapoError(
                    f"Verify cannot run a model after {record}; apply it after the verified block"
                )

    # --- the comparison ----------------------------------------------------------------------
    def _verify(self, sides: ModelPair) -> None:
        sides.peers.meet("block")
        if self.sch.world_size > 1:
            check_modules(self.sch.mod)
        device = self._pick_device()
        self._move_inputs(device)
        check_replicas(sides.reference, self.sch.group)
        self._check_state()
        self._materialize_reference(device)
        sides.reference.to(device)
        self._check_placements()
        with states_kept(self.sch.rank, SEED), attributes_kept(self.sch.mod):
            sides.load(device)
            _compare_all(sides, self.eval_mode)

    def _check_placements(self) -> None:
        """Check the placements of a complete model; their errors name the missing call."""
        # The check derives placements from the root's inputs and demands a whole output. The inputs
        # and the output of a node inside a sharded region may be slices.
        if self.sch.world_size == 1 or self.sch.path:
            return
        try:
            check(self.sch, self.sides.kwargs or self.sides.args, self.loss_fn)
        except PlacementError as error:
            # Otherwise an operation has no rule, or torch refused its sizes: the values decide.
            if error.is_certain:
                raise

    def _check_state(self) -> None:
        sides = self.sides
        found = sides.first(changes(self.sch, sides.reference, sides.origins))
        if found:
            finding = finding_of(found)
            raise finding.error(VerificationError, "Verify", self.sch, sides.records())
        if not self.sch.path:
            check_ties(self.sch.mod, self.sch.state.ties)

    def _materialize_reference(self, device: torch.device) -> None:
        """Initialize a copy on meta in the same way as the full model."""
        reference = self.sides.reference
        # Transformers initializes by a method of the root model, which a node below it does not
        # have.
        own: Any = getattr(reference, "_init_weights", None)
        top: Any = getattr(self.sch.get_top_schedule().mod, "_init_weights", None)
        init = True if own is not None or top is None else top
        materialize(reference, init, self.sch.group, device)

    def _pick_device(self) -> torch.device:
        if self.device is not None:
            return self.device
        reference = self.sides.reference
        tensors = [*reference.parameters(), *reference.buffers()]
        real = [t.device for t in tensors if not t.is_meta]
        return real[0] if real else default_device(self.sch.group)

    def _move_inputs(self, device: torch.device) -> None:
        def move(tensor: Tensor) -> Tensor:
            moved = tensor.detach().to(device).clone()
            if self.sch.group is not None and self.sch.world_size > 1:
                dist.broadcast(moved, dist.get_global_rank(self.sch.group, 0), self.sch.group)
            return moved.requires_grad_(tensor.requires_grad)

        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        shapes = [(tuple(t.shape), t.dtype) for t in leaves if isinstance(t, Tensor)]
        # A broadcast with different sizes would abort the process.
        same_on_all_ranks(
            "Verify: example_inputs",
            (shapes, str(spec)),
            self.sch.group,
            "pass inputs of the same shape on all ranks; Verify uses the values of rank 0",
        )
        moved = pytree.tree_map_only(Tensor, move, (self.args, self.kwargs))
        self.sides.args, self.sides.kwargs = moved


# --- the runs -------------------------------------------------------------------------------------
def _compare_all(sides: ModelPair, eval_mode: bool) -> None:
    """Make the runs, and check each."""
    # 1. Forward in the model's own dtype and in train mode, without randomness: the scheduled model
    #    must run as it is, return the same types and dtypes, and drop with the same probabilities.
    # 2. Forward and backward in float64, or the widest dtype that runs: compares all values.
    # 3. Forward in the other mode, if train and eval mode compute different values.
    output, dropouts = _run_plainly(sides, eval_mode)
    if not eval_mode:
        _compare_numbers(sides, RunMode(training=True))
    # Draws and batch statistics were recorded, so train mode computes other values: gradients are
    # compared there, as the model will train.
    elif dropouts is not None and dropouts.differs:
        _compare_numbers(sides, RunMode(training=True, quiet=True))
        _compare_numbers(sides, RunMode(training=False, gradients=False))
    else:
        wanted = _compare_numbers(sides, RunMode(training=False))
        # Nothing recorded, but a module may test `self.training` itself: compare the outputs of the
        # modes.
        if dropouts is not None and sides.any_rank(_are_apart(output, wanted)):
            _compare_numbers(sides, RunMode(training=True, quiet=True))


def _run_plainly(sides: ModelPair, eval_mode: bool) -> tuple[Any, DropoutRecorder | None]:
    """The original's output and, in train mode, its dropouts; in eval mode if train mode fails."""
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
        # Not part of the attempts: a difference is a fault, and no reason to try another dtype.
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
        # Rounding of a half-precision output comes close to the limit.
        if tensor.dtype not in (torch.float32, torch.float64) or name not in others:
            continue
        if difference(tensor, others[name]) > _OTHER_MODE * scale_of(others[name]):
            return True
    return False
