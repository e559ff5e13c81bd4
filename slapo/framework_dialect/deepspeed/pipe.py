"""DeepSpeed's pipeline over existing stages, with corrections. Imports DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor, nn

from slapo.framework_dialect.boundary_codec import (
    WIRE_DTYPE,
    BufferLayout,
    anchored,
    pack,
    unpack,
)
from slapo.framework_dialect.deepspeed.initialize import check_output
from slapo.framework_dialect.deepspeed.load import quiet
from slapo.framework_dialect.replicas import SharedParameter
from slapo.framework_dialect.runtime import Lowering
from slapo.mesh import set_timeout, timeout_of_job
from slapo.pipeline import PipelinedModule, Stage
from slapo.pipeline.boundaries import describe_tensors
from slapo.utils.calls import as_call

LossFn = Callable[[Any, Any], Tensor]


class StageLayer(nn.Module):
    """A stage as a layer of ``PipelineModule``: takes and returns buffers.

    `arriving` and `leaving` are the layouts of the boundaries before and after it. The sending
    stage decides its own in the first micro-batch of a form, and sends it to the next stage.
    """

    def __init__(self, stage: Stage, n_stages: int) -> None:
        super().__init__()
        self.stage = stage
        self.is_last = stage.index == n_stages - 1
        self.anchor: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Reset, so that boundaries may have another form."""
        self.arriving: BufferLayout | None = None
        self.leaving: BufferLayout | None = None

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        tensors = (inputs,) if isinstance(inputs, Tensor) else inputs
        if self.stage.index > 0:
            assert self.arriving is not None, "received before the tensors"
            tensors, self.anchor = unpack(self.arriving, tensors[0])
        output = self.stage(*tensors)
        if self.is_last:
            return check_output(output)
        if self.leaving is None:
            self.leaving = BufferLayout(describe_tensors(self.stage.sent, output))
        sent = pack(self.leaving, output, self.anchor)
        # DeepSpeed runs a backward in every stage, even if it trains nothing.
        return sent.requires_grad_() if torch.is_grad_enabled() else sent


class StagePipeline(PipelineModule):
    """A ``PipelineModule`` of existing stages, one for each pipeline rank.

    With `keeps_modes`, DeepSpeed's engine does not set train mode for each batch.
    """

    keeps_modes = False

    def __init__(
        self,
        lowering: Lowering,
        topology: Any,
        loss_fn: LossFn,
        shared: Sequence[SharedParameter],
        keeps_modes: bool = False,
    ) -> None:
        (stage,) = lowering.stages.values()
        layer = StageLayer(stage, lowering.n_stages)
        # PipelineModule assigns one layer to each stage by "uniform", and uses only that of this
        # rank.
        layers: list[nn.Module] = [nn.Identity() for _ in range(lowering.n_stages)]
        layers[stage.index] = layer
        with quiet():
            super().__init__(
                layers,
                topology=topology,
                loss_fn=lambda output, labels: anchored(loss_fn(output, labels), layer.anchor),
                partition_method="uniform",
            )
        self.layer, self.keeps_modes = layer, keeps_modes
        for group in vars(self._grid).values():
            if isinstance(group, dist.ProcessGroup):
                set_timeout(timeout_of_job(), group)
        self._ties: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        for one in shared:
            (parameter,) = one.copies
            if parameter.requires_grad and one.group is not None:
                self._ties.append((parameter, one.group))
                # The gradient's norm must count it once.
                parameter.ds_pipe_replicated = not one.is_counted  # type: ignore[attr-defined]

    def train(self, mode: bool = True) -> StagePipeline:
        """Set the mode, unless it is kept."""
        return self if self.keeps_modes else super().train(mode)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Tied parameters, whose gradients DeepSpeed sums before it averages them over replicas."""
        return self._ties


class StagePipelineEngine(PipelineEngine):
    """DeepSpeed's pipeline engine with corrections; see :meth:`adopt`."""

    _trains: bool | None = None

    #: converts inputs of a micro-batch to tensors of the first stage; None if they are these
    #: already
    bind: Callable[[Any], tuple[Tensor, ...]] | None = None

    #: context of the optimizer's step, entered once all gradients are complete
    around_step: Callable[[], AbstractContextManager[None]] | None = None

    @classmethod
    def adopt(cls, engine: PipelineEngine) -> StagePipelineEngine:
        """Give an engine of ``deepspeed.initialize`` the methods of this class."""
        # deepspeed.initialize cannot create engines of another class.
        engine.__class__ = cls
        _tolerate_no_gradients(engine.optimizer)
        return engine

    def bind_inputs_of(self, pipelined: PipelinedModule) -> None:
        """Convert the inputs of batches, which are those of the model, to tensors."""

        def bind(inputs: Any) -> tuple[Tensor, ...]:
            call = as_call(inputs, "the inputs of a batch")
            return pipelined.bind(*call, training=bool(self.module.training))

        self.bind = bind

    @property
    def layer(self) -> StageLayer:
        """Layer of this rank's stage."""
        return self.module.layer

    # --- one batch -------------------------------------------------------------------------------
    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Same as DeepSpeed's: takes the micro-batches from `data_iter` one by one."""
        self._prepare(trains=True)
        loss = super().train_batch(data_iter)
        self.layer.anchor = None  # it would keep the last buffer
        return loss

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Same as DeepSpeed's."""
        self._prepare(trains=False)
        return super().eval_batch(*args, **kwargs)

    def _prepare(self, trains: bool) -> None:
        # DeepSpeed keeps groups in module globals, which another engine may have set.
        deepspeed_groups.mpu = self.mpu
        if self.is_pipe_parallel:
            p2p.init_process_groups(self.grid)
        if self._trains is not trains:
            # Without gradients a boundary has another form.
            self.reset_activation_shape()
            self._trains = trains

    def reset_activation_shape(self) -> None:
        """Reset, so that micro-batches may have another form."""
        super().reset_activation_shape()
        self.layer.forget()

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        with nullcontext() if self.around_step is None else self.around_step():
            super()._exec_optimizer_step(lr_kwargs)

    def _aggregate_total_loss(self) -> Any:
        # The context around the step has sent the loss to all ranks.
        return None if self.around_step is not None else super()._aggregate_total_loss()

    def _next_batch(self) -> Any:
        batch = super()._next_batch()
        if self.bind is None or not self.is_first_stage():
            return batch
        return (self.bind(batch[0]), *batch[1:])

    # --- what crosses boundaries -----------------------------------------------------------------
    def _send_tensor_meta(self, buffer: Tensor, recv_stage: int) -> None:
        there = self.grid.stage_to_global(stage_id=recv_stage)
        dist.send_object_list([self.layer.leaving], there, device=self.device)

    def _recv_tensor_meta(self, send_stage: int) -> Tensor:
        received: list[Any] = [None]
        there = self.grid.stage_to_global(stage_id=send_stage)
        dist.recv_object_list(received, there, device=self.device)
        layout = self.layer.arriving = received[0]
        return torch.empty(layout.shape, dtype=WIRE_DTYPE, device=self.device)

    _INSTRUCTION_MAP: ClassVar = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.OptimizerStep: _exec_optimizer_step,
    }


def _tolerate_no_gradients(optimizer: Any) -> None:
    """Let a rank without counted parameters add zero to the gradient's norm.

    The second tensor-parallel rank of a stage that shards nothing is such a rank. DeepSpeed's
    bfloat16 optimizer would fail on it, and the other ranks would wait.
    """
    original = getattr(optimizer, "get_grads_for_norm", None)
    if original is None:
        return

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        found = original(for_clipping)
        if not for_clipping and not found[0]:
            device = optimizer.fp32_groups_gradients_flat[0].device
            return [torch.zeros(1, device=device)], found[1]
        return found

    optimizer.get_grads_for_norm = get_grads_for_norm
