"""The engine without pipeline stages, and the base of both engines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from slapo.errors import SlapoError
from slapo.framework_dialect.batches import Batch
from slapo.framework_dialect.engine import Engine
from slapo.framework_dialect.gradients import (
    clip_factor,
    global_norm,
    reduce_gradients,
    scale_gradients,
)
from slapo.framework_dialect.optimizers import make_optimizer, make_scheduler, place_steps
from slapo.framework_dialect.precision import LossScale
from slapo.framework_dialect.pytorch.data_parallel import (
    check_parallel_options,
    gathered_at_once,
    partial_sums,
    refuse_sharded,
    replicate,
    shard_mesh,
    shard_parameters,
    without_sharding,
    without_sync,
)
from slapo.framework_dialect.pytorch.options import TorchOptions
from slapo.framework_dialect.replica_use import (
    calls_differ,
    entering_alike,
    refuse_unlike_use,
    used_in,
)
from slapo.framework_dialect.runtime import Lowering
from slapo.mesh import group_among
from slapo.pipeline.boundaries import autocasting
from slapo.weights.holdings import Held


class TorchEngineBase(Engine):
    """Optimizer step with loss scaling, and clipping over all ranks."""

    options: TorchOptions

    def __init__(self, lowering: Lowering, options: TorchOptions) -> None:
        super().__init__(lowering, options)
        scaled = torch.float16 in (options.half, options.autocast)
        self._loss_scale = LossScale() if scaled else None
        #: mesh over which FSDP2 shards parameters; None without it
        self.sharding = None
        self._sharded: list[FSDPModule] = []
        if options.data_parallel == "fsdp" or options.half is not None:
            # Without shards, FSDP2 still keeps the float32 copies of parameters.
            everything = self._dp if options.data_parallel == "fsdp" else 1
            self.sharding = shard_mesh(self.mesh, options.shard_size or everything)
            if self.sharding.size() > 1:
                self._gathering_group = self.mesh.get_group("dp")
        given = options.data_parallel_options or {}
        check_parallel_options(given, self.sharding is not None, bool(lowering.stages))

    def _check_model(self) -> None:
        refuse_sharded(self.module)
        if self.options.data_parallel == "fsdp" or self.options.half is not None:
            instead = 'data_parallel="ddp", with autocast= instead of dtype='
            self._refuse_scalars("torch: FSDP2, which half precision needs too,", instead)

    def _may_freeze(self) -> bool:
        return True

    #: true from the begin of the optimizer's step to the end of the training step
    _has_stepped = False

    def _make_optimizer(self) -> None:
        # One collective sums them at the end of a step, over micro-batches and after the averages
        # over replicas, since the order of sums is irrelevant.
        self._partial_sums = partial_sums(self.module, self.lowering.tp_group)
        self._parameters = list(self.module.parameters())
        if self.options.optimizer is not None:
            named = self.lowering.trainable()
            self.optimizer = make_optimizer(self.options.optimizer, named, self.device)
            place_steps(self.optimizer, self.lowering, self._ranks_of_parts)
            stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            #: parameters whose gradients the optimizer's zero_grad() does not reset
            self._others = [p for _, p in named if id(p) not in stepped]
            self.scheduler = make_scheduler(self.options.lr_scheduler, self.optimizer)

    def _ranks_of_parts(self) -> dist.ProcessGroup | None:
        """Group of this stage's ranks that hold shards of one tensor. A collective of the world."""
        if self.sharding is None:
            return self.lowering.tp_group
        return group_among(self.mesh.mesh.flatten(1).tolist())

    def _is_counted(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter counts on this rank in the norm of the full gradient."""
        return True

    def _loss_of(self, output: Any, part: Batch) -> Tensor:
        loss = super()._loss_of(output, part)
        scaled = self._loss_scale is not None and torch.is_grad_enabled()
        return loss * self._loss_scale.value if scaled else loss  # type: ignore[union-attr]

    def _optimizer_step(self, scale: Tensor | None) -> None:
        self._reduce_gradients()
        self._compare_gradients(lambda parameter: parameter.grad)
        parameters = self._parameters
        if self._loss_scale is not None:
            back = torch.tensor(1 / self._loss_scale.value, device=self.device)
            scale = back if scale is None else scale * back
        # The loss scale, the mean of sums and the clip are one factor, so that gradients are
        # multiplied once.
        scale = self._clip(parameters, scale)
        if scale is not None:
            scale_gradients(parameters, scale)
        self.was_step_applied = self._is_finite()
        if self.was_step_applied:
            self._drop_gathered()
            # Before the step, which may fail after it has changed some of the parameters.
            self._has_stepped = True
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # They would add up over the steps, and count in the norm.
        for parameter in self._others:
            parameter.grad = None
        if self.was_step_applied and self.scheduler is not None:
            self.scheduler.step()
        self._has_stepped = False

    def _shard(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        assert self.sharding is not None, "asked before"
        self._sharded += shard_parameters(module, self.sharding, options, self.options.half)

    def _as_plain(self) -> AbstractContextManager[None]:
        return without_sharding(self.module)

    def _drop_gathered(self) -> None:
        """Reshard full parameters left by a forward without backward, which would become stale."""
        for part in self._sharded:
            part.reshard()

    renew_masters = _drop_gathered  # shards are the masters: only gathered copies are stale

    def held(self) -> list[Held]:
        self._drop_gathered()
        return super().held()

    @property
    def kind(self) -> str:
        over = f" over {self.options.shard_size}" if self.options.shard_size else ""
        return f"torch, {self.options.data_parallel}{over}"

    @property
    def loss_scale(self) -> tuple[float, int] | None:
        scale = self._loss_scale
        return None if scale is None else (scale.value, scale.steps)

    def set_loss_scale(self, scale: float, steps: int) -> None:
        if self._loss_scale is not None:
            self._loss_scale.value, self._loss_scale.steps = scale, steps

    def _reduce_gradients(self) -> None:
        """Complete gradients that are still partial after the backward."""
        for parameters, group in self._partial_sums:
            reduce_gradients(parameters, group, mean=False)

    def _clip(self, parameters: list[nn.Parameter], scale: Tensor | None) -> Tensor | None:
        """Measure the norm if needed; return the factor for gradients, or None."""
        limit = self.options.clip_grad_norm
        if limit is None and self._loss_scale is None and self.options.nonfinite == "step":
            return scale
        norm = global_norm(
            parameters,
            tp_group=self.lowering.tp_group,
            pp_group=self.mesh.get_group("pp"),
            # The last dimension has the shards; the first one of HSDP has replicas with equal
            # gradients.
            shard_group=None if self.sharding is None else self.sharding.get_group(-1),
            counted=self._is_counted,
        )
        self.grad_norm = norm if scale is None else norm * scale
        if limit is None or limit == float("inf"):
            return scale
        clip = clip_factor(self.grad_norm, limit)
        return clip if scale is None else scale * clip

    def _is_finite(self) -> bool:
        """Return whether the optimizer may step; the same on every rank."""
        if self._loss_scale is None and self.options.nonfinite == "step":
            return True
        assert self.grad_norm is not None, "taken for this"
        # One non-finite element makes the norm non-finite. All ranks have the same norm, so they
        # agree without a further collective.
        is_finite = bool(self.grad_norm.isfinite())
        if self._loss_scale is not None:
            self._loss_scale.update(is_finite)
        if not is_finite and self.options.nonfinite == "error":
            self._nonfinite = str(float(self.grad_norm))
        return is_finite

    def _compile(self, part: nn.Module) -> None:
        chosen = self.options.compile
        if chosen:
            # In place: torch.compile(part) returns a wrapper, under which all names begin with
            # _orig_mod.
            part.compile(**(chosen if isinstance(chosen, Mapping) else {}))


_ALLOW = 'build with data_parallel_options={"find_unused_parameters": True}'
_UNUSED = (
    "DDP misses gradients of parameters that the last micro-batch did not use; "
    f"{_ALLOW}, or freeze them"
)


class TorchEngine(TorchEngineBase):
    """DDP or FSDP2 around a model without pipeline stages."""

    #: flags of a step: all layers are gathered at once; used parameters are compared over replicas
    _is_apart = _is_to_compare = False

    def __init__(self, lowering: Lowering, options: TorchOptions) -> None:
        super().__init__(lowering, options)
        extra = dict(options.data_parallel_options or {})
        if extra.get("static_graph") and options.micro_batches > 1:
            raise TypeError(
                "data_parallel_options has static_graph, but DDP then cannot accumulate "
                f"gradients of micro_batches={options.micro_batches}; leave it out, or pass "
                "micro_batches=1"
            )
        #: the module to call: the model, under DDP if there are replicas
        self.runner: nn.Module = self.module
        self._compile(self.module)
        #: true if replicas may use different parameters: DDP searches for them, FSDP2 gathers all
        #: at once
        self._may_differ = bool(extra.get("find_unused_parameters"))
        if self.sharding is not None:
            extra.pop("find_unused_parameters", None)
            self._shard(self.module, extra)
            if lowering.fill is not None:
                lowering.fill(among=self._ranks_of_parts())
        else:
            self.runner = replicate(self.module, self.mesh, extra)
        # Last, since FSDP2 replaces the parameters that the optimizer holds.
        self._make_optimizer()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        # For engine(...), whose loss the caller computes. In train_batch, _loss has entered the
        # same autocast.
        chosen = self.options.autocast
        # Without one, the caller's autocast context applies.
        with nullcontext() if chosen is None else autocasting(self.device, chosen):
            return self.runner(*args, **kwargs)

    def _may_freeze(self) -> bool:
        # DDP waits for the gradients of all parameters, unless it searches for unused ones.
        return self.runner is self.module or self._may_differ

    def _backward(self, loss: Tensor) -> None:
        (loss if self._loss_scale is None else loss * self._loss_scale.value).backward()

    def _reduce_gradients(self) -> None:
        # Without a gradient for one of its parameters, DDP has not averaged that bucket, and would
        # raise in the next forward only, after this step.
        if isinstance(self.runner, DistributedDataParallel):
            try:  # private by name, but documented to be called after a backward
                self.runner._check_reducer_finalized()
            except RuntimeError:
                missed = [name for name, p in self.lowering.trainable() if p.grad is None]
                named = f"{missed[:3]} got no gradient. " if missed else ""
                raise SlapoError(named + _UNUSED) from None
        super()._reduce_gradients()

    def _forward_backward(self, batch: Batch) -> None:
        *first, last = batch.cut(self.options.micro_batches)
        with self._among_replicas(batch, training=True):
            if first:
                # gathered_at_once reduces after the last backward; without_sync would enable
                # reductions before it.
                with nullcontext() if self._is_apart else without_sync(self.runner):
                    for part in first:
                        self._loss(part).backward()
            loss = self._loss(last)
            if self._is_to_compare and isinstance(self.runner, DistributedDataParallel):
                named, used = self.lowering.trainable(), used_in(loss)
                why = f"DDP would wait for the others; {_ALLOW}"
                refuse_unlike_use(named, used, self.mesh.get_group("dp"), why)
            loss.backward()

    def _among_replicas(self, batch: Batch, training: bool = False) -> AbstractContextManager[None]:
        # DDP with find_unused_parameters needs no help. Otherwise, replicas that use different
        # layers wait for each other forever: FSDP2 in a gather, DDP in the reduction of a bucket.
        self._is_apart = self._is_to_compare = False
        if self._dp == 1 or (self._may_differ and self.sharding is None):
            return nullcontext()
        dp = self.mesh.get_group("dp")
        differ = self._may_differ or calls_differ(batch, dp)
        # FSDP2: gather all layers at the start of the step, and reduce them at its end.
        self._is_apart = differ and self.sharding is not None
        if self._is_apart:
            return gathered_at_once(self._sharded, training)
        # Else replicas must use the same parameters. Under DDP these are compared between the last
        # forward and its backward; under FSDP2 the order of layers is, during each forward, unless
        # the hooks would be compiled.
        self._is_to_compare = training and (differ or self.options.is_checked(self.step_count))
        if not self._is_to_compare or self.sharding is None or self.options.compile:
            return nullcontext()
        units: list[Any] = self._sharded
        why = f"FSDP2 gathers layers one at a time; {_ALLOW} to gather all at once"
        return entering_alike(self.module, units, dp, why)

    def _loss(self, part: Batch) -> Tensor:
        # Around the loss function too, as torch recommends. _call enters autocast again, which
        # changes nothing: its cache of cast weights is cleared when the outermost context ends.
        with autocasting(self.device, self.options.autocast):
            return super()._loss(part)

    def _discard_gradients(self) -> bool:
        # DDP and FSDP2 keep their own sums, and count pending gradients.
        if self.runner is not self.module or self.sharding is not None:
            return False
        if self._has_stepped:  # the optimizer or its scheduler failed, which cannot be undone
            return False
        for parameter in self.parameters():
            parameter.grad = None
        return True
