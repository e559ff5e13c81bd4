"""Low-rank adapters of PEFT around sharded layers.

PEFT adds two matrices to a layer: ``y = W x`` becomes ``W x + s B A x`` (Hu et al., "LoRA: Low-Rank
Adaptation of Large Language Models", 2021). If ``W`` is sharded by rows, so is ``B``, and each rank
computes a part of the gradient of ``A``. If ``W`` is sharded by columns, so is ``A``; its small
output is reduced like that of ``W``, and the full ``B`` acts on the sum.

Adapters come before the shards or after them. For the latter, a hook of torch's sees each module
that becomes an attribute of another one: PEFT makes the matrices in full size, by its own rules and
random values, and they are sharded when they take the place of their layer.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from slapo.errors import SlapoError
from slapo.hooks import move_input_hooks, move_output_hooks
from slapo.sharding.groups import group_size
from slapo.sharding.layout import PARTIAL, KnownSync
from slapo.sharding.shards import ShardPlan
from slapo.sharding.slicing import Cut
from slapo.sharding.state import Sharding, make_sharding, sharding_of, shards_of
from slapo.sharding.sync import REDUCTIONS, SyncOp
from slapo.sharding.sync_hooks import OutputHook
from slapo.sharding.tags import PARTIAL_GRAD, has_partial_grad
from slapo.wrapper import innermost, is_adapted

Pair = tuple[nn.Module, nn.Module]

#: On a layer while PEFT reads its full sizes: those of this rank.
_OWN_SIZES = "_slapo_own_sizes"


def pairs_of(module: nn.Module, path: str = "") -> list[Pair]:
    """The two matrices of each adapter; raise ``ValueError`` for other kinds of adapters."""
    tables: list[Any] = [module._modules.get(name) for name in ("lora_A", "lora_B")]
    names = list(innermost(tables[0])._modules) if is_adapted(module) else []
    if not names or getattr(module, "lora_variant", None):
        raise ValueError(
            f"{repr(path) if path else 'a sharded layer'} has adapters of {type(module).__name__} "
            "that are not two matrices of LoRA, and only these are sharded with their layer; use "
            "one rank for tensor parallelism, and more for data parallelism"
        )
    first, second = map(innermost, tables)
    return [(innermost(getattr(first, n)), innermost(getattr(second, n))) for n in names]


def shard_pair(pair: Pair, how: Cut, is_row: bool, group: dist.ProcessGroup | None) -> None:
    """Shard an adapter like the weight of its layer, whose input features `is_row` divides."""
    first, second = pair
    shards = [(first, "weight", 1)] if is_row else [(second, name, 0) for name in _names(second)]
    for module, name, axis in shards:
        ShardPlan(module, name, replace(how, axis=axis), group).carry_out()
        module.register_load_state_dict_pre_hook(_slice_full)
    if not is_row:
        _sum_gradients(first, group)


def reduce_pair(pair: Pair, op: SyncOp) -> None:
    """Reduce the output of an adapter's first matrix, a partial sum like that of the layer."""
    first, second = pair
    first.register_forward_hook(OutputHook(op))
    state = make_sharding(first, op.group.group)
    state.syncs = (*state.syncs, KnownSync("fwd_post", op.name, op.axis, op.output()))
    if op.name == "reduce_scatter":  # the second matrix gets a part of the tokens
        _sum_gradients(second, op.group.group)


def _slice_full(matrix: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook that slices the full values of PEFT's files."""
    for name, spec in shards_of(matrix).items():
        full = state_dict.get(prefix + name)
        if full is not None and full.shape == spec.full_shape:
            state_dict[prefix + name] = spec.slice(full)


def _names(matrix: nn.Module) -> list[str]:
    return [name for name, tensor in matrix._parameters.items() if tensor is not None]


def _sum_gradients(matrix: nn.Module, group: dist.ProcessGroup | None) -> None:
    for name in _names(matrix):
        make_sharding(matrix, group).tag(matrix, name, PARTIAL_GRAD[0], True)


# --- adapters that come after the shards ---------------------------------------------------------
@functools.cache
def follow_adapters() -> None:
    """From now on, shard the adapters that are put around sharded layers."""
    register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Hook of torch's, called before `module` becomes ``parent.name``."""
    if "peft" not in sys.modules:
        return
    old: Any = parent._modules.get(name)
    if name == "base_layer" and _is_of_peft(parent) and not is_adapted(parent):
        _show_full_sizes(module)
    elif _is_of_peft(module):
        _take_over(module)
    elif _is_of_peft(old) and old.base_layer is module:
        _give_back(old, module)


def _is_of_peft(module: Any) -> bool:
    return any(cls.__name__ == "BaseTunerLayer" for cls in type(module).__mro__)


def _sharding_over_ranks(module: nn.Module) -> Sharding | None:
    state = sharding_of(module)
    return None if state is None or group_size(state.group.group) == 1 else state


def _show_full_sizes(base: Any) -> None:
    """Set what PEFT reads to the sizes of the full layer."""
    state = _sharding_over_ranks(base)
    if state is not None and "weight" in state.specs:
        base.__dict__.setdefault(_OWN_SIZES, {name: getattr(base, name) for name in state.sizes})
        base.__dict__.update(state.sizes)
        base.weight.ds_shape = state.specs["weight"].full_shape  # for Transformers' Conv1D


def _hide_full_sizes(base: Any) -> tuple[int, ...]:
    """Restore this rank's sizes; return the full shape of the weight, or () without one."""
    base.__dict__.update(base.__dict__.pop(_OWN_SIZES, {}))
    weight = base._parameters.get("weight")
    return () if weight is None else weight.__dict__.pop("ds_shape", tuple(weight.shape))


def _take_over(adapted: Any) -> None:
    """Shard new adapters with their layer, and run the layer's hooks around both."""
    base = adapted.base_layer
    state = _sharding_over_ranks(base)
    if state is None or any(sharding_of(m) for m in adapted.modules() if m is not base):
        return  # none of it is sharded, or all of it is
    full = _hide_full_sizes(base)
    if not (state.specs or is_adapted(adapted)):
        return  # another kind of adapters, around a full layer
    pairs, spec, group = pairs_of(adapted), state.specs.get("weight"), state.group.group
    _check_sizes(adapted, pairs, full)
    is_row = state.layout.output == PARTIAL
    ops = [hook.function for hook in (*state.reducers, *_reductions(base).values()) if is_row]
    _move_hooks(base, adapted, base, stay=is_row)
    for pair in pairs:
        for parameter in (p for matrix in pair for p in matrix.parameters()):
            if not parameter.is_meta:  # each rank has drawn its own values
                dist.broadcast(parameter.detach(), group=group, group_src=0)
        if spec is not None:
            parts = spec.parts if spec.copies > 1 else None
            shard_pair(pair, Cut(spec.axis, spec.blocks, spec.is_uneven, parts), is_row, group)
        elif has_partial_grad(base._parameters.get("weight")):
            for matrix in pair:
                _sum_gradients(matrix, group)
        for op in ops:
            reduce_pair(pair, op)


def _check_sizes(adapted: nn.Module, pairs: list[Pair], full: tuple[int, ...]) -> None:
    first: Any
    second: Any
    for first, second in pairs:
        outputs, inputs = second.weight.shape[0], first.weight.shape[1]
        if sorted([outputs, inputs]) != sorted(full[:2]):
            raise SlapoError(
                f"the adapters of {type(adapted).__name__} have {inputs} inputs and {outputs} "
                f"outputs, but the weight of their layer is {tuple(full)}: they were made from "
                "this rank's slice of it; pass init_lora_weights=True or 'gaussian', which do not "
                "read it, or add the adapters before slapo.create_schedule"
            )


def _give_back(adapted: nn.Module, base: Any) -> None:
    """Move the hooks back to a layer whose adapters go, as by ``merge_and_unload``."""
    if sharding_of(adapted) is not None:
        _move_hooks(adapted, base, base, stay=True)


def _move_hooks(source: nn.Module, target: nn.Module, base: nn.Module, stay: bool) -> None:
    """Move hooks and syncs; with `stay`, reductions stay at `base`, where they come first."""
    inner = _reductions(base) if stay else {}
    for key in inner:
        del base._forward_hooks[key]
    move_input_hooks(source, target)
    move_output_hooks(source, target)
    for hook in reversed(inner.values()):
        base.register_forward_hook(hook, prepend=True)
    state: Any = sharding_of(source)
    kept = [s for s in state.syncs if stay and source is base and s.op in REDUCTIONS]
    moved = make_sharding(target, state.group.group)
    moved.syncs = (*moved.syncs, *(sync for sync in state.syncs if sync not in kept))
    state.syncs = tuple(kept)


def _reductions(base: nn.Module) -> dict[int, Any]:
    hooks: dict[int, Any] = base._forward_hooks
    outputs: dict[int, Any] = {k: hook for k, hook in hooks.items() if isinstance(hook, OutputHook)}
    return {key: hook for key, hook in outputs.items() if hook.function.name in REDUCTIONS}
