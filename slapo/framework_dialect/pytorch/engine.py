"""The engine without pipeline stages, and what both engines share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.framework_dialect.agreement import all_ranks_or_none
from slapo.framework_dialect.batches import MicroBatch
from slapo.framework_dialect.gradients import (
    TiedGradients,
    clip_gradients,
    global_norm,
    mean_loss,
)
from slapo.framework_dialect.pytorch.data_parallel import (
    replicate,
    sequence_parallel_parameters,
    shard_parameters,
    without_sync,
)
from slapo.framework_dialect.pytorch.options import TorchOptions
from slapo.framework_dialect.runtime import Engine, Lowering
from slapo.mesh import group_of
from slapo.pipeline.boundaries import autocasting


class TorchEngineBase(Engine):
    """Optimizer step with clipping over all ranks."""

    options: TorchOptions

    def __init__(self, lowering: Lowering, options: TorchOptions) -> None:
        super().__init__(lowering, options)
        self.module.to(self.device)
        #: the norm of the whole model's gradient at the last step; None unless it is clipped
        self.grad_norm: Tensor | None = None
        self.scheduler: Any = None
        self._partial_sums: TiedGradients | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shares out the parameters."""
        return self.options.data_parallel == "fsdp"

    def _make_optimizer(self) -> None:
        """Once parameters are what they stay."""
        # The user's functions may fail on one rank only, where they see other parameters.
        all_ranks_or_none("the optimizer", self._call_factories)

    def _call_factories(self) -> None:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if not parameters:  # a stage that trains nothing, and optimizers that want something
            parameters = [nn.Parameter(torch.zeros(0, device=self.device))]
        if self.options.optimizer is not None:
            self.optimizer = self.options.optimizer(parameters)
        if self.options.lr_scheduler is not None:
            self.scheduler = self.options.lr_scheduler(self.optimizer)

    def _sum_sequence_parallel(self) -> None:
        """FSDP2 puts other tensors in place of those that carry the summing hook."""
        group = self.lowering.tp_group
        if not self.is_sharded or group is None or group.size() == 1:
            return
        if self._partial_sums is None:
            partial = sequence_parallel_parameters(self.module)
            self._partial_sums = TiedGradients([[p] for p in partial], [group] * len(partial))
        self._partial_sums.reduce()

    def _is_counted(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter counts here in the norm of the whole model's gradient."""
        return True

    def _optimizer_step(self) -> None:
        self._sum_sequence_parallel()
        limit = self.options.clip_grad_norm
        if limit is not None:
            parameters = list(self.module.parameters())
            self.grad_norm = global_norm(
                parameters,
                tp_group=self.lowering.tp_group,
                pp_group=group_of(self.mesh, "pp"),
                shard_group=group_of(self.mesh, "dp") if self.is_sharded else None,
                counted=self._is_counted,
            )
            clip_gradients(parameters, limit, self.grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()


class TorchEngine(TorchEngineBase):
    """DDP or FSDP2 around a model that runs in one piece."""

    def __init__(self, lowering: Lowering, options: TorchOptions) -> None:
        super().__init__(lowering, options)
        extra = dict(options.data_parallel_options or {})
        #: what is called: the model, under DDP where there are replicas
        self.runner: nn.Module = self.module
        if self.is_sharded:
            shard_parameters(self.module, self.mesh, extra)
        else:
            self.runner = replicate(self.module, self.mesh, extra)
        self._make_optimizer()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with autocasting(self.device, self.options.autocast):
            return self.runner(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _explained(self, error: RuntimeError) -> Exception:
        if "finished reduction in the prior iteration" not in str(error):
            return error
        return SlapoError(
            "DDP misses gradients of parameters that the model did not use; build with "
            'data_parallel_options={"find_unused_parameters": True}, or freeze them'
        )

    def _step(self) -> None:
        self._optimizer_step()

    def _train(self, micro_batches: list[MicroBatch]) -> Tensor:
        total = torch.zeros((), device=self.device)
        *first, last = micro_batches
        with without_sync(self.runner):
            for part in first:
                total += self._forward_backward(part, len(micro_batches))
        total += self._forward_backward(last, len(micro_batches))
        self._optimizer_step()
        return mean_loss(total, self.mesh)

    def _forward_backward(self, part: MicroBatch, count: int) -> Tensor:
        loss = self._loss(part) / count
        loss.backward()
        return loss.detach().float()

    def _eval(self, micro_batches: list[MicroBatch]) -> Tensor:
        losses = [self._loss(part).detach().float() for part in micro_batches]
        return mean_loss(torch.stack(losses).mean(), self.mesh)

    def _loss(self, part: MicroBatch) -> Tensor:
        with autocasting(self.device, self.options.autocast):
            try:
                output = self.runner(*part.args, **part.kwargs)
            except RuntimeError as error:
                raise self._explained(error) from None
            return self._loss_of(output, part.targets)
