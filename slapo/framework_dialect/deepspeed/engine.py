"""A DeepSpeed engine behind the interface that all runtimes share."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from slapo.errors import SlapoError
from slapo.framework_dialect.batches import MicroBatch
from slapo.framework_dialect.deepspeed.config import Settings
from slapo.framework_dialect.deepspeed.package import quiet_warnings
from slapo.framework_dialect.gradients import mean_loss
from slapo.framework_dialect.runtime import (
    Engine,
    LossFn,
    Lowering,
    TrainingOptions,
    one_number,
)


class Labels:
    """Targets in a shell: DeepSpeed would take a nest of tensors for a tuple of them."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets


def loss_of_labels(loss_fn: LossFn) -> LossFn:
    """`loss_fn` for :class:`Labels`, in float32: losses are added up, and bfloat16 is coarse.

    Examples
    --------
    >>> loss_of_labels(lambda output, target: output - target)(torch.tensor(3), Labels(1))
    tensor(2.)
    """
    return lambda output, labels: one_number(loss_fn(output, labels.targets))


class DeepSpeedEngine(Engine):
    """What the engines with and without a pipeline have in common.

    Attributes
    ----------
    engine
        DeepSpeed's own.
    """

    def __init__(
        self, engine: Any, lowering: Lowering, options: TrainingOptions, settings: Settings
    ) -> None:
        super().__init__(lowering, options)
        self.engine, self.settings = engine, settings
        self.optimizer = engine.optimizer if settings.has_optimizer else None

    def _check_call(self, part: MicroBatch) -> None:
        super()._check_call(part)
        fixed = self.settings.micro_batch_size
        leaves = pytree.tree_leaves((part.args, part.kwargs))
        sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        if fixed is not None and sizes and sizes != {fixed}:
            raise ValueError(
                f"deepspeed: the config fixes micro-batches of {fixed} samples, and this batch, "
                f"cut in {self.settings.micro_batches}, makes some of {sizes.pop()}; leave "
                "train_batch_size and train_micro_batch_size_per_gpu out of the config, and "
                "batches may have any size"
            )


class ZeroEngine(DeepSpeedEngine):
    """``DeepSpeedEngine`` without pipeline: ZeRO 0 to 3."""

    _unused_backwards = 0

    def state_dict(self) -> dict[str, Any]:
        """This rank's tensors by their names in the model; under ZeRO-3 a collective."""
        if self.settings.zero < 3:
            return super().state_dict()
        import deepspeed  # optional package

        with quiet_warnings(), deepspeed.zero.GatheredParameters(list(self.parameters())):
            return {name: t.detach().clone() for name, t in super().state_dict().items()}

    def _train(self, micro_batches: list[MicroBatch]) -> Tensor:
        self._refuse_pending()
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(micro_batches, 1):
            self._set_boundary(number == len(micro_batches))
            loss = self._loss(part)
            total += loss.detach()
            with quiet_warnings():
                self.engine.backward(loss)
                self.engine.step()
        return mean_loss(total / len(micro_batches), self.mesh)

    def _eval(self, micro_batches: list[MicroBatch]) -> Tensor:
        losses = [self._loss(part) for part in micro_batches]
        return mean_loss(torch.stack(losses).mean(), self.mesh)

    def _loss(self, part: MicroBatch) -> Tensor:
        assert self.options.loss_fn is not None, "checked when the batch was loaded"
        output = self._run(*part.args, **part.kwargs)
        return self._loss_of(output, part.targets)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._set_boundary(True)
        return self._run(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        if self.settings.zero:
            self._refuse_pending()
        self._set_boundary(True)
        # Micro-batches are those of train_batch; here the caller's loss is the whole.
        with quiet_warnings():
            self.engine.backward(loss, scale_wrt_gas=False)
        self._unused_backwards += 1

    def _step(self) -> None:
        with quiet_warnings():
            self.engine.step()
        self._unused_backwards = 0

    def _refuse_pending(self) -> None:
        if self._unused_backwards:
            raise SlapoError(
                "deepspeed: a backward() before has not been followed by step(), and ZeRO stage "
                f"{self.settings.zero} reduces gradients in backward; call step() after each, or "
                "use train_batch, which cuts the batch in micro_batches"
            )

    def _set_boundary(self, is_last: bool) -> None:
        """Say whether gradients are reduced in this backward, and used in the step after it."""
        from deepspeed.utils import groups  # optional package

        # A global of DeepSpeed, in which another engine may have left its own.
        groups.mpu = self.engine.mpu
        self.engine.set_gradient_accumulation_boundary(is_last)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with quiet_warnings():
            return self.engine(*args, **kwargs)


class PipeEngine(DeepSpeedEngine):
    """``PipelineEngine`` over stages."""

    _form: Any = None

    def _train(self, micro_batches: list[MicroBatch]) -> Tensor:
        with quiet_warnings():
            loss: Tensor = self.engine.train_batch(self._data(micro_batches))
        return loss.reshape(())

    def _eval(self, micro_batches: list[MicroBatch]) -> Tensor:
        with quiet_warnings():
            loss: Tensor = self.engine.eval_batch(self._data(micro_batches))
        return loss.reshape(())

    def _data(self, micro_batches: list[MicroBatch]) -> Any:
        """Micro-batches as DeepSpeed takes them: tensors of the first stage, and labels."""
        model = self.lowering.pipelined
        assert model is not None, "lowered as a pipeline"
        inputs = [model.bind(part.args, part.kwargs) for part in micro_batches]
        form = [(tensor.shape, tensor.dtype) for tensor in inputs[0]]
        if form != self._form:
            self.engine.reset_activation_shape()
            self._form = form
        labels = [Labels(part.targets) for part in micro_batches]
        return iter(list(zip(inputs, labels, strict=True)))
