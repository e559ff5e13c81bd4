"""The engine on Megatron-Core's schedules, with and without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.agreement import all_ranks_or_none
from slapo.errors import SlapoError
from slapo.framework_dialect.batches import Batch
from slapo.framework_dialect.boundary_codec import WIRE_DTYPE, BufferLayout, anchored
from slapo.framework_dialect.engine import Engine
from slapo.framework_dialect.megatron.load import megatron_core, quiet
from slapo.framework_dialect.megatron.optimizers import (
    chained,
    make_optimizer,
    mark_parameters,
    range_of_share,
    set_masters,
    torch_optimizer,
)
from slapo.framework_dialect.megatron.options import MegatronOptions
from slapo.framework_dialect.megatron.stages import ModelChunk
from slapo.framework_dialect.optimizers import inner_optimizers, make_scheduler
from slapo.framework_dialect.precision import cast_parameters
from slapo.framework_dialect.runtime import Lowering
from slapo.pipeline.boundaries import describe_tensors
from slapo.weights.holdings import Held, HeldRange


class MegatronEngine(Engine):
    """Megatron-Core's DDP, schedule and optimizer around the model, or around one of its stages.

    `model` is Megatron-Core's DDP; `config` is the TransformerConfig that its schedules read.
    """

    options: MegatronOptions

    def __init__(self, lowering: Lowering, options: MegatronOptions) -> None:
        super().__init__(lowering, options)
        exact: dict[nn.Parameter, Tensor] = {}
        if options.half is not None:
            # The optimizer makes its float32 copies after the cast; set_masters gives them these
            # values.
            exact = {p: p.detach() for p in self.module.parameters()}
            cast_parameters(self.module, options.half)
        self._boundaries = lowering.boundaries(self.mesh)
        mark_parameters(self.module, self.shared)
        self.config = self._make_config()
        self.model = self._wrap()
        self._is_proven = not options.overlap_grad_reduce
        # Only if needed: a warnings filter makes Python show a user's own warnings once more.
        self._quietly: Callable[[], AbstractContextManager[None]]
        self._quietly = quiet if options.distributed_optimizer else nullcontext
        if options.optimizer is not None:
            self._make_optimizer()
            set_masters(self.optimizer, exact)

    # --- set-up ------------------------------------------------------------------------------
    def _check_model(self) -> None:
        for name, parameter in self.module.named_parameters():
            odd = parameter.requires_grad and parameter.dtype != torch.float32
            if self.options.dtype is None and odd:
                raise SlapoError(
                    f"{name} is {parameter.dtype}, but megatron trains torch.float32 models; "
                    "pass dtype="
                )

    def _make_config(self) -> Any:
        half, tp = self.options.half, self._tp
        return megatron_core().transformer.TransformerConfig(
            # The schedules require transformer sizes but do not use them.
            num_layers=self.lowering.n_stages,
            hidden_size=tp,
            num_attention_heads=tp,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=self.lowering.n_stages,
            bf16=half is torch.bfloat16,
            fp16=half is torch.float16,
            params_dtype=half or torch.float32,
            pipeline_dtype=WIRE_DTYPE,
            # Sent outputs are copies.
            deallocate_pipeline_outputs=True,
            gradient_accumulation_fusion=False,
            cuda_graph_scope=[],  # the default raises a warning
            finalize_model_grads_func=self._finalize,
        )

    def _wrap(self) -> Any:
        options = self.options
        fields: dict[str, Any] = {
            # Sums over replicas and micro-batches in half precision would lose small gradients.
            "grad_reduce_in_fp32": options.half is not None,
            **(options.data_parallel_options or {}),
            "use_distributed_optimizer": options.distributed_optimizer,
            "overlap_grad_reduce": options.overlap_grad_reduce,
        }
        (index,) = self.lowering.stages or (0,)
        self.chunk = ModelChunk(self.module, index, self.lowering.n_stages)
        distributed = megatron_core().distributed
        config = distributed.DistributedDataParallelConfig(**fields)
        model = distributed.DistributedDataParallel(self.config, config, self.chunk)
        if options.overlap_grad_reduce:
            self.config.no_sync_func = model.no_sync
        return model

    def _make_optimizer(self) -> None:
        with quiet():
            self.optimizer = make_optimizer(self.options, self.model, self.lowering, self.device)
        if self.options.half is torch.float16:
            self.config.grad_scale_func = self.optimizer.scale_loss
        if self.options.lr_scheduler is not None:
            inner = torch_optimizer(self.optimizer)
            self.scheduler = make_scheduler(self.options.lr_scheduler, inner)

    # --- steps -------------------------------------------------------------------------------
    def _forward_backward(self, batch: Batch) -> None:
        self._run(batch, self.options.micro_batches, train=True)
        self._check_overlap()

    def _evaluate(self, batch: Batch, parts: int) -> None:
        self._run(batch, parts, train=False)

    def _run(self, batch: Batch, count: int, train: bool) -> None:
        """Run all micro-batches through the schedule."""
        parts, extra = batch.cut(count, pads=self.lowering.pipelined is not None), {}
        if self.lowering.pipelined is not None:
            parts = self._bind(parts)
            extra["adjust_tensor_shapes_fn"] = self._shapes
        run = megatron_core().pipeline_parallel.get_forward_backward_func(
            pp_size=self.lowering.n_stages
        )
        with self._quietly():
            run(
                forward_step_func=self._forward_step,
                data_iterator=iter(parts),
                model=self.model,
                num_microbatches=len(parts),
                # Sizes of a transformer's hidden states, which are not what these stages send.
                seq_length=1,
                micro_batch_size=1,
                forward_only=not train,
                **extra,
            )
        self.chunk.anchor = None

    def _forward_step(self, parts: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        """Forward step for Megatron-Core: an output, and the function that computes its loss."""
        part = next(parts)
        output = model(part)
        return output, partial(self._scheduled_loss, part, self.chunk.anchor)

    def _scheduled_loss(
        self, part: Batch, anchor: Tensor | None, output: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the loss for backward, which the schedule divides, and one to report."""
        loss = self._loss_of(output, part) * self.options.micro_batches
        return anchored(loss, anchor), loss.detach().clone()

    # --- what crosses boundaries ---------------------------------------------------------------
    def _bind(self, parts: list[Batch]) -> list[Batch]:
        """Convert micro-batches to inputs of the first stage; prepare boundaries for their form."""
        pipelined = self.lowering.pipeline
        bound = [pipelined.inputs.take(part.args, part.kwargs) for part in parts]
        boundaries = self._boundaries.of(describe_tensors(pipelined.inputs.names, bound[0]))
        here = self.mesh.get_local_rank("pp")
        self.chunk.arriving = BufferLayout(boundaries[here])
        last = here == self.lowering.n_stages - 1
        self.chunk.leaving = None if last else BufferLayout(boundaries[here + 1])
        return [
            replace(part, args=args, kwargs={}) for args, part in zip(bound, parts, strict=True)
        ]

    def _shapes(self, *_: Any) -> tuple[list[Any], list[Any]]:
        """Shapes of received and sent buffers; a boundary has one shape for both directions."""
        arriving, leaving = self.chunk.arriving, self.chunk.leaving
        assert arriving is not None, "set before the schedule runs"
        return [arriving.shape], [arriving.shape if leaving is None else leaving.shape]

    # --- gradients and the optimizer -----------------------------------------------------------
    def _finalize(self, models: list[Any], *args: Any, **kwargs: Any) -> None:
        """Finish a step's gradients: the mean over replicas, then the sum over ties."""
        megatron_core().distributed.finalize_model_grads(models, *args, **kwargs)
        for shared in self.shared:
            parameter: Any = shared.copies[0]
            if parameter.requires_grad:  # Megatron-Core's DDP accumulates gradients in main_grad
                dist.all_reduce(parameter.main_grad, group=shared.group)

    def _check_overlap(self) -> None:
        """Check the first step, by whose gradients Megatron-Core decides what to wait for later."""
        if not self._is_proven:
            all_ranks_or_none("overlap_grad_reduce", self._check_all_have_gradients)
            self._is_proven = True

    def _check_all_have_gradients(self) -> None:
        names = {id(p): n for n, p in self.module.named_parameters()}
        without = [
            names[id(parameter)]
            for group in self.model.bucket_groups
            for parameter in group.params
            if parameter not in group.per_param_grad_ready_counts
        ]
        if without:
            raise SlapoError(
                "overlap_grad_reduce=True waits for the gradient of every parameter, but "
                f"{sorted(without)[:3]} got none; leave it out, or set their requires_grad to "
                "False before build"
            )

    def _optimizer_step(self, scale: Tensor | None) -> None:
        self._compare_gradients(lambda parameter: parameter.main_grad)  # type: ignore[attr-defined]
        if scale is not None:
            self.model.scale_gradients(scale.float())
        self.was_step_applied, norm = False, None
        if self._is_finite():
            with self._quietly():
                self.was_step_applied, norm, _ = self.optimizer.step()
        if not self.was_step_applied and self.options.nonfinite == "error":
            self._nonfinite = "not finite"
        # Without a limit the norm is not measured, and is reported as 0.
        if norm is not None and self.options.clip_grad_norm is not None:
            self.grad_norm = torch.tensor(float(norm), device=self.device)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        # A step is skipped if scaled float16 gradients overflow.
        if self.scheduler is not None and self.was_step_applied:
            self.scheduler.step()

    def _is_finite(self) -> bool:
        """Return whether all gradients are finite, in cases that Megatron-Core does not check."""
        if self.options.nonfinite == "step" or self.options.half is torch.float16:
            return True
        # With the distributed optimizer, these buffers also hold unreduced gradients of other
        # ranks' shards.
        buffers = [b.grad_data for b in (*self.model.buffers, *self.model.expert_parallel_buffers)]
        found = torch.zeros((), device=self.device)
        for buffer in buffers:
            found += ~buffer.isfinite().all()
        dist.all_reduce(found)
        return not found

    def _cells_of(self, held: Held) -> list[Held]:
        parameter: Any = held.tensor
        if not getattr(parameter, "main_param_sharded", False):
            return [replace(held, tensor=getattr(parameter, "main_param", parameter))]
        # The distributed optimizer cuts flat buffers into equal ranges, which ignore bounds of
        # parameters.
        place = range_of_share(self.optimizer, parameter)
        if place is None:
            return []  # entirely on other ranks
        cell, start, count = place
        return [HeldRange.of(held, cell, start, 0, count)]

    @contextmanager
    def steppers(self) -> Iterator[list[torch.optim.Optimizer]]:
        parts = [] if self.optimizer is None else chained(self.optimizer)
        given = [part.optimizer for part in parts if part.optimizer is not None]
        yield [each for optimizer in given for each in inner_optimizers(optimizer)]

    @property
    def kind(self) -> str:
        return "megatron, distributed" if self.options.distributed_optimizer else "megatron"

    @property
    def loss_scale(self) -> tuple[float, int] | None:
        scaler = self._scaler()
        return None if scaler is None else (float(scaler.scale), scaler._growth_tracker)

    def set_loss_scale(self, scale: float, steps: int) -> None:
        scaler = self._scaler()
        scaler._scale.fill_(scale)
        scaler._growth_tracker = steps

    def _scaler(self) -> Any:
        if self.optimizer is None or self.options.half is not torch.float16:
            return None
        return chained(self.optimizer)[0].grad_scaler

    def renew_masters(self) -> None:
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    # --- as a module -------------------------------------------------------------------------
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.chunk(Batch(args, kwargs, None))

    def _backward(self, loss: Tensor) -> None:
        scale = self.config.grad_scale_func
        # Reduced in step(), since several backwards may come before it.
        with self.model.no_sync():
            (loss if scale is None else scale(loss)).backward()

    def _step(self) -> None:
        with self._quietly():
            if self.options.overlap_grad_reduce:
                self.model.start_grad_sync()
            self._finalize([self.model])
        self._optimizer_step(None)
