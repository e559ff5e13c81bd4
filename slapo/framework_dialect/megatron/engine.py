"""The engine on Megatron-Core's schedules, with and without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from slapo.errors import SlapoError
from slapo.framework_dialect.agreement import all_ranks_or_none
from slapo.framework_dialect.batches import MicroBatch
from slapo.framework_dialect.gradients import TiedGradients, mean_loss
from slapo.framework_dialect.megatron.groups import mark_sharded, tied_parameters
from slapo.framework_dialect.megatron.optimizers import make_optimizer, torch_optimizer
from slapo.framework_dialect.megatron.options import MegatronOptions
from slapo.framework_dialect.megatron.package import megatron_core, quiet
from slapo.framework_dialect.megatron.stages import ModelChunk
from slapo.framework_dialect.megatron.wire import WIRE_DTYPE, Manifest, anchored
from slapo.framework_dialect.pytorch.data_parallel import broadcast_values
from slapo.framework_dialect.runtime import Engine, Lowering
from slapo.graph.trace.module import TracedModule
from slapo.mesh import coordinate, extent, group_of
from slapo.pipeline.boundaries import Boundary, ShapeProbe, describe_inputs, infer_boundaries

# Where Megatron-Core's DDP adds up gradients.
_GRADIENT = "main_grad"


class MegatronEngine(Engine):
    """Megatron-Core's DDP, schedule and optimizer around the model, or around one stage of it.

    Attributes
    ----------
    model : megatron.core.distributed.DistributedDataParallel
    config : megatron.core.transformer.TransformerConfig
        What Megatron-Core's schedules read.
    grad_norm : Tensor or None
        The norm of the whole model's gradient at the last step; None unless Megatron-Core took it.
    scheduler
        What ``lr_scheduler`` returned.
    """

    options: MegatronOptions

    def __init__(self, lowering: Lowering, options: MegatronOptions) -> None:
        super().__init__(lowering, options)
        all_ranks_or_none("megatron", self._check_precision)
        self.module.to(self.device, options.half)
        self._probes = {i: ShapeProbe(s, self.device) for i, s in lowering.stages.items()}
        self._boundaries: dict[Boundary, tuple[Boundary, ...]] = {}
        mark_sharded(self.module)
        self._ties = tied_parameters(lowering, self.mesh)
        self._share_values()
        self.config = self._make_config()
        self.model = self._wrap()
        self.grad_norm: Tensor | None = None
        self.scheduler: Any = None
        self._is_proven = not options.overlap_grad_reduce
        # Only where needed: to filter warnings makes Python show a user's own once more.
        self._quietly: Callable[[], AbstractContextManager[None]]
        self._quietly = quiet if options.distributed_optimizer else nullcontext
        if options.optimizer is not None:
            self._make_optimizer()

    # --- set-up ------------------------------------------------------------------------------
    def _check_precision(self) -> None:
        half = self.options.half
        if half is not None:
            self._check_traces(half)
            return
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise SlapoError(
                    f"{name} is {parameter.dtype}, and megatron trains a model of torch.float32; "
                    "pass dtype=, or model.float() before the schedule"
                )

    def _check_traces(self, half: torch.dtype) -> None:
        """A graph may hold for the dtype only that parameters had when it was recorded."""
        for name, module in self.module.named_modules():
            traced = module.contract.dtype if isinstance(module, TracedModule) else None
            if traced not in (None, half):
                raise SlapoError(
                    f"{name or 'the stage'} was traced with parameters of {traced}, and is to run "
                    f"with {half}; convert the model by model.to({half}) before it is traced"
                )

    def _share_values(self) -> None:
        """One value for each parameter: over the stages that tie it, then over replicas."""
        ties = [([parameter], group) for parameter, group in self._ties]
        TiedGradients([copies for copies, _ in ties], [g for _, g in ties]).broadcast_values()
        broadcast_values(self.module, group_of(self.mesh, "dp"))

    def _make_config(self) -> Any:
        half, tp = self.options.half, extent(self.mesh, "tp")
        return megatron_core().transformer.TransformerConfig(
            # The schedules ask for the form of a transformer and do not use it.
            num_layers=self.lowering.n_stages,
            hidden_size=tp,
            num_attention_heads=tp,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=self.lowering.n_stages,
            bf16=half is torch.bfloat16,
            fp16=half is torch.float16,
            params_dtype=half or torch.float32,
            pipeline_dtype=WIRE_DTYPE,
            # What is sent is a copy.
            deallocate_pipeline_outputs=True,
            gradient_accumulation_fusion=False,
            cuda_graph_scope=[],  # the default warns of itself
            finalize_model_grads_func=self._finalize,
        )

    def _wrap(self) -> Any:
        options = self.options
        fields: dict[str, Any] = {
            # Replicas and micro-batches would be added up in half precision, and lose small ones.
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
            self.optimizer = make_optimizer(self.options, self.model)
        if self.options.half is torch.float16:
            self.config.grad_scale_func = self.optimizer.scale_loss
        make_scheduler = self.options.lr_scheduler
        if make_scheduler is not None:
            inner = torch_optimizer(self.optimizer)
            self.scheduler = all_ranks_or_none(
                "lr_scheduler", lambda: None if inner is None else make_scheduler(inner)
            )

    # --- steps -------------------------------------------------------------------------------
    def _train(self, micro_batches: list[MicroBatch]) -> Tensor:
        losses = self._run(micro_batches, train=True)
        self._check_overlap()
        self._optimizer_step()
        return self._mean(losses)

    def _eval(self, micro_batches: list[MicroBatch]) -> Tensor:
        return self._mean(self._run(micro_batches, train=False))

    def _mean(self, losses: list[Tensor]) -> Tensor:
        return mean_loss(torch.stack(losses).mean() if losses else None, self.mesh)

    def _run(self, micro_batches: list[MicroBatch], train: bool) -> list[Tensor]:
        """All micro-batches through the schedule; their losses where the last stage is."""
        parts, extra = [self._cast(part) for part in micro_batches], {}
        if self.lowering.pipelined is not None:
            parts = self._bind(parts)
            extra["adjust_tensor_shapes_fn"] = self._shapes
        run = megatron_core().pipeline_parallel.get_forward_backward_func(
            pp_size=self.lowering.n_stages
        )
        with self._quietly():
            losses: list[Tensor] = run(
                forward_step_func=self._forward_step,
                data_iterator=iter(parts),
                model=self.model,
                num_microbatches=len(parts),
                # Of a transformer's hidden states, in place of which others are sent.
                seq_length=1,
                micro_batch_size=1,
                forward_only=not train,
                **extra,
            )
        self.chunk.anchor = None
        return losses

    def _forward_step(self, parts: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        """Megatron-Core's forward step: an output, and what makes a loss of it."""
        part = next(parts)
        output = model(part)
        return output, partial(self._loss, part.targets, self.chunk.anchor)

    def _loss(self, targets: Any, anchor: Tensor | None, output: Any) -> tuple[Tensor, Tensor]:
        """The loss to go back from and the one to report; the schedule divides the first one."""
        loss = self._loss_of(output, targets)
        return anchored(loss, anchor), loss.detach().clone()

    def _cast(self, part: MicroBatch) -> MicroBatch:
        """Floating-point inputs in the parameters' dtype, as those of half precision want them."""
        half = self.options.half
        if half is None:
            return part

        def cast(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(half) if is_float else value

        args, kwargs = pytree.tree_map(cast, (part.args, part.kwargs))
        return MicroBatch(args, kwargs, part.targets)

    # --- what crosses boundaries ---------------------------------------------------------------
    def _bind(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Micro-batches as the first stage takes them; boundaries prepared for their form."""
        pipelined = self.lowering.pipelined
        assert pipelined is not None, "asked before"
        bound = [pipelined.bind(part.args, part.kwargs) for part in micro_batches]
        self._expect(describe_inputs(pipelined.inputs.names, bound[0]))
        return [
            MicroBatch(args, {}, part.targets)
            for args, part in zip(bound, micro_batches, strict=True)
        ]

    def _expect(self, inputs: Boundary) -> None:
        if inputs not in self._boundaries:
            self._boundaries[inputs] = infer_boundaries(
                self.lowering.n_stages,
                inputs,
                lambda index, received: self._probes[index].run(received),
                group_of(self.mesh, "pp"),
                lambda index: index,
            )
        boundaries, here = self._boundaries[inputs], coordinate(self.mesh, "pp")
        self.chunk.arriving = Manifest(boundaries[here])
        last = here == self.lowering.n_stages - 1
        self.chunk.leaving = None if last else Manifest(boundaries[here + 1])

    def _shapes(self, *_: Any) -> tuple[list[Any], list[Any]]:
        """Shapes of what the schedule receives and sends; both ways over a boundary the same."""
        arriving, leaving = self.chunk.arriving, self.chunk.leaving
        assert arriving is not None, "told before the schedule runs"
        return [arriving.shape], [arriving.shape if leaving is None else leaving.shape]

    # --- gradients and the optimizer -----------------------------------------------------------
    def _finalize(self, models: list[Any], *args: Any, **kwargs: Any) -> None:
        """What the schedule does last: the mean over replicas, then the sum over ties."""
        megatron_core().distributed.finalize_model_grads(models, *args, **kwargs)
        for parameter, group in self._ties:
            if parameter.requires_grad:
                dist.all_reduce(getattr(parameter, _GRADIENT), group=group)

    def _check_overlap(self) -> None:
        """Megatron-Core counts gradients at the first step, and goes by that later."""
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
                "overlap_grad_reduce=True waits for the gradient of every parameter, and "
                f"{sorted(without)[:3]} got none; leave it out, or set requires_grad of theirs to "
                "False before build"
            )

    def _optimizer_step(self) -> None:
        with self._quietly():
            has_stepped, norm, _ = self.optimizer.step()
        self.grad_norm = None if norm is None else torch.tensor(float(norm), device=self.device)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        # A step is left out where scaled gradients of float16 were too large.
        if self.scheduler is not None and has_stepped:
            self.scheduler.step()

    # --- as a module -------------------------------------------------------------------------
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.chunk(self._cast(MicroBatch(args, kwargs, None)))

    def _backward(self, loss: Tensor) -> None:
        scale = self.config.grad_scale_func
        # Reduced in step(): there may be several backwards before it.
        with self.model.no_sync():
            (loss if scale is None else scale(loss)).backward()

    def _step(self) -> None:
        with self._quietly():
            if self.options.overlap_grad_reduce:
                self.model.start_grad_sync()
            self._finalize([self.model])
        self._optimizer_step()
