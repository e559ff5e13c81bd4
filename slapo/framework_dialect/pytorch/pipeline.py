"""The engine with pipeline stages, on ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.torch_version import TorchVersion

from slapo.agreement import on_every_rank
from slapo.errors import SlapoError
from slapo.framework_dialect.batches import Batch
from slapo.framework_dialect.boundary_codec import BufferLayout, anchored, pack, unpack
from slapo.framework_dialect.gradients import reduce_gradients, sum_copies
from slapo.framework_dialect.pytorch.engine import TorchEngineBase
from slapo.framework_dialect.pytorch.options import TorchOptions
from slapo.framework_dialect.replicas import share_copies
from slapo.framework_dialect.runtime import Lowering
from slapo.pipeline import Stage
from slapo.pipeline.boundaries import Boundary, autocasting, describe_tensors

#: Number of torch schedules kept, for shapes of micro-batches in training and evaluation.
_RUNS_KEPT = 4


#: Before 2.12, torch asks for the gradient of every tensor that a stage receives.
_SENDS_FLOATS_ONLY = TorchVersion(torch.__version__) < "2.12"


class StageRunner(nn.Module):
    """A stage as ``PipelineStage`` calls it; the last one also computes the loss.

    So the logits of a micro-batch are freed once its loss is computed, and the pipeline returns
    only losses. The pipeline's inputs are micro-batch indices, by which the first stage looks up
    its tensors: torch would split these along the first axis.
    """

    def __init__(
        self,
        stage: Stage,
        inputs_of: Callable[[int], Sequence[Tensor]] | None,
        loss_of: Callable[[Any, int], Tensor] | None,
        device: torch.device,
        autocast: torch.dtype | None,
        own_outputs: bool,
    ) -> None:
        super().__init__()
        self.stage = stage
        #: index of the next micro-batch: a stage gets them in order
        self.number = 0
        #: of the buffers that it receives and sends; None where tensors are sent as they are
        self.layouts: tuple[BufferLayout | None, BufferLayout | None] = None, None
        self._own_outputs = own_outputs
        self._inputs_of, self._loss_of = inputs_of, loss_of
        self._device, self._autocast = device, autocast

    def forward(self, *received: Tensor) -> Any:
        number, self.number = self.number, self.number + 1
        (reads, writes), anchor = self.layouts, None
        if self._inputs_of is not None:
            received = tuple(self._inputs_of(number))
        elif reads is not None:
            received, anchor = unpack(reads, received[0])
        elif self._own_outputs:
            received = tuple(map(_ContiguousGradient.apply, received))
        with autocasting(self._device, self._autocast):
            output = self.stage(*received)
            if self._loss_of is not None:
                loss = self._loss_of(output, number)
                if anchor is not None:
                    loss = anchored(loss, anchor)
                # One element, as _make_stage declares. stack copies; a reshape is a view, see
                # _owned.
                return torch.stack([loss]) if self._own_outputs else loss.reshape(1)
        sent = tuple(tensor.contiguous() for tensor in output)
        if writes is not None:
            return pack(writes, sent, anchor)
        return tuple(map(_owned, sent)) if self._own_outputs else sent


class _ContiguousGradient(torch.autograd.Function):
    """Makes an input's gradient contiguous for sending, which a split backward does not."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _owned(tensor: Tensor) -> Tensor:
    """Clone views: a split backward detaches outputs in place, and FSDP2 hooks them."""
    return tensor.clone() if tensor._is_view() else tensor


class EvaluationStage(pipelining.PipelineStage):
    """A stage of a run without backward.

    V-shaped schedules pass gradients between stages of one rank locally, and request them even in
    an evaluation, where there are none.
    """

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the local gradient; None without backward."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Store the local gradient; nothing without backward."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class TorchPipelineEngine(TorchEngineBase):
    """Pipeline stages, each replicated or sharded over the data-parallel ranks."""

    def __init__(self, lowering: Lowering, options: TorchOptions) -> None:
        self.schedule = options.schedule
        # Before the base class, which asks for the ranks of stages.
        self._pp = options.mesh.shape[0]
        self.last_pp_rank = self._rank_of(lowering.n_stages - 1)
        super().__init__(lowering, options)
        #: micro-batches of the current step
        self._parts: Sequence[Batch] = ()
        self._runs: OrderedDict[Any, Any] = OrderedDict()
        self._check_sharding()
        # Before FSDP2 is applied: the probes keep the modules' state without it.
        self._boundaries = lowering.boundaries(
            self.mesh, rank_of=self._rank_of, half=options.half, autocast=options.autocast
        )
        for stage in lowering.stages.values():
            self._compile(stage)
        self.runners = {i: self._make_runner(s) for i, s in lowering.stages.items()}
        dp = self.mesh.get_group("dp")
        #: group of ranks with the same stages, over which this engine averages gradients
        self._replicas = None if self.sharding is not None or dp.size() == 1 else dp
        if lowering.fill is not None:
            lowering.fill(among=self._ranks_of_parts())
            for shared in self.shared:
                share_copies(shared)
        self._make_optimizer()
        # Copies of tied parameters count once in the norm: the first one here, if this rank counts
        # them.
        self._uncounted = {
            id(copy) for shared in self.shared for copy in shared.copies[int(shared.is_counted) :]
        }

    # --- set-up ------------------------------------------------------------------------------
    def _check_sharding(self) -> None:
        """Refuse models that FSDP2 would compute wrongly, or fail on in the first step."""
        if self.sharding is None:
            return
        if "mp_policy" in (self.options.data_parallel_options or {}):
            raise SlapoError(
                "mp_policy changes the dtypes that stages send; with a pipeline pass "
                "dtype=torch.bfloat16 instead"
            )
        seen: set[int] = set()
        for stage in self.lowering.stages.values():
            own = {id(m): n for n, m in stage.named_modules() if m._parameters}
            shared = [name for key, name in own.items() if key in seen]
            if shared:
                raise SlapoError(
                    f"{shared[0]!r} runs in several stages of this rank, which FSDP2 cannot "
                    'shard; use data_parallel="ddp" or pipeline_schedule="1f1b"'
                )
            seen.update(own)

    def _make_runner(self, stage: Stage) -> StageRunner:
        is_last = stage.index == self.lowering.n_stages - 1
        own = self.schedule.splits_backward or self.sharding is not None
        inputs_of = self._micro_batch_inputs if stage.index == 0 else None
        loss_of = self._micro_batch_loss if is_last else None
        autocast = self.options.autocast
        runner = StageRunner(stage, inputs_of, loss_of, self.device, autocast, own)
        if self.sharding is None:
            return runner
        # Gathered once per step. Gathering for every micro-batch would dominate the traffic, and
        # give wrong gradients between the halves of a split backward.
        extra = {"reshard_after_forward": False, **(self.options.data_parallel_options or {})}
        if self.schedule.splits_backward:
            extra["reshard_after_forward"] = False
        # The runner and not the stage, since the pipeline looks for FSDP there to postpone the
        # reduction.
        self._shard(runner, extra)
        return runner

    def _rank_of(self, stage: int) -> int:
        return self.schedule.rank_of(stage, self._pp)

    def _is_counted(self, parameter: nn.Parameter) -> bool:
        return id(parameter) not in self._uncounted

    # --- steps -------------------------------------------------------------------------------
    def _forward_backward(self, batch: Batch) -> None:
        self._run(batch, self.options.micro_batches, train=True)

    def _evaluate(self, batch: Batch, parts: int) -> None:
        if self.schedule.evaluates(parts, self._pp):
            self._run(batch, parts, train=False)
            return
        for part in batch.cut(parts):
            self._run(part, 1, train=False)

    def _reduce_gradients(self) -> None:
        for shared in self.shared:
            sum_copies(shared.copies, shared.group)
        if self._replicas is not None:
            reduce_gradients(self._parameters, self._replicas)
        super()._reduce_gradients()

    def _run(self, batch: Batch, parts: int, train: bool) -> None:
        """Run all micro-batches through this rank's stages."""
        self._parts = batch.cut(parts, pads=True)
        names = self.lowering.pipeline.inputs.names
        first = describe_tensors(names, self._micro_batch_inputs(0))
        run = self._runs.get((first, parts, train))
        if run is None:
            run = self._runs[first, parts, train] = self._make_run(first, parts, train)
            if len(self._runs) > _RUNS_KEPT:  # each holds buffers for all of its micro-batches
                self._runs.popitem(last=False)
        self._runs.move_to_end((first, parts, train))
        for index, runner in self.runners.items():
            runner.number, runner.layouts = 0, run.layouts[index : index + 2]
        arguments = (run.numbers,) if 0 in self.runners else ()
        try:
            step = run.step if train else run.eval
            single = isinstance(run, PipelineScheduleSingle)
            extra: dict[str, Any] = {"return_outputs": False} if train and single else {}
            if self.lowering.n_stages - 1 in self.runners:
                extra["target"] = run.numbers
            step(*arguments, **extra)
        except RuntimeError as error:
            raise self._explained(error) from None
        finally:
            self._parts = ()

    def _explained(self, error: RuntimeError) -> BaseException:
        """Unwrap a stage's error from that of the pipeline, which shows only tensors."""
        if error.__cause__ is not None and "failed to run" in str(error):
            return error.__cause__
        if self.schedule.splits_backward and "backward through the graph a second" in str(error):
            return SlapoError(
                f"pipeline_schedule={self.options.pipeline_schedule!r} splits the backward of a "
                "stage in two, which torch cannot do for parameters independent of the stage's "
                "inputs (a decoder with its own embedding) or for checkpointed activations; use "
                '"interleaved_1f1b" or "1f1b"'
            )
        return error

    def _micro_batch_loss(self, output: Any, number: int) -> Tensor:
        return self._loss_of(output, self._parts[number])

    def _micro_batch_inputs(self, number: int) -> Sequence[Tensor]:
        part = self._parts[number]
        return self.lowering.pipeline.inputs.take(part.args, part.kwargs)

    # --- one torch schedule for each shape of micro-batch --------------------------------------
    def _make_run(self, inputs: Boundary, parts: int, train: bool) -> Any:
        boundaries = self._boundaries.of(inputs)
        if train and self.schedule.splits_backward:
            self._check_gradients_cross(boundaries)
        # A buffer has a gradient, whatever is in it.
        layouts = tuple(
            BufferLayout(boundary)
            if train and _SENDS_FLOATS_ONLY and any(not m.dtype.is_floating_point for m in boundary)
            else None
            for boundary in ((), *boundaries[1:], ())
        )
        ends = [
            tuple(meta.tensor(self.device) for meta in boundary)
            if layout is None
            else (torch.empty(layout.shape, device=self.device, requires_grad=True),)
            for boundary, layout in zip((*boundaries, ()), layouts, strict=True)
        ]
        stages = [self._make_stage(index, ends, train) for index in self.runners]
        cls: Any = getattr(pipelining, self.schedule.cls)
        single = issubclass(cls, PipelineScheduleSingle)
        if single and not train:
            cls = pipelining.ScheduleGPipe  # same order for any number of micro-batches
        run = cls(
            stages[0] if single else stages,
            n_microbatches=parts,
            # _loss_of has weighted each loss, so torch must not divide gradients by the number of
            # micro-batches.
            loss_fn=lambda loss, number: loss,  # computed in the last stage
            scale_grads=False,
        )
        run.numbers = torch.arange(parts)  # torch requires an input to split
        run.layouts = layouts
        return run

    def _check_gradients_cross(self, boundaries: tuple[Boundary, ...]) -> None:
        """Refuse stages in which torch, when it splits their backward, would miss all parameters.

        It finds these on the paths from the outputs of a stage to its received tensors.
        """
        for index, received in enumerate(boundaries[1:], 1):
            if not any(meta.requires_grad for meta in received):
                raise on_every_rank(
                    SlapoError(
                        f"pipeline_schedule={self.options.pipeline_schedule!r} splits the "
                        f"backward of stage {index} in two, which torch cannot do if all "
                        'parameters before it are frozen; use "interleaved_1f1b" or "1f1b"'
                    )
                )

    def _make_stage(self, index: int, ends: Sequence[tuple[Tensor, ...]], train: bool) -> Any:
        last = index == self.lowering.n_stages - 1
        cls = pipelining.PipelineStage if train else EvaluationStage
        return cls(
            self.runners[index],
            index,
            self.lowering.n_stages,
            self.device,
            input_args=ends[index] if index else (torch.arange(1),),
            output_args=(torch.empty(1, device=self.device, requires_grad=True),)
            if last
            else ends[index + 1],
            group=self.mesh.get_group("pp"),
        )
