"""A run of both models in one mode and precision, with or without randomness."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slapo.agreement import is_broken_collective, is_on_every_rank
from slapo.errors import SlapoError
from slapo.random import get_rng_tracker
from slapo.sharding.steps import carried_by
from slapo.utils.raised import running_in
from slapo.verify.finding import kept_sizes
from slapo.verify.numeric.harness import SEED, Outcome, other_tensors, weighed
from slapo.verify.numeric.pair import ModelPair
from slapo.verify.numeric.precision import RTOL, Widened, default_dtype, rtol_for
from slapo.verify.numeric.randomness import DropoutRecorder
from slapo.verify.numeric.rank_sync import RankSync
from slapo.wrapper import in_mode


@dataclass(frozen=True)
class RunMode:
    """Settings for a run of both models."""

    training: bool
    #: a dtype for all floating point values, wider than the model's; None for the model's own
    wide: torch.dtype | None = None
    #: without random numbers
    quiet: bool = False
    #: with a backward pass
    gradients: bool = True


class Refused(Exception):
    """A mode in which some rank's model cannot run; all ranks raise it."""


class PairedRun:
    """Both models with the settings of one run."""

    def __init__(self, sides: ModelPair, way: RunMode) -> None:
        self.sides, self.way = sides, way
        self.peers = sides.peers
        self._narrow: set[torch.dtype] = set()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Put copies of tensors, the mode and the precision in place for both models."""
        sides, way = self.sides, self.way
        with ExitStack() as stack:
            for model in (sides.reference, sides.sch.mod):
                mine = model is sides.sch.mod
                values = sides.values if mine else sides.original
                compiled = sides.compiled if mine else None
                stack.enter_context(
                    other_tensors(model, values, sides.sch.group, compiled, way.wide)
                )
                stack.enter_context(in_mode(model, way.training))
            stack.enter_context(torch.set_grad_enabled(way.gradients))
            if way.wide is not None:
                stack.enter_context(default_dtype(way.wide))
            yield

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Raise `Refused` on all ranks if any rank fails; a fault shows again in the own dtype."""
        # A failure in the store is final for all ranks. An attempt may fail and go on, so it
        # reports to a store of its own.
        peers, self.peers = self.peers, RankSync(self.sides.sch.group)
        error: Exception | None = None
        try:
            with self.peers.reported():
                yield
        except Exception as raised:
            # A rank is gone, and the exchange below would wait for it.
            if is_broken_collective(raised):
                raise
            error = raised
        finally:
            self.peers = peers
        texts = self.sides.of_all_ranks("" if error is None else f"{type(error).__name__}: {error}")
        if any(texts):
            raise Refused(next(filter(None, texts))) from error

    # --- runs --------------------------------------------------------------------------------
    @contextmanager
    def modes(self, quiet: DropoutRecorder | None) -> Iterator[Widened | None]:
        """Torch function modes that are active while a model runs, forward or backward."""
        dtypes = {t.dtype for t in self.sides.full.values() if t.is_floating_point()}
        widened = Widened(self.way.wide, dtypes) if self.way.wide is not None else None
        with quiet or nullcontext(), widened or nullcontext(), carried_by(self.peers.carry_out):
            yield widened

    def run(self, model: nn.Module, quiet: DropoutRecorder | None = None) -> Outcome:
        """Run with the same inputs and random states each time."""
        sides, tracker = self.sides, get_rng_tracker()
        quiet = quiet or (DropoutRecorder() if self.way.quiet else None)
        states = tracker.get_states()
        torch.manual_seed(SEED)
        inputs: list[Tensor] = []

        def copied(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor.clone()
            value = tensor.detach().to(self.way.wide or tensor.dtype, copy=True)
            # Also inputs that need no gradient in training: a missing sum in the backward pass of
            # the first module shows in their gradients only.
            inputs.append(value.requires_grad_())
            return value.clone()  # not a leaf, so the model may change it in place

        args, kwargs = pytree.tree_map_only(Tensor, copied, (sides.args, sides.kwargs))
        try:
            with self.modes(quiet) as widened:
                output = model(*args, **kwargs)
            # Only the original may excuse a rounding; a schedule that adds one must not widen its
            # own tolerance.
            if widened is not None and model is sides.reference:
                self._narrow = widened.narrow
            return Outcome(output, inputs)
        finally:
            tracker.set_states(states)

    def run_original(self, quiet: DropoutRecorder | None = None) -> Outcome:
        """Run the copy; its failure means invalid inputs."""
        reference = self.sides.reference
        try:
            return self.run(reference, quiet)
        except Exception as error:
            if is_broken_collective(error) or is_on_every_rank(error):
                raise
            names = list(inspect.signature(reference.forward).parameters)
            raise SlapoError(
                f"Verify: the original model fails on the example_inputs with "
                f"{type(error).__name__}: {error}; pass the arguments of its forward: {names}"
            ) from error

    def run_scheduled(self, quiet: DropoutRecorder | None = None) -> Outcome:
        """Run the scheduled model; errors name the module that was running."""
        with self._explained(""):
            return self.run(self.sides.sch.mod, quiet)

    def backward(self, outcome: Outcome) -> None:
        """Run the backward of either model, from the user's loss or from all outputs."""
        loss_fn = self.sides.loss_fn
        loss = None if loss_fn is not None else weighed(outcome.output)  # it draws numbers
        with self.modes(DropoutRecorder() if self.way.quiet else None):
            loss = loss_fn(outcome.output) if loss_fn is not None else loss
            if loss is not None:
                _run_backward(loss)

    def backward_scheduled(self, outcome: Outcome) -> None:
        """Run the backward of the scheduled model; errors name the module."""
        with self._explained("the backward pass of "):
            self.backward(outcome)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Add to errors of the block the failing module and the primitives applied there."""
        sides = self.sides
        try:
            yield
        except Exception as error:
            if is_broken_collective(error) or is_on_every_rank(error):
                raise  # another rank is at fault
            path = running_in(error, sides.sch.mod) or ""
            module = sides.sch.mod.get_submodule(path)
            where = f" in {path!r} ({type(module).__name__})" if path else ""
            raise sides.error(
                f"{what}the scheduled model fails with {type(error).__name__}{where}: {error}",
                path,
                further=kept_sizes(sides.sch, path, sides.records()),
            ) from error

    # --- tolerances --------------------------------------------------------------------------
    def rtol(self, tensor: Tensor) -> float:
        """The largest allowed difference, relative to the largest value of a tensor."""
        if self.sides.rtol is not None:
            return self.sides.rtol
        # Integers and booleans must be equal, even if the model rounds somewhere.
        dtype = tensor.dtype.to_real()
        dtypes = [dtype, *(self._narrow if dtype in RTOL else ())]
        return max(rtol_for(dtype, self.sides.reference) for dtype in dtypes)


def _run_backward(loss: Tensor) -> None:
    """``loss.backward()`` that keeps the caller's torch function modes active."""
    # ``Tensor.backward`` is itself a torch function, so the active modes are off while it runs. A
    # checkpoint recomputes its forward pass in there and would run with dropout and in narrow
    # dtypes.
    engine: Any = torch.autograd.Variable._execution_engine
    ones = (torch.ones_like(loss),)
    engine.run_backward(
        (loss,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True
    )
