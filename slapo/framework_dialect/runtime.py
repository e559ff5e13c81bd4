"""The interface between `build` and a runtime, and helpers shared by the runtimes."""

from __future__ import annotations

import importlib.util
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import MissingPackageError, SlapoError
from slapo.mesh import current_device
from slapo.node import Node
from slapo.pipeline import PipelinedModule, Stage, StageTie
from slapo.pipeline.boundaries import Boundaries

CheckCall = Callable[
    [tuple[Any, ...], dict[str, Any], Callable[[Any], Tensor] | None, torch.dtype | None], None
]


@dataclass
class Lowering:
    """A validated and materialized schedule, as `build` passes it to a runtime.

    Parameters
    ----------
    model
        The scheduled module; with pipeline stages, a :class:`slapo.pipeline.PipelinedModule` whose
        stages on other ranks have their tensors on ``meta``.
    stages
        This process's stages by index; empty without pipeline stages.
    n_stages
        Number of stages of the full pipeline; 1 without.
    ties
        Parameters shared by several stages.
    tp_group
        The tensor-parallel group; None for a world of one.
    created
        Names in `module` of the tensors that `build` has created, independently on each rank.
    check_call
        Runs the placement check on a call of the model: ``check_call(args, kwargs, loss_fn,
        half)``, where `half` is the half precision that it computes in. None if it should not run.
    """

    model: nn.Module
    stages: dict[int, Stage] = field(default_factory=dict)
    n_stages: int = 1
    ties: tuple[StageTie, ...] = ()
    tp_group: dist.ProcessGroup | None = None
    created: frozenset[str] = frozenset()
    check_call: CheckCall | None = None
    #: the primitives of the schedule
    history: tuple[Any, ...] = ()
    #: Creates tensors on meta, for a runtime that shards them first; else None. With ``among`` it
    #: creates equal values on the ranks of that group; with ``shares`` it shards each tensor as it
    #: is created.
    fill: Callable[..., None] | None = None

    @property
    def pipeline(self) -> PipelinedModule:
        """The pipelined model; only valid with stages."""
        assert isinstance(self.model, PipelinedModule), "asked for with stages only"
        return self.model

    @property
    def pipelined(self) -> PipelinedModule | None:
        """The pipelined model; None without a pipeline."""
        return self.model if isinstance(self.model, PipelinedModule) else None

    @property
    def module(self) -> nn.Module:
        """The module that runs here: the model, the stage, or a list of stages."""
        if not self.stages:
            return self.model
        stages = list(self.stages.values())
        return stages[0] if len(stages) == 1 else nn.ModuleList(stages)

    def boundaries(self, mesh: DeviceMesh, **how: Any) -> Boundaries:
        """Return the finder of the tensors that cross between stages."""
        group, device = mesh.get_group("pp"), current_device(mesh)
        return Boundaries(self.stages, self.n_stages, device, group, **how)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters for an optimizer, each once, with their names in the model.

        Copies of a parameter that stages share have one name, so that rules by name treat them
        alike.
        """
        if self.pipelined is None:
            named = list(self.model.named_parameters())
        else:
            named = [
                (self.pipelined.first_name(index, name), parameter)
                for index, stage in self.stages.items()
                for name, parameter in stage.named_parameters()
            ]
        once: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in named:
            if parameter.requires_grad:
                once.setdefault(id(parameter), (name, parameter))
        return list(once.values())

    def state_dict(self, keep_vars: bool = False) -> dict[str, Any]:
        """This rank's tensors by their names in the model; with `keep_vars` not detached."""
        if self.pipelined is None:
            return dict(self.model.state_dict(keep_vars=keep_vars))
        state: dict[str, Any] = {}
        for index, stage in self.stages.items():
            local = stage.state_dict(keep_vars=keep_vars)
            state.update(local)
            for name, originals in self.pipelined.original_names(index).items():
                state.update(dict.fromkeys(originals, local[name]))
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy values into this rank's tensors; see :meth:`slapo.framework_dialect.Engine`.

        Names or shapes that do not fit raise a ValueError before anything changes.
        """
        own = self.state_dict()
        every = set(self.model.state_dict())  # names of other stages are ignored
        missing = [name for name in own if name not in state]
        unknown = [name for name in state if name not in own and name not in every]
        if strict and (missing or unknown):
            lacks = f"lacks {missing[:5]}" if missing else ""
            extra = f"has unexpected {unknown[:5]}" if unknown else ""
            raise ValueError(
                f"the state dict {' and '.join(filter(None, (lacks, extra)))}; pass strict=False "
                "to load the rest"
            )
        pairs = [(name, tensor, state[name]) for name, tensor in own.items() if name in state]
        for name, tensor, value in pairs:
            if not isinstance(tensor, Tensor):
                continue
            if not isinstance(value, Tensor):
                raise ValueError(f"the state dict's {name!r} is a {type(value).__name__}")
            if tuple(value.shape) != tuple(tensor.shape):
                raise ValueError(
                    f"{name!r} has shape {tuple(tensor.shape)} on this rank, but "
                    f"{tuple(value.shape)} in the state dict; pass this rank's part, as "
                    "engine.state_dict() returns it"
                )
        _refuse_two_values(pairs)
        for name, tensor, value in pairs:
            if isinstance(tensor, Tensor):
                _put(tensor, value)
            else:  # extra state of a module
                path = name.rpartition(".")[0]
                self.model.get_submodule(path).set_extra_state(value)


def _refuse_two_values(pairs: list[tuple[str, Any, Any]]) -> None:
    """Refuse different values for tied tensors, which are one tensor here."""
    first: dict[tuple[int, torch.Size], tuple[str, Any]] = {}
    for name, tensor, value in pairs:
        if isinstance(tensor, Tensor) and not hasattr(tensor, "device_mesh") and tensor.numel():
            # With the shape, since a view of another tensor's start has its address too.
            other, known = first.setdefault((tensor.data_ptr(), tensor.shape), (name, value))
            if known is not value and not torch.equal(known, value):
                raise ValueError(
                    f"{other!r} and {name!r} are one tensor in this model, but the state dict "
                    "has two values for it; make them equal, or leave one out and pass "
                    "strict=False"
                )


def _put(tensor: Tensor, value: Tensor) -> None:
    if hasattr(tensor, "device_mesh") and not hasattr(value, "device_mesh"):
        # The value is the full tensor, and FSDP2 keeps a shard of it here.
        from torch.distributed.tensor import distribute_tensor  # the import takes a second

        value = value.to(tensor.device, tensor.dtype)
        spec: Any = tensor
        value = distribute_tensor(value, spec.device_mesh, spec.placements, src_data_rank=None)
    tensor.copy_(value)


class Runtime(ABC):
    """One way to run a schedule. Subclasses are registered by `register_framework_dialect`.

    The constructor takes the root schedule and the options passed to `build`. It validates them
    before anything starts, and does not communicate with other ranks.
    """

    #: true if the runtime shards tensors on meta, and then calls `Lowering.fill` to create them
    fills_shares = False

    #: false on ranks whose meta tensors take the values that another rank reads
    reads_weights = True

    @abstractmethod
    def __init__(self, sch: Node, **options: Any) -> None: ...

    def described(self) -> dict[str, Any]:
        """Return the options as plain data, which `build` compares over the ranks."""
        return {}

    def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
        """Indices of the stages that run in this process; without cuts there is one."""
        if n_stages == 1:
            return (0,)
        raise SlapoError(
            f"{type(self).__name__} does not support pipelines, but the schedule has {n_stages} "
            "stages; remove the cuts, or build for another target"
        )

    @abstractmethod
    def lower(self, lowering: Lowering) -> tuple[Any, Any]:
        """Return the engine and its optimizer."""


# --- for the runtimes of Slapo -------------------------------------------------------------------
class MeshRuntime(Runtime):
    """A runtime over a mesh, with one stage on each of its pipeline ranks."""

    options: Any

    @property
    def reads_weights(self) -> bool:  # type: ignore[override]
        """True on the first replica, which sends the values that `build` creates to the others."""
        return bool(self.options.mesh.get_local_rank("dp") == 0)

    def described(self) -> dict[str, Any]:
        """Return the options, which must be equal on all ranks."""
        return dict(self.options.described())

    def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
        """Return the single stage of this rank."""
        check_stage_count(n_stages, self.options.mesh.shape[0])
        return (self.options.mesh.get_local_rank("pp"),)


def check_installed(target: str, module: str, package: str) -> None:
    """Refuse a runtime whose optional package is missing, before anything starts."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingPackageError(
            f'build(target="{target}") needs the package {package}, which is not installed; '
            f'pip install "slapo[{target}]"'
        )


@contextmanager
def quiet_warnings(package: str) -> Iterator[None]:
    """Ignore deprecation warnings about a package's own code, which a user cannot fix."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"{package}(\.|$)")
        # Raised inside torch, about collectives that the package calls.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        yield


def check_groups(sch: Node, mesh: DeviceMesh) -> None:
    """Refuse a schedule whose group is not the mesh's tensor-parallel dimension."""
    wanted = sorted(dist.get_process_group_ranks(mesh.get_group("tp")))
    ranks = [dist.get_rank()] if sch.group is None else dist.get_process_group_ranks(sch.group)
    if sorted(ranks) != wanted:
        raise ValueError(
            f"the schedule shards over ranks {sorted(ranks)}, but the mesh's tensor-parallel "
            f'ranks are {wanted}; pass create_schedule(model, group=mesh["tp"])'
        )


def check_stage_count(n_stages: int, pp: int, per_rank: int = 1) -> None:
    """Refuse a number of stages that does not match the pipeline ranks."""
    wanted = pp * per_rank
    if n_stages != wanted:
        raise SlapoError(
            f"the schedule has {n_stages} stages, but pp={pp} ranks with {per_rank} each run "
            f"{wanted}; {'add' if n_stages < wanted else 'leave out'} {abs(wanted - n_stages)} "
            "cut_pipeline_stage(), or change pp"
        )
