"""DeepSpeed engines behind the interface that all runtimes share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from slapo.agreement import all_ranks_or_none, on_every_rank
from slapo.errors import SlapoError
from slapo.framework_dialect.batches import Batch
from slapo.framework_dialect.deepspeed.config import DeepSpeedOptions, zero_of
from slapo.framework_dialect.deepspeed.initialize import whole_norm
from slapo.framework_dialect.deepspeed.load import quiet_warnings
from slapo.framework_dialect.deepspeed.shares import Share, shares_of
from slapo.framework_dialect.engine import Engine
from slapo.framework_dialect.gradient_check import GradientCheck
from slapo.framework_dialect.gradients import scale_gradients
from slapo.framework_dialect.optimizers import inner_optimizers
from slapo.framework_dialect.replica_use import calls_differ, refuse_unlike_use, used_in
from slapo.framework_dialect.runtime import Lowering
from slapo.weights.holdings import Held, HeldRange


class DeepSpeedEngine(Engine):
    """Base of the engines with and without a pipeline; `engine` is DeepSpeed's own."""

    options: DeepSpeedOptions

    #: DeepSpeed's own engine, set by `drive`
    engine: Any = None

    #: ids of parameters with gradients, in a step that compares them; else None
    _with_gradient: set[int] | None = None

    _calls_differ = False

    #: gradients of replicated parameters, in a step that compares them; else None
    _replicated: GradientCheck | None = None

    def __init__(self, lowering: Lowering, options: DeepSpeedOptions) -> None:
        self.zero: int = zero_of(options.config)
        super().__init__(lowering, options)

    def drive(self, engine: Any) -> None:
        """Attach DeepSpeed's engine, which is created with this engine's loss."""
        self.engine = engine
        self.optimizer = engine.optimizer if self.options.has_optimizer else None
        self.scheduler = engine.lr_scheduler
        if self.zero == 3:
            self._gathering_group = self.mesh.get_group("dp")
            # Under ZeRO-3 parameters have no shape, and modules lack the tables of ordinary ones.
            self.lowering.check_call = None
        if self.options.nonfinite != "step" and hasattr(engine.optimizer, "check_grad_overflow"):
            engine.optimizer.check_grad_overflow = True

    def _check_model(self) -> None:
        if self.zero == 3:
            self._refuse_scalars("deepspeed: ZeRO stage 3", "zero=2")
        if self.zero and self.options.has_optimizer and not self.lowering.trainable():
            raise SlapoError(
                "deepspeed: no parameter on this rank needs a gradient, but ZeRO stage "
                f"{self.zero} needs at least one on every rank; pass zero=0, or cut the stages so "
                "that each trains parameters"
            )

    def loss_of_labels(self, output: Any, part: Batch) -> Tensor:
        """Loss function for DeepSpeed, which divides the result by the number of micro-batches."""
        loss = self._loss_of(output, part)
        return loss * self.options.micro_batches if torch.is_grad_enabled() else loss

    @contextmanager
    def _noting_gradients(self) -> Iterator[None]:
        """Note gradients on their way into DeepSpeed's buffers, in steps that compare them.

        ZeRO 1 and 2 pack the gradients that exist into one buffer, and sum buffers. If replicas use
        different parameters, such as experts, gradients of different parameters would be summed.
        """
        handles = []
        if (
            hasattr(self.engine.optimizer, "ipg_buckets")
            and self._dp > 1
            and (self._calls_differ or self.options.is_checked(self.step_count))
        ):
            self._with_gradient = noted = self._with_gradient or set[int]()
            for _, parameter in self.lowering.trainable():
                key = id(parameter)
                handles.append(parameter.register_hook(lambda _, key=key: noted.add(key)))
        if self._compares_gradients():
            if self._replicated is None:
                self._replicated = GradientCheck(self.module, self.mesh.get_group("tp"))
            for name, parameter in self._replicated.parameters.items():
                handles.append(parameter.register_hook(partial(self._replicated.note, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_gradients(self) -> None:
        noted_here, self._with_gradient = self._with_gradient, None
        replicated, self._replicated = self._replicated, None
        if noted_here is not None:
            all_ranks_or_none("train_batch", lambda: self._check_use(noted_here))
        if replicated is not None:
            replicated.compare()

    def _check_use(self, used: set[int]) -> None:
        remedy = (
            f"ZeRO stage {self.zero} would add their gradients to other parameters'; "
            "pass zero=0, or target='torch'"
        )
        refuse_unlike_use(self.lowering.trainable(), used, self.mesh.get_group("dp"), remedy)

    @contextmanager
    def _scaled(self, scale: Tensor | None) -> Iterator[None]:
        """Context of a step of DeepSpeed's optimizer on gradients multiplied by `scale`."""
        optimizer = self.engine.optimizer
        if scale is None:
            yield
        elif hasattr(optimizer, "fp32_groups_gradients_flat"):
            for flat in optimizer.fp32_groups_gradients_flat:
                flat.mul_(scale.to(flat.dtype))
            yield
        elif hasattr(optimizer, "loss_scaler"):
            # Its buffers hold shards of gradients, which it divides by the loss scale.
            own = optimizer.custom_loss_scaler, optimizer.external_loss_scale
            wanted = optimizer.loss_scale / float(scale)
            optimizer.custom_loss_scaler, optimizer.external_loss_scale = True, wanted
            try:
                yield
            finally:
                optimizer.custom_loss_scaler, optimizer.external_loss_scale = own
        else:
            scale_gradients(self.parameters(), scale)
            yield

    @contextmanager
    def _stepping(self, scale: Tensor | None) -> Iterator[None]:
        """Context of a step of DeepSpeed's optimizer, which non-finite gradients may cancel."""
        self._check_gradients()
        optimizer = self.engine.optimizer
        # ZeRO checks gradients by itself.
        looks = self.options.nonfinite != "step" and not hasattr(optimizer, "overflow")
        with self._scaled(scale), self._left_out() if looks else nullcontext():
            yield
        self.was_step_applied = self.engine.was_step_applied()
        if self.options.nonfinite == "error" and getattr(optimizer, "overflow", False):
            self._nonfinite = "not finite"  # ZeRO has checked, and skipped the step

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        norm, optimizer = whole_norm(self.engine), self.engine.optimizer
        if norm.isfinite():
            yield
            return
        if self.options.nonfinite == "error":
            self._nonfinite = str(float(norm))
        step = optimizer.step
        # DeepSpeed reads this attribute, and then skips the scheduler's step too.
        optimizer.step, optimizer.overflow = lambda: None, True
        try:
            yield
        finally:
            optimizer.step = step
            del optimizer.overflow

    def _take_norm(self) -> None:
        if self.options.clip_grad_norm is not None:
            norm = self.engine.get_global_grad_norm()
            self.grad_norm = None if norm is None else torch.as_tensor(norm, device=self.device)

    def renew_masters(self) -> None:
        refresh = getattr(self.engine.optimizer, "refresh_fp32_params", None)
        if refresh is not None:
            refresh()

    def _cells_of(self, held: Held) -> list[Held]:
        own, parameter = self.engine.optimizer, cast(Any, held.tensor)
        # Flat copies of ZeRO 1 and 2, or of a pipeline in bfloat16.
        flats = getattr(own, "single_partition_of_fp32_groups", None) or getattr(
            own, "fp32_groups_flat_partition", None
        )
        if flats is not None:
            there = parameter._hp_mapping
            if there is None:
                return []  # entirely on other ranks
            part, cell = there.lp_fragment_address, there.hp_fragment_address
            flat = flats[there.param_group_index]
            return [HeldRange.of(held, flat, part.start, cell.start, cell.numel)]
        return [held]

    @contextmanager
    def steppers(self) -> Iterator[list[torch.optim.Optimizer]]:
        own = None if self.optimizer is None else self.engine.optimizer
        yield [] if own is None else inner_optimizers(getattr(own, "optimizer", own))

    def slots_changed(self) -> None:
        link = getattr(self.engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            link()

    @property
    def kind(self) -> str:
        return f"deepspeed, ZeRO {self.zero}"

    @property
    def loss_scale(self) -> tuple[float, int] | None:
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        if self.options.half is not torch.float16 or scaler is None:
            return None
        return float(scaler.cur_scale), scaler.cur_iter - scaler.last_overflow_iter - 1

    def set_loss_scale(self, scale: float, steps: int) -> None:
        scaler = self.engine.optimizer.loss_scaler
        scaler.cur_scale, scaler.last_overflow_iter = scale, scaler.cur_iter - steps - 1


class ZeroEngine(DeepSpeedEngine):
    """``DeepSpeedEngine`` without pipeline: ZeRO 0 to 3."""

    #: true if this backward reduces gradients, for a step right after it
    _is_last_part = True

    def state_dict(self) -> dict[str, Any]:
        """Tensors of this rank by their names in the model; a collective under ZeRO-3."""
        if self.zero < 3:
            return super().state_dict()
        with self._gathered():
            return {name: t.detach().clone() for name, t in super().state_dict().items()}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        if self.zero < 3:
            super().load_state_dict(state, strict)
            return
        with self._gathered(writes=True):
            self.lowering.load_state_dict(state, strict)
        self.renew_masters()

    def held(self) -> list[Held]:
        held = super().held()
        if self.zero < 3:
            return held
        kept = [t for h in held if hasattr(t := cast(Any, h.tensor), "ds_tensor")]
        whole = [t for t in kept if t.ds_status.name == "AVAILABLE"]
        if whole:  # small ones stay gathered, which would hide new values of their shards
            whole[0].partition(whole)
        return shares_of(held, self.mesh.get_local_rank("dp"))

    def _cells_of(self, held: Held) -> list[Held]:
        if not isinstance(held, Share):
            return super()._cells_of(held)
        own = self.engine.optimizer
        group, at, _ = own.grad_position[own.get_param_id(held.tensor)]
        flat = own.fp32_partitioned_groups_flat[group]
        return [HeldRange.of(held, flat, held.start, at, held.count)]

    @contextmanager
    def steppers(self) -> Iterator[list[torch.optim.Optimizer]]:
        own = self.engine.optimizer
        is_divided = self.zero == 3 and self.optimizer is not None
        if is_divided:  # it holds its parameters only during a step
            own._set_fp32_optimizer_param_groups()
        try:
            with super().steppers() as steppers:
                yield steppers
        finally:
            if is_divided:
                own._clear_fp32_optimizer_param_groups()

    def renew_masters(self) -> None:
        super().renew_masters()
        if self.zero == 3 and self.optimizer is not None:
            from deepspeed.utils import safe_set_local_fp32_param  # optional package

            parameters: Any = self.parameters()
            for parameter in parameters:
                if parameter.requires_grad:
                    safe_set_local_fp32_param(parameter, parameter.ds_tensor.float())

    @contextmanager
    def _gathered(self, writes: bool = False) -> Iterator[None]:
        import deepspeed  # optional package

        parameters = list(self.parameters())
        rank = 0 if writes else None
        with quiet_warnings(), deepspeed.zero.GatheredParameters(parameters, modifier_rank=rank):
            yield

    def _among_replicas(self, batch: Batch, training: bool = False) -> AbstractContextManager[None]:
        shares = self.zero > 0 and self._dp > 1
        self._calls_differ = shares and calls_differ(batch, self.mesh.get_group("dp"))
        if self._calls_differ and self.zero == 3:
            raise on_every_rank(
                SlapoError(
                    "replicas call the model with different arguments, and ZeRO stage 3 gathers "
                    "the parameters that each call needs; pass zero=0, or target='torch' with "
                    'data_parallel="fsdp"'
                )
            )
        return nullcontext()

    def _forward_backward(self, batch: Batch) -> None:
        self._among_replicas(batch, training=True)
        parts = batch.cut(self.options.micro_batches)
        for number, part in enumerate(parts, 1):
            self._is_last_part = number == len(parts)
            self._backward(self._loss(part))
            # DeepSpeed counts micro-batches in step(), and updates nothing before the last one.
            if not self._is_last_part:
                with quiet_warnings():
                    self.engine.step()

    def _optimizer_step(self, scale: Tensor | None) -> None:
        with quiet_warnings(), self._stepping(scale):
            self.engine.step()
        self._take_norm()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._set_boundary()
        with quiet_warnings():
            return self.engine(*args, **kwargs)

    def _check_backward(self) -> None:
        if self._backwards and self.zero:
            raise SlapoError(
                "deepspeed: the previous backward() was not followed by step(), and ZeRO stage "
                f"{self.zero} reduces gradients in backward; call step() after each, or "
                "use train_batch with micro_batches"
            )

    def _backward(self, loss: Tensor) -> None:
        self._set_boundary()
        # The loss of a micro-batch is weighted already.
        with quiet_warnings(), self._noting_gradients():
            if self._with_gradient is not None and self._is_last_part:
                # This backward reduces gradients, which replicas must have for the same parameters.
                self._check_use(self._with_gradient | used_in(loss))
            self.engine.backward(loss, scale_wrt_gas=False)

    def _set_boundary(self) -> None:
        from deepspeed.utils import groups  # optional package

        # A global of DeepSpeed, which another engine may have set.
        groups.mpu = self.engine.mpu
        self.engine.set_gradient_accumulation_boundary(self._is_last_part)


class PipeEngine(DeepSpeedEngine):
    """``PipelineEngine`` over stages."""

    _form: Any = None

    def drive(self, engine: Any) -> None:
        super().drive(engine)
        engine.around_step = self._around_step

    def _train(self, batch: Batch) -> Tensor:
        with quiet_warnings(), self._noting_gradients():
            self.engine.train_batch(self._data(batch, self.options.micro_batches))
        self._take_norm()
        return self._mean.loss()

    @contextmanager
    def _around_step(self) -> Iterator[None]:
        """Context of the optimizer's step, entered once all gradients are complete."""
        self._mean = self._begin_mean()
        with self._stepping(self._mean.scale()):
            yield

    def _evaluate(self, batch: Batch, parts: int) -> None:
        with quiet_warnings():
            self.engine.eval_batch(
                self._data(batch, parts),
                reduce_output=None,
                bcast_loss=False,
                num_micro_batches=parts,
            )

    def _data(self, batch: Batch, parts: int) -> Any:
        """Micro-batches in DeepSpeed's form: tensors of the first stage, and labels."""
        cut, model = batch.cut(parts, pads=True), self.lowering.pipeline
        inputs = [model.inputs.take(part.args, part.kwargs) for part in cut]
        form = [(tensor.shape, tensor.dtype) for tensor in inputs[0]]
        if form != self._form:
            self.engine.reset_activation_shape()
            self._form = form
        # Not the targets: DeepSpeed would treat a nest of tensors as a tuple of them.
        return iter(list(zip(inputs, cut, strict=True)))
