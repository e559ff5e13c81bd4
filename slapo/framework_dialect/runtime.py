"""What a runtime is to `build`, and what an engine is to its user."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import SlapoError
from slapo.framework_dialect.agreement import same_batch
from slapo.framework_dialect.batches import MicroBatch, move_batch, next_batch, split_batch
from slapo.framework_dialect.watch import start_watch
from slapo.mesh import check_mesh, coordinate, current_device, extent, group_of
from slapo.node import Node
from slapo.pipeline import PipelinedModule, Stage, StageTie

#: Seconds without a sign of life after which a rank counts as dead.
WATCH_SECONDS = 30.0

LossFn = Callable[[Any, Any], Tensor]
OptimizerFn = Callable[[list[nn.Parameter]], Any]


@dataclass
class Lowering:
    """A checked and materialised schedule, as `build` hands it to a runtime.

    Parameters
    ----------
    model
        The scheduled module; with pipeline stages, a :class:`slapo.pipeline.PipelinedModule` whose
        stages on other ranks have their tensors on ``meta``.
    stages
        This process's stages by index; empty without pipeline stages.
    n_stages
        Of the whole pipeline; 1 without.
    ties
        Parameters that several stages share.
    tp_group
        The tensor-parallel ranks; None for a world of one.
    """

    model: nn.Module
    stages: dict[int, Stage] = field(default_factory=dict)
    n_stages: int = 1
    ties: tuple[StageTie, ...] = ()
    tp_group: dist.ProcessGroup | None = None

    @property
    def pipelined(self) -> PipelinedModule | None:
        """The row of stages; None without a pipeline."""
        return self.model if isinstance(self.model, PipelinedModule) else None

    @property
    def module(self) -> nn.Module:
        """What runs here: the model, the stage, or a list of stages."""
        if not self.stages:
            return self.model
        stages = list(self.stages.values())
        return stages[0] if len(stages) == 1 else nn.ModuleList(stages)

    def state_dict(self) -> dict[str, Any]:
        """This rank's tensors by their names in the model."""
        if self.pipelined is None:
            return dict(self.model.state_dict())
        state: dict[str, Any] = {}
        for index, stage in self.stages.items():
            local = stage.state_dict()
            state.update(local)
            for name, originals in self.pipelined.original_names(index).items():
                state.update(dict.fromkeys(originals, local[name]))
        return state


@dataclass(frozen=True)
class TrainingOptions:
    """What every runtime takes.

    Parameters
    ----------
    mesh
        From :func:`slapo.init_mesh`.
    loss_fn
        ``loss_fn(output, target)`` -> the mean loss of a micro-batch.
    optimizer
        ``optimizer(parameters)`` -> a ``torch.optim.Optimizer``: a class, a partial, a function.
    micro_batches
        Parts that a batch is cut into.
    clip_grad_norm
        Largest norm of the whole model's gradient; None: it is not clipped.
    lr_scheduler
        ``lr_scheduler(optimizer)`` -> what is stepped after each batch.
    watch
        Seconds without a sign of life from a rank until the job ends; None: ranks are not watched.
    check_batches
        Compare at every step the batches of ranks that must get the same one.
    """

    mesh: DeviceMesh
    loss_fn: LossFn | None = None
    optimizer: OptimizerFn | None = None
    micro_batches: int = 1
    clip_grad_norm: float | None = None
    lr_scheduler: Callable[[Any], Any] | None = None
    watch: float | None = WATCH_SECONDS
    check_batches: bool = True

    def __post_init__(self) -> None:
        check_mesh(self.mesh)
        count = self.micro_batches
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"micro_batches is {count!r}; pass a whole number from 1 up")
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                "optimizer is an Optimizer, but build changes which parameters there are; pass a "
                "function that makes it, such as functools.partial(torch.optim.AdamW, lr=1e-4)"
            )
        for name in ("loss_fn", "optimizer", "lr_scheduler"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name} is a {type(value).__name__}; {_CALLABLES[name]}")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm is {self.clip_grad_norm}; pass a number above 0")
        if extent(self.mesh, "pp") > 1 and self.loss_fn is None:
            raise ValueError(
                "a pipeline needs a loss: pass loss_fn=f, where f(output, target) is the mean loss "
                "of a micro-batch"
            )
        if self.lr_scheduler is not None and self.optimizer is None:
            raise ValueError("lr_scheduler needs an optimizer; pass optimizer= too")


_CALLABLES = {
    "loss_fn": "pass a function of (output, target)",
    "optimizer": "pass a function of a list of parameters, such as torch.optim.AdamW",
    "lr_scheduler": "pass a function of an optimizer",
}


class Runtime(ABC):
    """One way to run a schedule. Subclasses are registered by `register_framework_dialect`.

    The constructor takes the root schedule and the options that the user gave `build`; it checks
    what can be checked before anything starts, and does not talk to other ranks.
    """

    @abstractmethod
    def __init__(self, sch: Node, **options: Any) -> None: ...

    def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
        """Indices of the stages that run in this process; without cuts there is one.

        Raises
        ------
        SlapoError
            If so many stages cannot be shared out.
        """
        if n_stages == 1:
            return (0,)
        raise SlapoError(
            f"{type(self).__name__} runs no pipelines, and the schedule is cut in {n_stages} "
            "stages; leave out the cuts, or build for another target"
        )

    @abstractmethod
    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        """The engine and its optimizer."""


def check_groups(sch: Node, mesh: DeviceMesh) -> None:
    """The schedule's group must be the mesh's tensor-parallel dimension.

    Raises
    ------
    ValueError
        If it is another one.
    """
    wanted = sorted(dist.get_process_group_ranks(group_of(mesh, "tp")))
    ranks = [dist.get_rank()] if sch.group is None else dist.get_process_group_ranks(sch.group)
    if sorted(ranks) != wanted:
        raise ValueError(
            f"the schedule shards over ranks {sorted(ranks)}, and the mesh's tensor-parallel ranks "
            f'are {wanted}; pass create_schedule(model, group=mesh["tp"])'
        )


def check_stage_count(n_stages: int, pp: int, per_rank: int = 1) -> None:
    """Refuse stages that cannot be shared out over the pipeline's ranks.

    Raises
    ------
    SlapoError
        Saying how many cuts there should be.
    """
    wanted = pp * per_rank
    if n_stages != wanted:
        raise SlapoError(
            f"the schedule is cut in {n_stages} stages, and pp={pp} ranks with {per_rank} each run "
            f"{wanted}; {'add' if n_stages < wanted else 'leave out'} "
            f"{abs(wanted - n_stages)} cut_pipeline_stage(), or change pp"
        )


def one_number(loss: Any) -> Tensor:
    """A loss without dimensions, in float32.

    Raises
    ------
    ValueError
        If a loss function has returned anything but a tensor of one element.

    Examples
    --------
    >>> one_number(torch.ones(1, dtype=torch.bfloat16))
    tensor(1.)
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn returned {shown}; it must return one number, the mean over a micro-batch"
        )
    return loss.reshape(()).float()


class Engine(ABC):
    """A model that trains. Every runtime's engine offers this, so scripts change the target only.

    Attributes
    ----------
    module : nn.Module
        What runs in this process: the model, or its stage or stages.
    mesh : DeviceMesh
    optimizer : Any
        None if none was asked for.
    """

    def __init__(self, lowering: Lowering, options: TrainingOptions) -> None:
        self.lowering, self.options = lowering, options
        self.mesh = options.mesh
        self.device = current_device(options.mesh)
        self.module = lowering.module
        self.optimizer: Any = None
        self._watch = start_watch(options.mesh, options.watch)

    # --- with a loss function ----------------------------------------------------------------
    def train_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """One step on the next batch: forward, backward, optimizer.

        Parameters
        ----------
        data_iter
            Yields ``(inputs, targets)``: the batch of this data-parallel rank, the same on all of
            its pipeline and tensor-parallel ranks. Inputs are a tensor, a tuple of positional
            arguments or a dict of keyword arguments of the model; targets are what ``loss_fn``
            takes. Both are cut along the first dimension in the micro-batches asked for.

        Returns
        -------
        Tensor
            The loss: 0-dim, float32, the mean over micro-batches and data-parallel ranks, the same
            on every rank.

        Raises
        ------
        ValueError, TypeError
            If the batch cannot be cut in micro-batches.
        SlapoError
            If ranks got different batches, or the model was not traced for such inputs. On every
            rank.
        """
        with self._watch.guard():
            if self.optimizer is None:
                raise SlapoError("train_batch needs an optimizer; build with optimizer=")
            micro_batches = self._load("train_batch", data_iter)
            try:
                return self._train(micro_batches)
            except Exception:
                self._forget_gradients()
                raise

    def _forget_gradients(self) -> None:
        """After a step that failed: a script that goes on must not add to what it left."""
        for parameter in self.parameters():
            parameter.grad = None

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """The loss on the next batch, in eval mode and without gradients. See `train_batch`."""
        with self._watch.guard():
            micro_batches = self._load("eval_batch", data_iter)
            modes = [(module, module.training) for module in self.module.modules()]
            self.module.eval()
            try:
                with torch.no_grad():
                    return self._eval(micro_batches)
            finally:
                for module, mode in modes:
                    module.training = mode

    @abstractmethod
    def _train(self, micro_batches: list[MicroBatch]) -> Tensor:
        """One optimizer step; returns the mean loss, the same on every rank."""

    @abstractmethod
    def _eval(self, micro_batches: list[MicroBatch]) -> Tensor:
        """The mean loss, the same on every rank."""

    def _load(self, what: str, data_iter: Iterator[Any]) -> list[MicroBatch]:
        """The next batch, cut; whatever is wrong with it is an error on every rank."""

        def load() -> Any:
            if self.options.loss_fn is None:
                raise SlapoError(f"{what} needs a loss; build with loss_fn=")
            batch = next_batch(data_iter)
            for part in split_batch(batch, self.options.micro_batches)[:1]:
                self._check_call(part)
            return batch

        batch = same_batch(what, load, self.mesh) if self.options.check_batches else load()
        return split_batch(move_batch(batch, self.device), self.options.micro_batches)

    def _check_call(self, part: MicroBatch) -> None:
        if self.lowering.pipelined is not None:
            self.lowering.pipelined.bind(part.args, part.kwargs)

    def _loss_of(self, output: Any, targets: Any) -> Tensor:
        """What the user's loss function makes of an output."""
        assert self.options.loss_fn is not None, "checked before the batch was loaded"
        return one_number(self.options.loss_fn(output, targets))

    # --- as a module -------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; not with pipeline stages."""
        self._refuse_pipeline("a call of the engine")
        return self._call(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Backward of the loss of a call; not with pipeline stages."""
        self._refuse_pipeline("backward()")
        self._backward(loss)

    def step(self) -> None:
        """Let the optimizer step on the gradients of `backward`; not with pipeline stages."""
        self._refuse_pipeline("step()")
        if self.optimizer is None:
            raise SlapoError("step() needs an optimizer; build with optimizer=")
        self._step()

    # Engines for pipelines have none of these three; nothing calls them there.
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    def _step(self) -> None:
        raise NotImplementedError

    def _refuse_pipeline(self, what: str) -> None:
        if self.lowering.n_stages > 1:
            raise SlapoError(
                f"{what} would run one of {self.lowering.n_stages} pipeline stages; use "
                "train_batch or eval_batch"
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return self.module.parameters()

    def state_dict(self) -> dict[str, Any]:
        """This rank's tensors by their names in the model."""
        return self.lowering.state_dict()

    def train(self, mode: bool = True) -> Engine:
        """Set the training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the eval mode."""
        return self.train(False)

    @property
    def stage_indices(self) -> Sequence[int]:
        """The stages of this rank; stage 0 alone without a pipeline."""
        return tuple(self.lowering.stages) or (0,)

    def __repr__(self) -> str:
        place = {dim: coordinate(self.mesh, dim) for dim in ("pp", "dp", "tp")}
        return (
            f"<{type(self).__name__} on mesh {tuple(self.mesh.shape)}, {place}, "
            f"stages {list(self.stage_indices)} of {self.lowering.n_stages}>"
        )
