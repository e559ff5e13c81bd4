"""The user interface of engines, the same on every target."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.agreement import (
    all_ranks_or_none,
    communication_device,
    gathered,
    has_peers,
    on_every_rank,
)
from slapo.errors import SlapoError
from slapo.framework_dialect.batches import (
    Batch,
    BatchCheck,
    batch_digest,
    next_batch,
    target_counts,
)
from slapo.framework_dialect.failures import naming_failures
from slapo.framework_dialect.gradient_check import GradientCheck
from slapo.framework_dialect.losses import (
    LossAccumulator,
    LossReducer,
    shifts_labels,
)
from slapo.framework_dialect.optimizers import inner_optimizers
from slapo.framework_dialect.options import TrainingOptions
from slapo.framework_dialect.replicas import share_over_mesh
from slapo.framework_dialect.runtime import Lowering
from slapo.graph.trace.nests import call_key, tensors
from slapo.logger import get_logger
from slapo.mesh import DIMS, current_device
from slapo.saving.load import HalfLoadedError, Resumed, load
from slapo.saving.save import Saving, save
from slapo.saving.state import has_form_of
from slapo.sharding.groups import GroupHandle, handle_of
from slapo.weights.holdings import Held, holdings
from slapo.weights.load import Loader

logger = get_logger("slapo")


class Engine:
    """A model that trains. All engines share this interface, so scripts change only the target.

    Attributes
    ----------
    module : nn.Module
        The part that runs in this process: the model, or its stage or stages.
    mesh : DeviceMesh
    optimizer, scheduler : Any
        None if `build` was given none.
    grad_norm : Tensor or None
        Norm of the full model's gradient at the last step, before clipping; None unless
        ``clip_grad_norm`` is set (``math.inf`` only measures).
    step_count : int
        Number of optimizer steps requested so far, including skipped ones.
    was_step_applied : bool
        False if the last step was skipped, because a gradient was not finite.
    samples : int
        Samples of batches that this replica has trained on by `train_batch`; after `load`, this
        includes its part of the earlier ones.
    """

    #: coordinate along pp of the ranks that run the last stage
    last_pp_rank = -1

    def __init__(self, lowering: Lowering, options: TrainingOptions) -> None:
        self.lowering, self.options = lowering, options
        self.mesh = options.mesh
        #: number of ranks along each dimension
        self._pp, self._dp, self._tp = options.mesh.shape
        self.device = current_device(options.mesh)
        self.module = lowering.module
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.grad_norm: Tensor | None = None
        self.step_count = self.samples = 0
        self.was_step_applied = True
        all_ranks_or_none("build", self._check_model)
        # Not to(), which fails on tensors on meta. _apply keeps the Parameter objects, and so their
        # ties, tags and hooks.
        self.module._apply(self._moved)
        #: parameters shared by several stages
        self.shared = share_over_mesh(lowering, self.mesh, options.sync_replicated, self._rank_of)
        self._naming_failures = naming_failures(options.mesh)
        self._batch_check = BatchCheck(options.mesh) if options.check_batches else None
        floating = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        dtype = options.half or next(floating, None)
        self._reducer = LossReducer(options.mesh, self.device, self.last_pp_rank, dtype)
        self._losses = LossAccumulator()
        self._outputs: list[Any] | None = None
        self._shifts_labels = shifts_labels(lowering)
        self._has_warned = False
        #: group of replicas that gather parameters from each other in each forward; else None
        self._gathering_group: dist.ProcessGroup | None = None
        #: true if a forward runs only because other replicas gather parameters from here
        self._is_idle = False
        self._backwards = 0
        self._form_before: Any = None
        self._samples_of_form = 0
        self._failure: str | None = None
        self._saving: Saving | None = None
        self._saving_group: GroupHandle | None = None
        self._nonfinite: str | None = None
        named = self.module.named_parameters(remove_duplicate=False)
        self._trained = {name for name, parameter in named if parameter.requires_grad}

    def _check_model(self) -> None:
        """Refuse a model that this engine cannot train."""

    def _refuse_scalars(self, who: str, instead: str) -> None:
        scalars = [name for name, p in self.module.named_parameters() if p.dim() == 0]
        if scalars:
            raise ValueError(
                f"{who} cannot shard scalar parameters: {scalars}; give them the shape (1,), or "
                f"pass {instead}"
            )

    def _moved(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the device, unless it is on meta; cast to float32 if requested."""
        is_cast = self.options.dtype is torch.float32 and tensor.is_floating_point()
        device = tensor.device if tensor.is_meta else self.device
        return tensor.to(device, torch.float32 if is_cast else None)

    def _rank_of(self, stage: int) -> int:
        """Coordinate along the pipeline of the rank that runs a stage."""
        return stage

    # --- with a loss function ----------------------------------------------------------------
    def train_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """Run one step on the next batch: forward, backward, optimizer.

        Parameters
        ----------
        data_iter
            Yields ``(inputs, targets)``: the batch of this data-parallel rank, the same on all of
            its pipeline and tensor-parallel ranks. Inputs are a tensor, a tuple of positional
            arguments or a dict of keyword arguments of the model; targets are passed to
            ``loss_fn``. Both are split into micro-batches along the first dimension.

        Returns
        -------
        Tensor
            The loss: 0-dim, float32, the same on every rank. It is the mean over micro-batches and
            data-parallel ranks, weighted by their targets (see ``loss_mean``). For a ``loss_fn``
            that returns counts, it is the quotient of both sums over these.

        Raises
        ------
        ValueError, TypeError
            If the batch cannot be split into micro-batches.
        SlapoError
            If ranks got different batches, the model was not traced for such inputs, or an earlier
            step failed in a way that cannot be undone.
        """
        with self._naming_failures("train_batch"):
            self._refuse_autocast("train_batch")
            self._check_ready("train_batch")
            self.check_between_steps("train_batch")
            batch = self._load("train_batch", data_iter, training=True)
            self._set_training()
            self._check_places(batch.first(self.options.micro_batches), with_loss=True)
            batch = self._weighted(batch, training=True)
            self._losses = LossAccumulator(self.options.micro_batches)
            with self._all_or_nothing():
                loss = self._train(batch)
            self._refuse_nonfinite()
            self.step_count += 1
            self.samples += self._samples_of_form
            return loss

    def _train(self, batch: Batch) -> Tensor:
        """Run one step; an engine whose library does all of it in one call overrides this."""
        self._forward_backward(batch)
        # The collective of the loss runs while the optimizer works; scale() waits for it only if
        # the loss function may return counts, or on checked steps.
        mean = self._begin_mean()
        self._optimizer_step(mean.scale())
        return mean.loss()

    def _begin_mean(self) -> LossReducer:
        """Start the reduction of this step's loss and of the factor for gradients."""
        return self._reducer.begin(self._losses, self.options.is_checked(self.step_count))

    def eval_batch(
        self, data_iter: Iterator[Any], return_outputs: bool = False
    ) -> Tensor | tuple[Tensor, list[Any]]:
        """Compute the loss on the next batch, in eval mode and without gradients.

        Parameters
        ----------
        data_iter
            See `train_batch`; here a batch may have any number of samples.
        return_outputs
            Also return the outputs of the model.

        Returns
        -------
        loss : Tensor
            As for `train_batch`; without targets to count, samples have equal weights.
        outputs : list
            With `return_outputs`: the model's output for each micro-batch, on the ranks that run
            the last stage; empty on the others.
        """
        with self._naming_failures("eval_batch"):
            self._refuse_autocast("eval_batch")
            batch = self._load("eval_batch", data_iter, training=False)
            batch = self._weighted(batch, training=False)
            self._losses, self._outputs = LossAccumulator(), [] if return_outputs else None
            try:
                with self._evaluating(), torch.no_grad(), self._among_replicas(batch):
                    parts = batch.most_parts(self.options.micro_batches)
                    # Agreed before the first forward: afterwards, the all-reduce of a replica with
                    # fewer forwards would meet a gather of one that has more.
                    most = self._most_forwards(parts)
                    self._evaluate(batch, parts)
                    # The gathers of other replicas need this one's shards; its further losses do
                    # not count.
                    self._is_idle = True
                    for _ in range(most - parts):
                        self._evaluate(batch.first(parts), 1)
                    loss = self._begin_mean().loss()
                return loss if self._outputs is None else (loss, self._outputs)
            finally:
                self._outputs, self._is_idle = None, False

    def _most_forwards(self, here: int) -> int:
        """Largest number of forwards of the replicas that gather parameters from each other."""
        group = self._gathering_group
        if group is None or not has_peers(group):
            return here
        most = torch.tensor(here, device=communication_device(group))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return int(most)

    def _among_replicas(self, batch: Batch, training: bool = False) -> AbstractContextManager[None]:
        """Context for calls of the model that a library needs if replicas use different layers."""
        return nullcontext()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _forward_backward(self, batch: Batch) -> None:
        """Compute losses and gradients of a batch, in ``options.micro_batches`` parts."""
        raise NotImplementedError

    def _evaluate(self, batch: Batch, parts: int) -> None:
        """Compute losses of a batch in so many parts."""
        for part in batch.cut(parts):
            self._loss(part)

    # Three methods, since libraries intervene at different points. _call runs the model as the
    # library wraps it, also for engine(...). _loss_of applies the loss function to an output, also
    # in the last stage of a pipeline. _loss is both for one micro-batch.
    def _loss(self, part: Batch) -> Tensor:
        """Compute the loss of a micro-batch, without a pipeline."""
        return self._loss_of(self._call(*part.args, **part.kwargs), part)

    def _optimizer_step(self, scale: Tensor | None) -> None:
        """Multiply gradients by `scale`, if given, and run one step of the optimizer."""
        raise NotImplementedError

    def _load(self, what: str, data_iter: Iterator[Any], training: bool) -> Batch:
        """Return the next batch; any fault in it is an error on every rank that shares it."""
        if self.options.loss_fn is None:
            raise SlapoError(f"{what} needs a loss; build with loss_fn=")

        def read() -> Batch:
            given = next_batch(data_iter)
            batch = Batch.of(given, self.device, self.options.batch_dims).cast(self.options.half)
            self._check_form(batch, training)
            return batch

        if self._batch_check is not None and self.options.is_checked(self.step_count):
            return self._batch_check.load(what, read)
        return read()

    def _weighted(self, batch: Batch, training: bool) -> Batch:
        """Weight the parts of a batch in a mean loss: by their targets, or else their samples."""
        by_targets = self.options.loss_mean == "targets"
        counts = target_counts(batch, self._shifts_labels) if by_targets else None
        if counts is not None:
            each: Tensor | float = 1.0
            if training:
                # The engine averages gradients over dp replicas. With the weight dp / (targets of
                # all replicas) the mean of the replicas' weighted sums is the mean over all
                # targets.
                total = counts.sum()
                if self._dp > 1:
                    dist.all_reduce(total, group=self.mesh.get_group("dp"))
                each = self._dp / total.clamp(min=1)
            return replace(batch, counts=counts, each=each)
        if by_targets:
            self._warn_of_padding(batch)
        if training:
            return replace(batch, each=1.0) if by_targets else batch
        return replace(batch, each=float(batch.size()))

    def _warn_of_padding(self, batch: Batch) -> None:
        """Warn once if micro-batches of different lengths have equal weights in the loss."""
        mask = batch.kwargs.get("attention_mask")
        is_due = not self._has_warned and self.options.is_checked(self.step_count)
        if not is_due or not isinstance(mask, Tensor) or mask.dim() != 2:
            return
        lengths = mask.sum(1).split(max(1, mask.shape[0] // self.options.micro_batches))
        if len({int(part.sum()) for part in lengths}) > 1:
            self._has_warned = True
            logger.warning(
                "micro-batches have different token counts, but their mean losses have "
                "equal weights: the batch has no integer labels to count. Return (sum, count) "
                'from loss_fn, or pass loss_mean="micro_batches" if this is intended'
            )

    def _check_form(self, batch: Batch, training: bool) -> None:
        """Refuse a batch that cannot be split, and a call that the model does not accept."""
        given = (batch.args, batch.targets)
        shapes = [tensor.shape for tensor in tensors((given, batch.kwargs))]
        form = call_key(given, batch.kwargs), shapes
        if (form, training) == self._form_before:
            return  # a call of this form was checked before
        count = self.options.micro_batches
        if count > 1:
            batch.check_totals()
        parts = count if training else batch.most_parts(count)
        part = batch.first(parts)  # also refuses a batch that is too small
        if self.lowering.pipelined is not None:
            self.lowering.pipelined.bind(part.args, part.kwargs, training)
        self._form_before = (form, training)
        self._samples_of_form = batch.samples() if count > 1 else batch.size()

    def _check_places(self, part: Batch, with_loss: bool) -> None:
        """Run the placement check before the first batch trains."""
        check, self.lowering.check_call = self.lowering.check_call, None
        if check is None:
            return
        # The check runs in one process, with inputs that are equal on all tensor-parallel ranks.
        if len(set(gathered(batch_digest(part), self.mesh.get_group("tp")))) > 1:
            logger.info("no placement check of the first batch: tensor-parallel ranks differ in it")
            return

        def loss_of(output: Any) -> Tensor:
            assert self.options.loss_fn is not None, "checked before the batch was loaded"
            returned = self.options.loss_fn(output, part.targets)
            # The sum of (sum, count); the count has no gradient.
            return returned[0] if isinstance(returned, (tuple, list)) else returned

        with self._as_plain():
            all_ranks_or_none(
                "the check of the first batch",
                lambda: check(
                    part.args, part.kwargs, loss_of if with_loss else None, self.options.half
                ),
            )

    def _as_plain(self) -> AbstractContextManager[None]:
        """Context in which fake calls see the model without the wrappers of a library."""
        return nullcontext()

    def _loss_of(self, output: Any, part: Batch) -> Tensor:
        """Compute the loss of a micro-batch, and add it to this step's loss."""
        assert self.options.loss_fn is not None, "checked before the batch was loaded"
        if self._is_idle:
            return torch.zeros((), device=self.device)
        output = part.without_padding(output)
        if self._outputs is not None:
            self._outputs.append(output)
        loss = self._losses.add(self.options.loss_fn(output, part.targets), part.weight)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError(
                "loss_fn returned a loss that does not require a gradient; compute it from the "
                "model's output, without detach() or item(), and check that some parameter "
                "requires a gradient"
            )
        return loss

    def _set_training(self) -> None:
        """Put the model in train mode: ``from_pretrained`` leaves it in eval mode."""
        parts: Sequence[nn.Module] = list(self.lowering.stages.values()) or [self.module]
        if not all(part.training for part in parts):
            logger.warning("the model is in eval mode; train_batch switches it to train mode")
            self.train()

    # --- as a module -------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; not with pipeline stages."""
        self._refuse_pipeline("a call of the engine")
        with self._naming_failures("a call of the engine"):
            part = Batch(args, kwargs, None).cast(self.options.half)
            if torch.is_grad_enabled() and self.module.training:
                self._check_places(part, with_loss=False)
            return self._call(*part.args, **part.kwargs)

    def backward(self, loss: Tensor) -> None:
        """Run backward of the loss of a call; not with pipeline stages.

        Several calls before a `step` accumulate their gradients.
        """
        self._refuse_pipeline("backward()")
        with self._naming_failures("backward()"):
            self._check_backward()
            with self._all_or_nothing():
                self._backward(loss)
        self._backwards += 1

    def step(self) -> None:
        """Run one optimizer step on the gradients of `backward`; not with pipeline stages."""
        self._refuse_pipeline("step()")
        with self._naming_failures("step()"):
            self._check_ready("step()")
            if not self._backwards:
                raise SlapoError("step() has no gradients; call engine.backward(loss) first")
            self._backwards = 0
            with self._all_or_nothing():
                self._step()
            self._refuse_nonfinite()
            self.step_count += 1

    # Pipeline engines do not implement the following: nothing calls them there.
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _check_backward(self) -> None:
        """Refuse a backward whose gradients the library cannot accumulate."""

    def _backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    def _step(self) -> None:
        self._optimizer_step(None)

    def _compares_gradients(self) -> bool:
        """Return whether this step compares gradients over tensor-parallel ranks."""
        is_checked = self.options.check_batches and self.options.is_checked(self.step_count)
        return is_checked and self._tp > 1

    def _compare_gradients(self, gradient_of: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Refuse gradients of replicated parameters that differ, once all have accumulated."""
        if self._compares_gradients():
            found = GradientCheck(self.module, self.mesh.get_group("tp"))
            for name, parameter in found.parameters.items():
                found.note(name, gradient_of(parameter))
            found.compare()

    def _refuse_pipeline(self, what: str) -> None:
        if self.lowering.n_stages > 1:
            raise SlapoError(
                f"{what} would run one of {self.lowering.n_stages} pipeline stages; use "
                "train_batch or eval_batch"
            )

    def _refuse_autocast(self, what: str) -> None:
        """Refuse a surrounding autocast context, which would not cover all stages and losses."""
        if torch.is_autocast_enabled(self.device.type):
            raise SlapoError(
                f"{what} was called inside torch.autocast; call it outside, and pass the compute "
                "dtype to build: autocast= (target 'torch') or dtype="
            )

    # --- failures ----------------------------------------------------------------------------
    def _check_ready(self, what: str) -> None:
        if self.optimizer is None:
            raise SlapoError(f"{what} needs an optimizer; build with optimizer=")
        self._refuse_failed(what)
        if not self.options.is_checked(self.step_count):
            return
        # By name: FSDP2 replaces the Parameter objects.
        named = list(self.module.named_parameters(remove_duplicate=False))
        new = [n for n, p in named if p.requires_grad and n not in self._trained]
        if new:
            raise SlapoError(
                f"{what}: {len(new)} parameters, such as {new[0]}, require gradients that they did "
                "not require when this engine was built, so its optimizer does not update them; "
                "unfreeze parameters and add adapters before slapo.build, or build again"
            )
        frozen = [n for n, p in named if not p.requires_grad and n in self._trained]
        if frozen and not self._may_freeze():
            raise SlapoError(
                f"{what}: {len(frozen)} parameters, such as {frozen[0]}, were frozen after this "
                "engine was built, and would still get gradients of zero and decay; freeze "
                "parameters before slapo.build, or build again"
            )

    def _may_freeze(self) -> bool:
        """Return whether the optimizer leaves out parameters that are frozen after the build."""
        return False

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo a failed step, or refuse further ones."""
        try:
            yield
        except BaseException as error:  # including KeyboardInterrupt
            self._backwards = 0
            if not self._discard_gradients():
                self._failure = f"{type(error).__name__}: {str(error)[:200]}"
            raise

    def _refuse_nonfinite(self) -> None:
        """Raise if a step was skipped for a non-finite gradient and this is to be an error."""
        text, self._nonfinite = self._nonfinite, None
        if text is not None:
            raise on_every_rank(
                SlapoError(
                    f"the gradient norm is {text} at step {self.step_count}, and the parameters "
                    "are unchanged; check the batch and the learning rate, or pass "
                    'nonfinite="skip"'
                )
            )

    def _discard_gradients(self) -> bool:
        """Discard the results of a failed step; return whether that is possible."""
        return False

    # --- state -------------------------------------------------------------------------------
    def held(self) -> list[Held]:
        """This rank's tensors, each once, with their origins in the original model."""
        found = (holdings(m) for m in self.lowering.stages.values() or [self.lowering.model])
        return list({id(item.tensor): item for held in found for item in held}.values())

    def cells(self) -> dict[int, list[Held]]:
        """Tensors that the optimizer steps on: id of a parameter -> its cells on this rank.

        A cell is the parameter itself, a float32 copy, or a range of it in a flat tensor. The state
        of the optimizer has the layout and sharding of the cells.
        """
        if self.optimizer is None:
            return {}
        held = (item for item in self.held() if item.tensor.requires_grad)
        return {id(item.tensor): self._cells_of(item) for item in held}

    def _cells_of(self, held: Held) -> list[Held]:
        """Return the local tensors in which the optimizer keeps a parameter."""
        return [held]

    @contextmanager
    def steppers(self) -> Iterator[list[torch.optim.Optimizer]]:
        """Torch optimizers that run the step, with the cells as their parameters."""
        yield [] if self.optimizer is None else inner_optimizers(self.optimizer)

    def slots_changed(self) -> None:
        """Notify the runtime that the tensors of the optimizer's state were replaced."""

    def fragments(self) -> Iterator[tuple[str, Held]]:
        """Yield each tensor in its highest local precision, and the slots of its optimizer state.

        Yields ``""`` or the name of a slot, and the tensor with its origin in the model.
        """
        cells = self.cells()
        with self.steppers() as steppers:
            state = {id(cell): kept for each in steppers for cell, kept in each.state.items()}
        for item in self.held():
            for cell in cells.get(id(item.tensor), [item]):
                yield "", cell
                for slot, value in state.get(id(cell.tensor), {}).items():
                    if has_form_of(cell.tensor, slot, value):
                        yield slot, replace(cell, tensor=value)

    @property
    def kind(self) -> str:
        """The runtime and its sharding; equal kinds keep optimizer state on the same ranks."""
        raise NotImplementedError

    @property
    def loss_scale(self) -> tuple[float, int] | None:
        """Loss scale for float16, and the steps since it changed; None without one."""
        return None

    def set_loss_scale(self, scale: float, steps: int) -> None:
        """Set the loss scale and its number of steps; only for engines that have one."""

    def save(
        self,
        run: str | os.PathLike[str],
        *,
        data: Any = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> Saving:
        """Save the full training state as ``run/step_00000100``. Every rank has to call this.

        Tensors are saved under the names and in the shapes of the original model, so that another
        layout, engine or schedule can resume.

        Parameters
        ----------
        run
            A folder that all ranks can access; steps that it already holds stay.
        data
            The iterator of batches; the result of its ``state_dict()`` is saved, too.
        keep
            Number of latest steps to keep; older ones are removed once this one is complete.
        wait
            False copies the state and writes it in the background, one save at a time. An error is
            raised by ``result()``, or by the next `save`.

        Returns
        -------
        Saving
            With ``step``, ``path``, ``done()`` and ``result()``.

        Raises
        ------
        SlapoError
            If a tensor has no original, ranks were given different folders, or the step is saved
            already; on every rank, and nothing is overwritten.
        OSError
            If a file cannot be written; training can continue.
        """
        with self._naming_failures("engine.save"):
            self.check_between_steps("engine.save")
            previous, self._saving = self._saving, None
            if previous is not None:
                previous.result()
            self._saving = save(self, run, data, keep, wait, previous)
            return self._saving

    def load(
        self, run_or_step: str | os.PathLike[str], *, data: Any = None, only: str | None = None
    ) -> Resumed:
        """Resume from a step of `save`, at any layout and on any engine. Every rank calls this.

        Parameters
        ----------
        run_or_step
            The folder of a run, whose last complete step is loaded, or of one step in it.
        data
            Its state is restored by ``load_state_dict(state)``; if the number of replicas changed,
            by ``seek(samples)``.
        only
            ``"weights"`` leaves the optimizer, the scheduler, the step and random states unchanged.

        Returns
        -------
        Resumed
            ``step``, ``samples`` that all replicas have trained on, and ``notes`` on state that
            cannot be restored, such as random states at another layout.

        Raises
        ------
        SlapoError
            If there is no complete step, or it is of another model, optimizer or format, or is
            damaged; on every rank, before anything changes.
        """
        with self._naming_failures("engine.load"):
            self.check_between_steps("engine.load")
            if self._saving is not None:
                self._saving.result()
            try:
                return load(self, run_or_step, data, only)
            except HalfLoadedError as error:
                self._failure = str(error)
                raise

    def saving_group(self) -> dist.ProcessGroup | None:
        """Group of all ranks for a thread that saves. The first call is a collective."""
        if self._saving_group is None:
            # A group of its own: the thread's collectives run while training uses the other groups,
            # on which ranks could pair them differently.
            self._saving_group = handle_of(dist.new_group(backend="gloo"))
        return self._saving_group.group

    def check_between_steps(self, what: str) -> None:
        """Refuse an engine whose last step has failed or is unfinished."""
        self._refuse_failed(what)
        if self._backwards:
            raise SlapoError(
                f"{what}: {self._backwards} earlier backward() calls were not followed by step(), "
                "which has to use up their gradients; call step() first"
            )

    def _refuse_failed(self, what: str) -> None:
        if self._failure is not None:
            raise SlapoError(
                f"{what}: an earlier step failed with {self._failure} and left partial results in "
                "this engine; build a new engine, and load the last saved step"
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank."""
        return self.module.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Tensors of this rank by their names in the model."""
        return self.lowering.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy values into this rank's tensors, by their names in the model.

        The optimizer continues from them, even where it keeps copies in float32. Its own state is
        unchanged.

        Parameters
        ----------
        state
            A dict like that of `state_dict` on this rank; names of other stages are ignored.
        strict
            Require a value for every tensor, and a tensor for every value.

        Raises
        ------
        ValueError
            If names or shapes do not fit; nothing is changed then.
        """
        self.lowering.load_state_dict(state, strict)
        self.renew_masters()

    def renew_masters(self) -> None:
        """Update the optimizer's copies of parameters from the parameters."""

    def fill_masters(self, loader: Loader) -> None:
        """Read weights again into float32 copies, if the model's dtype has rounded them."""
        if loader.has_rounded:
            cells = (cell for kept in self.cells().values() for cell in kept)
            loader.fill(cell for cell in cells if cell.tensor.dtype == torch.float32)

    def train(self, mode: bool = True) -> Engine:
        """Set the training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the eval mode."""
        return self.train(False)

    @property
    def stage_indices(self) -> Sequence[int]:
        """Stages of this rank; stage 0 alone without a pipeline."""
        return tuple(self.lowering.stages) or (0,)

    def __repr__(self) -> str:
        place = {dim: self.mesh.get_local_rank(dim) for dim in DIMS}
        return (
            f"<{type(self).__name__} on mesh {tuple(self.mesh.shape)}, {place}, "
            f"stages {list(self.stage_indices)} of {self.lowering.n_stages}>"
        )
