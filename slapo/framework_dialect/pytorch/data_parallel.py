"""Data parallelism by DDP, or by FSDP2 with shards, replicas of shards, or both."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from slapo.errors import SlapoError
from slapo.framework_dialect.options import check_names
from slapo.framework_dialect.precision import cast_parameters
from slapo.mesh import set_timeout, timeout_of_job
from slapo.sharding.tags import forget_hook, summed_over, tags_of


def fsdp_units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that FSDP2 gathers one at a time, outermost first.

    These are the items of lists. Without lists inside, they are also siblings of one class that
    have submodules, such as ``block1`` and ``block2``.
    """
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    if _is_list(module):
        for child in children:
            # Parameters are gathered by a forward, which an inner list or dict lacks.
            yield from fsdp_units(child) if _is_container(child) else [child]
        return
    classes = Counter(type(child) for child in children)
    for child in children:
        inner = list(fsdp_units(child))
        if not inner and classes[type(child)] > 1 and any(True for _ in child.children()):
            yield child
        yield from inner


def _is_list(module: nn.Module) -> bool:
    # In a stage, lists are plain modules whose children have numeric names.
    names = [name for name, _ in module.named_children()]
    numbered = bool(names) and all(name.isdigit() for name in names)
    return numbered or isinstance(module, nn.ModuleDict)


def _is_container(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward


def _untied(module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Units that share no parameter with other modules; the rest is gathered with the root."""
    # FSDP2 requires that modules which share a parameter are in one unit: outside its unit the
    # parameter is only a shard.
    within = [{id(p) for p in unit.parameters()} for unit in units]
    inner = {id(m) for unit in units for m in unit.modules()}
    outside = (m for m in module.modules() if id(m) not in inner)
    places = Counter(id(p) for m in outside for p in set(m._parameters.values()) if p is not None)
    for ids in within:
        places.update(ids)
    return [u for u, ids in zip(units, within, strict=True) if all(places[i] == 1 for i in ids)]


def shard_mesh(mesh: DeviceMesh, shard_size: int) -> DeviceMesh:
    """Return the data-parallel ranks as replicas of shards. A collective of the world.

    Neighbors shard parameters; with a single replica the mesh has one dimension only.
    """
    pp, dp, tp = mesh.shape
    if shard_size == dp:
        return mesh["dp"]
    sizes, names = (pp, dp // shard_size, shard_size, tp), ("pp", "replicate", "shard", "tp")
    whole = DeviceMesh(mesh.device_type, mesh.mesh.view(sizes), mesh_dim_names=names)
    # DeviceMesh creates its groups with torch's default timeout.
    for name in names:
        set_timeout(timeout_of_job(), whole.get_group(name))
    return whole["replicate", "shard"]


def check_parallel_options(given: Mapping[str, Any], sharded: bool, pipelined: bool) -> None:
    """Refuse options unknown to ``fully_shard`` or DDP; pipelines do not use DDP."""
    if given and pipelined and not sharded:
        raise TypeError(
            f"data_parallel_options has {sorted(given)}, but pipelines average gradients without "
            'DDP; leave it out, or pass data_parallel="fsdp"'
        )
    taker: Any = fully_shard if sharded else DistributedDataParallel
    known = sorted(set(inspect.signature(taker).parameters) - _OURS)
    if not pipelined:
        known = sorted({*known, "find_unused_parameters"})
    check_names(f"torch: data_parallel_options of {taker.__name__}", given, known)


_OURS = {"module", "mesh", "process_group", "device_ids", "output_device"}


def refuse_sharded(module: nn.Module) -> None:
    """Refuse a model that FSDP2 already holds."""
    if any(isinstance(m, FSDPModule) for m in module.modules()):
        raise SlapoError(
            'this model was already built with data_parallel="fsdp" or in half precision; '
            "create a new model and schedule"
        )


def shard_parameters(
    module: nn.Module,
    over: DeviceMesh,
    options: Mapping[str, Any],
    half: torch.dtype | None = None,
) -> list[FSDPModule]:
    """Shard the parameters over data-parallel ranks in place (FSDP2).

    `over` has one dimension of shards, or two: replicas and shards. Tags are copied to the new
    parameters. Returns the modules that are gathered one at a time, the outermost last.
    """
    given = dict(options)
    if half is not None:
        # An optimizer's small steps need float32.
        cast_parameters(module, torch.float32)
        # Inputs are cast where they enter the model. Dtypes between stages and layers are intended.
        given.setdefault(
            "mp_policy",
            MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False),
        )
    # fully_shard replaces each Parameter by a DTensor without its Python attributes.
    carried = {n: tags_of(p) for n, p in module.named_parameters(remove_duplicate=False)}
    # The root last: it takes the parameters that no unit has taken before.
    parts = [*_untied(module, list(dict.fromkeys(fsdp_units(module)))), module]
    sharded = [fully_shard(part, mesh=over, **given) for part in parts]
    _include_unused(sharded)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameter.__dict__.update(carried[name])
    return sharded


def _include_unused(sharded: Sequence[FSDPModule]) -> None:
    """Make parameters without a gradient take part in reductions with zeros.

    Replicas may use different parameters, such as experts, and gradients of different parameters
    would be summed.
    """
    include = getattr(sharded[-1], "set_reduce_scatter_unused_params", None)
    if include is None:  # older releases of torch
        return
    include(True)
    groups = [group for part in sharded for group in _groups_of(part)]
    # From 2.15 on, torch accumulates in `grad` itself and brings a group to one dtype.
    if groups and hasattr(groups[0].fsdp_params[0], "to_accumulated_grad_if_needed"):
        for group in groups:
            group.post_backward = functools.partial(_post_backward, group, group.post_backward)


def _post_backward(group: Any, reduce: Callable[..., None], *args: Any) -> None:
    """Reduce a group, with single and absent gradients in the dtype of accumulated ones."""
    params = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    # With mp_policy, parameters used by earlier micro-batches have accumulated float32 gradients;
    # those that only the last one used have theirs in half precision. FSDP2 reduces a group in one
    # buffer, and refuses mixed dtypes.
    if group.reduce_grads and any(p.unsharded_accumulated_grad is not None for p in params):
        for param in params:
            whole = param._unsharded_param
            if whole.requires_grad and param.unsharded_accumulated_grad is None:
                grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
                param.unsharded_accumulated_grad, whole.grad = grad.to(param.reduce_dtype), None
    reduce(*args)


@contextmanager
def gathered_at_once(sharded: Sequence[FSDPModule], training: bool) -> Iterator[None]:
    """Context in which replicas may use different units.

    All units are gathered at its start, and their gradients are reduced at its end, in one order on
    all replicas; missing gradients count as zeros.
    """
    root: Any = sharded[-1]._get_fsdp_state()
    # As the first forward would: it marks the root, and creates the streams that units share.
    root._lazy_init()
    groups = [group for part in sharded for group in _groups_of(part)]
    before = [(g.post_forward_mesh_info, g.reshard_after_backward) for g in groups]
    for part in sharded:
        part.unshard()
    for group in groups:
        # Gathered parameters stay for the whole step, and each backward only accumulates its
        # gradients.
        group.post_forward_mesh_info, group.reshard_after_backward = None, False
        group.reduce_grads = group.all_reduce_grads = False
    try:
        yield
    finally:
        for group, (info, reshards) in zip(groups, before, strict=True):
            group.post_forward_mesh_info, group.reshard_after_backward = info, reshards
            group.reduce_grads = group.all_reduce_grads = True
    if training:
        if not hasattr(sharded[-1], "set_reduce_scatter_unused_params"):  # torch 2.11
            for param in (param for group in groups for param in group.fsdp_params):
                whole = param._unsharded_param
                has_none = whole.grad is None and param.unsharded_accumulated_grad is None
                if whole.requires_grad and has_none:
                    whole.grad = torch.zeros_like(whole)
                    param.to_accumulated_grad_if_needed()
        # What FSDP2 runs at the end of a backward: it reduces every unit whose reduction is
        # pending, in one order on all replicas. Torch 2.15 asks first who finalizes it.
        root._state_ctx.manual_backward_finalization_active = False
        root._root_post_backward_final_callback()
    for part in sharded:
        part.reshard()


def _groups_of(part: FSDPModule) -> list[Any]:
    state: Any = part._get_fsdp_state()
    # Older releases of torch have one group, or none.
    return getattr(state, "_fsdp_param_groups", None) or [g for g in [state._fsdp_param_group] if g]


def replicate(module: nn.Module, mesh: DeviceMesh, options: Mapping[str, Any]) -> nn.Module:
    """Wrap the module in DDP; with a single replica, return it unchanged."""
    if mesh.shape[1] == 1 or not any(p.requires_grad for p in module.parameters()):
        return module
    # The values were compared before.
    chosen = {"init_sync": False, **options}
    return DistributedDataParallel(module, process_group=mesh.get_group("dp"), **chosen)


@contextmanager
def without_sync(module: nn.Module) -> Iterator[None]:
    """Context in which backward accumulates gradients locally."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
    else:
        yield


@contextmanager
def without_sharding(module: nn.Module) -> Iterator[None]:
    """Context in which calls gather no parameters, since the caller has replaced them."""
    hooks: list[tuple[Any, dict[int, Any]]] = []
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            for table in (part._forward_pre_hooks, part._forward_hooks):
                hooks.append((table, dict(table)))
                for key, hook in hooks[-1][1].items():
                    if getattr(hook, "__self__", None) is state:
                        del table[key]
    try:
        yield
    finally:
        for table, before in hooks:
            table.clear()
            table.update(before)


def partial_sums(
    module: nn.Module, group: dist.ProcessGroup | None
) -> list[tuple[list[nn.Parameter], dist.ProcessGroup]]:
    """Return parameters whose gradients stay partial from now on, with the groups to sum over.

    Removes their own hooks, which would sum the gradients in each backward pass.
    """
    found: dict[int, tuple[list[nn.Parameter], dist.ProcessGroup]] = {}
    for parameter in module.parameters():
        over = summed_over(parameter, group)
        if over is not None:
            forget_hook(parameter)
            found.setdefault(id(over), ([], over))[0].append(parameter)
    return list(found.values())
