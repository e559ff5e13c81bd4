"""Guards against code that takes the slices of a model for the full model."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from slapo.errors import SlapoError
from slapo.hooks import remove_pre_hooks
from slapo.sharding.groups import GroupHandle, common_ranks
from slapo.sharding.state import sharding_of
from slapo.sharding.tags import PARTIAL_GRAD, is_summed
from slapo.wrapper import innermost


def _save_pretrained(*args: Any, **kwargs: Any) -> None:
    raise SlapoError(
        "save_pretrained would write only this rank's slices of a sharded model; build the "
        "schedule first, and call slapo.save_pretrained(built_model, folder) on every rank"
    )


def _resize_token_embeddings(*args: Any, **kwargs: Any) -> None:
    raise SlapoError(
        "resize_token_embeddings would mistake this rank's slice of the vocabulary for the whole; "
        "resize the model before slapo.create_schedule"
    )


def refuse_methods(model: nn.Module, sharded: nn.Module) -> None:
    """Override methods of a Transformers model that would take slices for full tensors."""
    if hasattr(type(model), "save_pretrained"):
        model.__dict__["save_pretrained"] = _save_pretrained
    for name in ("get_input_embeddings", "get_output_embeddings"):
        with contextlib.suppress(NotImplementedError):  # raised by models without tokens
            if hasattr(model, name) and innermost(getattr(model, name)()) is sharded:
                model.__dict__["resize_token_embeddings"] = _resize_token_embeddings


@functools.cache
def refuse_clipping() -> None:
    """Make ``torch.nn.utils.clip_grad_norm_`` raise for slices, from now on.

    It only sees the local slices. Norms and factors would differ between ranks, and replicated
    parameters would diverge.
    """
    clip: Any = clip_grad._clip_grads_with_norm_

    @functools.wraps(clip)
    def refusing(parameters: Any, *args: Any, **kwargs: Any) -> None:
        given: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        part = next((p for p in given if getattr(p, "orig_shape", p.shape) != p.shape), None)
        if part is not None:
            raise SlapoError(
                "torch.nn.utils.clip_grad_norm_ computed the norm of this rank's slices, such as "
                f"{tuple(part.shape)} of {tuple(part.orig_shape)}, which differs between ranks; "
                "no gradient was changed: call slapo.clip_grad_norm_(model, max_norm), which uses "
                "the norm of the whole model"
            )
        clip(given, *args, **kwargs)

    # The inner function: clip_grad_norm_ looks it up at each call, while scripts have imported
    # clip_grad_norm_ itself by name.
    clip_grad._clip_grads_with_norm_ = refusing


class WrapperGuard:
    """Pre-forward hook of a built model that protects its slices from wrappers.

    FSDP must not treat the schedule's ranks as replicas. Parameters replaced by
    ``torch.__future__.set_overwrite_module_params_on_conversion`` or ``torch.func.functional_call``
    get the tags of the old ones, so that gradients are still summed over the ranks.
    """

    #: Number of forwards that check all modules: FSDP may come after the first.
    _LOOKS = 16

    def __init__(self, group: GroupHandle) -> None:
        self.group, self._looks = group, 0
        self._tagged: list[nn.Module] = []

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise ``SlapoError`` if FSDP splits parameters over the schedule's ranks."""
        if torch.compiler.is_compiling():
            return
        if self._looks < self._LOOKS:
            self._looks += 1
            parts = list(map(innermost, module.modules()))
            if any("_is_fsdp_managed_module" in part.__dict__ for part in parts):
                # A wrapper around the model, such as FSDP of version 1, is found as a running
                # caller.
                for each in (*_callers(), *module.modules()):
                    _refuse_lost_sums(each)
                    for ranks in _ranks_of_fsdp(each):
                        self._refuse_shards(ranks)
                return  # FSDP has parameters of its own
            self._tagged = [part for part in parts if (s := sharding_of(part)) and s.tags]
            for part in parts:
                _renew(part)
        for part in self._tagged:
            _renew(part)

    def _refuse_shards(self, ranks: list[int]) -> None:
        both = common_ranks(self.group, ranks)
        if both:
            raise SlapoError(
                f"FSDP would shard parameters over the ranks {both}, over which this model is "
                "already sharded, and gather each from slices of different ones; rebuild the model "
                "and the schedule, and pass FSDP the data-parallel ranks, such as "
                "fully_shard(model, mesh=mesh['dp']), or let slapo.build(sch, target='torch', "
                "mesh=mesh, data_parallel='fsdp') do it"
            )


def guard_wrappers(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Add a `WrapperGuard` to a built model that is sharded over several ranks."""
    remove_pre_hooks(model, lambda hook: isinstance(hook, WrapperGuard))  # from an earlier build
    handle = GroupHandle(group)
    is_split = any(sharding_of(part) is not None for part in map(innermost, model.modules()))
    if is_split and handle.ranks is not None and len(handle.ranks) > 1:
        model.register_forward_pre_hook(WrapperGuard(handle))


def _renew(part: nn.Module) -> None:
    """Attach tags and hooks to parameters that replaced the original ones."""
    state = sharding_of(part)
    if state is not None and not state.is_attached_to(part):
        state.attach(part)


def _callers() -> Iterator[Any]:
    """Objects whose methods are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def _ranks_of_fsdp(module: Any) -> list[list[int]]:
    """Ranks over which FSDP, version 1 or 2, shards the parameters of a module."""
    # Late: the import takes two seconds, unless FSDP is in use already.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        return [dist.get_process_group_ranks(module.process_group)]
    if isinstance(module, FSDPModule):
        groups = _parameter_groups(module)
        return [each.mesh_info.mesh.mesh.flatten().tolist() for each in groups]
    return []


def _parameter_groups(module: Any) -> list[Any]:
    """FSDP2's parameter groups; older releases of torch have at most one."""
    state = module._get_fsdp_state()
    one = getattr(state, "_fsdp_param_group", None)
    groups: list[Any] = getattr(state, "_fsdp_param_groups", [] if one is None else [one])
    return groups


def _refuse_lost_sums(module: Any) -> None:
    """Raise if FSDP's new parameters lack the hooks that sum gradients."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    places: list[tuple[nn.Module, str]] = []
    if isinstance(module, FullyShardedDataParallel):
        states = [(part, sharding_of(part)) for part in map(innermost, module.modules())]
        places = [
            (part, name)
            for part, state in states
            if state
            for name in {**state.tags, **state.specs}
        ]
    elif isinstance(module, FSDPModule):
        found = [p for each in _parameter_groups(module) for p in each.fsdp_params]
        infos = [p._module_info for p in found if not is_summed(p.sharded_param)]
        places = [(innermost(info.module), info.param_name) for info in infos]
    for owner, name in places:
        state = sharding_of(owner)
        if state is None:
            continue
        spec = state.specs.get(name)
        held_twice = spec is not None and spec.copies > 1
        if held_twice or any(state.tags.get(name, {}).get(key) for key in PARTIAL_GRAD):
            why = "a slice that several ranks hold" if held_twice else "annotated as partial_grad"
            raise SlapoError(
                f"FSDP has created new parameters, and the gradient of {type(owner).__name__}'s "
                f"{name!r}, {why}, would not be summed over the ranks of the schedule; use "
                "slapo.build(sch, target='torch', mesh=mesh, data_parallel='fsdp'), which sums it"
            )
