"""``slapo.check``: one forward and one backward pass that follow every tensor's placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from slapo.agreement import gathered, has_peers
from slapo.errors import PlacementError, SlapoError
from slapo.graph.trace.leaves import attributes_kept
from slapo.logger import get_logger
from slapo.random import states_kept
from slapo.schedule import Schedule
from slapo.sharding.checks import check_modules
from slapo.sharding.groups import as_if_alone
from slapo.sharding.steps import Carrier, carried_by
from slapo.utils.calls import as_call, outline, refuse_batch
from slapo.utils.outputs import tensors_in
from slapo.utils.raised import running_in

# Imports register the rules of autograd functions.
from slapo.verify.placement import losses as losses
from slapo.verify.placement.fake_parameters import FakeParameters, as_before, standing_in
from slapo.verify.placement.mode import PlaceMode
from slapo.verify.placement.place import Place, PlacementViolation, Stop, place_of
from slapo.verify.placement.report import (
    unrunnable,
    wrong_gradient,
    wrong_operation,
    wrong_sizes,
)
from slapo.verify.placement.rules import rules_of_functions
from slapo.verify.placement.sizes import Operation, OperationLog, Pair, first_difference
from slapo.wrapper import in_mode, innermost

logger = get_logger()

LossFn = Callable[[Any], Tensor]


def check(sch: Schedule, example_inputs: Any, loss_fn: LossFn | None = None) -> None:
    """Raise for a tensor-parallel schedule that would change the training of a model.

    The scheduled model runs once forward and once backward in this process, without communication.
    Every tensor is followed through every operation as replicated, sharded or partial, also in the
    backward pass. Each gradient must have the placement of its parameter. Models up to 128 MiB run
    on real values, larger ones on fake tensors. Models on ``meta`` need no weights, and weights
    never change.

    Values are not compared: :class:`slapo.Verify` checks that a replacement computes the same.

    Parameters
    ----------
    sch
        The root schedule, before ``slapo.build``. Its group may consist of real processes, all of
        which must call this and raise the same error, or be a fake group of any size.
    example_inputs
        A tensor, a tuple of positional arguments or a dict of keyword arguments. Sizes that differ
        from each other, and from the model's, find the most faults.
    loss_fn
        Function from the output to a scalar. The default is the output's ``loss``, or else all of
        its tensors.

    Raises
    ------
    PlacementError
        With the module, the operation, its inputs, and the missing call if known.
    SlapoError
        If the model cannot run on these inputs.

    Examples
    --------
    >>> import slapo, torch
    >>> from torch import nn
    >>> sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    >>> _ = sch["0"].shard("weight", axis=0).shard("bias", axis=0)
    >>> slapo.check(sch, torch.ones(3, 4))  # of one rank each slice is the whole
    """
    if not isinstance(sch, Schedule):
        raise TypeError(
            f"check takes a schedule, got {type(sch).__name__}; pass the result of "
            "slapo.create_schedule(model)"
        )
    with _raised_alike(sch):
        args, kwargs = as_call(example_inputs)
        refuse_batch(innermost(sch.mod), args)
        if not sch.path:  # for build(check=True)
            sch.state.example_inputs = outline(example_inputs)
        if sch.world_size > 1:
            check_modules(sch.mod)
        _Check(sch, args, kwargs, loss_fn).run()


def check_call(
    sch: Schedule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFn | None,
    half: torch.dtype | None = None,
) -> None:
    """`check` of a built model, whose parameters count as of dtype `half`."""
    with _raised_alike(sch):
        _Check(sch, args, kwargs, loss_fn, half).run()


@contextmanager
def _raised_alike(sch: Schedule) -> Iterator[None]:
    """Raise one rank's error on all ranks, because rank 0 does not notice a wrong offset."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if has_peers(sch.group) and sch.world_size > 1:
        # Errors travel between ranks by pickle, which an arbitrary exception may not survive.
        shared = PlacementError(str(error)) if error is not None else None
        if isinstance(error, PlacementError):
            shared = error
        elif shared is not None:
            shared.is_certain = False
        found = [each for each in gathered(shared, sch.group) if each is not None]
        if found:
            error = error or found[0]
        if isinstance(error, PlacementError):
            error.is_certain = all(each.is_certain for each in found)
    if error is not None:
        raise error


class _Check:
    def __init__(
        self,
        sch: Schedule,
        args: Any,
        kwargs: dict[str, Any],
        loss_fn: LossFn | None,
        half: torch.dtype | None = None,
    ) -> None:
        self.sch, self.loss_fn = sch, loss_fn
        self.stand_ins = FakeParameters(sch.mod, half)
        self.inputs = (args, kwargs)

    def run(self) -> None:
        """Run the check, and restore all state."""
        with ExitStack() as stack:
            if not self.sch.mod.training:  # a model in train mode keeps its own flags
                stack.enter_context(in_mode(self.sch.mod, True))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(eager())
            # A difference must persist in a second run: the first may fill caches.
            pair = self._compare() and self._compare()
            if pair is not None:
                raise wrong_sizes(self.sch, *pair)

    def _compare(self) -> Pair | None:
        """Follow every tensor; return the first operation that differs from one process."""
        # One process first: views of the second run look up their full shapes in its log.
        alone = self._run_alone()
        with states_kept(self.sch.rank), attributes_kept(self.sch.mod):
            return first_difference(self._follow(alone), alone)

    def _fresh_inputs(self) -> tuple[Any, Any]:
        return pytree.tree_map_only(Tensor, self.stand_ins.given, self.inputs)

    def _follow(self, alone: OperationLog) -> list[Operation]:
        sch, mode = self.sch, PlaceMode(self.sch.mod, self.sch.group, alone)
        gradients: dict[str, Place] = {}
        with ExitStack() as stack:
            params = stack.enter_context(standing_in(sch.mod, self.stand_ins, sch.group))
            for name, (param, _) in params.items():
                if param.requires_grad:
                    handle = param.register_hook(_noting(gradients, name))
                    stack.callback(handle.remove)
            try:
                for context in self._watched_by(mode, mode.carry_out):
                    stack.enter_context(context)
                args, kwargs = self._fresh_inputs()
                output = sch.mod(*args, **kwargs)
                # Before the loss: one process stops at the output.
                operations = [*mode.operations]
                losses = losses_in(output) if self.loss_fn is None else [self.loss_fn(output)]
                self._backward(losses)
            except Stop as stop:
                raise wrong_operation(sch, stop) from None
            except Exception as error:
                raise unrunnable(sch, error, mode.returned) from error
            if not losses:
                raise SlapoError(
                    f"check: the output, a {type(output).__name__}, holds no tensor to start the "
                    "backward pass from; pass a loss_fn that computes a scalar from it, or return "
                    "tensors, in a tuple, a dict or a dataclass"
                )
            for name, (_, wanted) in params.items():
                found = gradients.get(name, wanted)
                alike = found.is_whole and wanted.dim in found.uniform
                if not (found.same(wanted) or alike):
                    raise wrong_gradient(sch, name, wanted, found)
        return operations

    def _backward(self, losses: list[Tensor]) -> None:
        for loss in losses:
            place = place_of(loss)
            if not place.is_plain:
                raise Stop(PlacementViolation(""), "output", ("", False), [(loss, place)])
        wanted = [loss for loss in losses if loss.requires_grad]
        if not wanted and any(param.requires_grad for param in self.sch.mod.parameters()):
            logger.warning("check: no output depends on parameters, so no gradient was checked")
        if wanted:
            torch.autograd.backward(wanted, [torch.ones_like(loss) for loss in wanted])

    def _watched_by(self, mode: Any, carrier: Carrier) -> tuple[Any, ...]:
        """Contexts for a run on stand-ins whose operations `mode` follows."""
        # The fake mode first: of several modes, the one entered last sees an operation first and
        # passes it on.
        return (
            self.stand_ins.mode(),
            rules_of_functions(mode),
            carried_by(carrier),
            mode.paths.followed(),
            mode.called,
            mode,
        )

    def _run_alone(self) -> OperationLog:
        """Operations of the unsharded model, as far as it runs."""
        sch = self.sch
        mode = OperationLog(sch.mod)
        if sch.world_size == 1:
            return mode
        try:
            with ExitStack() as stack:
                for context in (
                    states_kept(sch.rank),
                    attributes_kept(sch.mod),
                    as_if_alone(),
                    as_before(sch.mod, sch.state.numbers),
                    standing_in(sch.mod, self.stand_ins, sch.group, whole=True),
                    # As in the compared run: some kernels depend on requires_grad.
                    torch.enable_grad(),
                    *self._watched_by(mode, mode.run_unseen),
                ):
                    stack.enter_context(context)
                args, kwargs = self._fresh_inputs()
                sch.mod(*args, **kwargs)
                mode.is_complete = True
        except Exception as error:
            # Such as a graph with local sizes built in; the preceding operations are still valid.
            where = running_in(error, sch.mod) or "the beginning"
            logger.info(
                "check: sizes are not compared from %r on, as one process fails: %s", where, error
            )
        return mode


def _noting(gradients: dict[str, Place], name: str) -> Callable[[Tensor], None]:
    def note(grad: Tensor) -> None:
        gradients[name] = place_of(grad)

    return note


def losses_in(output: Any) -> list[Tensor]:
    """Tensors to differentiate without a loss function."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return [loss]
    return [tensor for _, tensor in tensors_in(output)]


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled functions operation by operation."""
    if torch.compiler.is_compiling():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
