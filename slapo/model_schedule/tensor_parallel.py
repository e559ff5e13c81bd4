"""Building blocks of recipes, implemented by primitives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slapo.errors import SlapoError
from slapo.model_schedule.recipe import TOKENS, Stack
from slapo.primitives.wrapping import base_of
from slapo.random import TENSOR_PARALLEL, get_rng_tracker
from slapo.schedule import Schedule
from slapo.sharding.collectives import copy_to_group
from slapo.sharding.groups import group_size
from slapo.sharding.state import sharding_of, shards_of
from slapo.sharding.steps import BROADCAST, carry_out
from slapo.sharding.vocab import look_up_own_rows, sum_looked_up


# --- layers --------------------------------------------------------------------------------------
def split_column(node: Schedule, blocks: int = 1, parts: int | None = None, **how: Any) -> Schedule:
    """Shard all tensors of a layer along its output features."""
    layer = base_of(node).mod
    names = [*layer._parameters.items(), *layer._buffers.items()]
    if not any(tensor is not None and tensor.dim() for _, tensor in names):
        raise ValueError(
            f"{node.path!r} ({type(layer).__name__}) has no weight of its own to split by "
            "columns; schedule the model before you wrap its layers"
        )
    for name, tensor in names:
        if tensor is not None and tensor.dim():
            axis = _out_axis(layer) if tensor.dim() > 1 else 0
            node.shard(name, axis=axis, blocks=blocks, parts=parts, **how)
    return node


def split_row(node: Schedule) -> Schedule:
    """Shard the weight by input features; the output becomes a partial sum."""
    return node.shard("weight", axis=1 - _out_axis(base_of(node).mod))


def _out_axis(module: nn.Module) -> int:
    """Return the weight axis of the output features; GPT-2's Conv1D is transposed."""
    return 1 if type(module).__name__ == "Conv1D" else 0


def sum_output(node: Schedule, axis: int | None) -> None:
    """All-reduce the partial sums, or reduce-scatter them along an axis."""
    if axis is None:
        node.sync("fwd_post", "all_reduce")
    else:
        node.sync("fwd_post", "reduce_scatter", axis=axis)


# --- experts and gradients -----------------------------------------------------------------------
def split_experts(node: Schedule) -> None:
    """Shard every expert; gradients of states and routing weights are partial."""
    node.shard("gate_up_proj", axis=1, blocks=2).shard("down_proj", axis=2)
    node.sync("fwd_pre", enter_experts)


def enter_experts(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pre-hook: sum the gradients of states and routing weights; indices have none."""
    states, index, weights, *rest = args
    group = group_of(module)
    return copy_to_group(states, group), index, copy_to_group(weights, group), *rest


def group_of(module: nn.Module) -> Any:
    """Return the process group of a scheduled module."""
    state = sharding_of(module)
    assert state is not None, "a sync has created it"
    return state.group.group


def sum_gradients(node: Schedule) -> None:
    """Sum the gradients of replicated parameters that take a part of the tokens or heads."""
    for name, parameter in node.mod._parameters.items():
        if parameter is not None and name not in shards_of(node.mod):
            node.annotate(name, "sequence_parallel", True)


# --- tokens --------------------------------------------------------------------------------------
def spread_tokens(
    base: Schedule,
    stack: Stack,
    layers: list[Schedule],
    sees_all: Callable[[Schedule, str], bool],
) -> None:
    """Shard tokens from the first layer to the last.

    Models make positions and masks from the embeddings, so these stay replicated. Tokens are
    scattered at the first layer and gathered at the end. `sees_all(layer, path)` is true for
    modules with all tokens, or with sharded parameters.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
    """
    for layer in layers:
        for name, module in layer.mod.named_modules():
            if module._parameters and not sees_all(layer, name):
                sum_gradients(layer[name] if name else layer)
        layer.fork_rng()  # dropout acts on different tokens on each rank
    layers[0].sync("fwd_pre", "RR->SR")
    end = base[stack.last] if stack.last else layers[-1]
    if stack.last:
        sum_gradients(end)
    end.sync("fwd_post", "all_gather", axis=TOKENS, tensor_parallel_output_grad=False)


# --- vocabulary ----------------------------------------------------------------------------------
def split_table(node: Schedule) -> None:
    """Shard an embedding by rows and sum the ranks' lookups."""
    # Few group sizes divide a vocabulary; the last ranks may have fewer rows.
    node.shard("weight", axis=0, uneven=True)
    if type(node.mod).forward is nn.Embedding.forward:
        node.sync("fwd_post", "all_reduce")
    else:  # Gemma's table scales its lookups; zeros of other ranks' rows stay zeros
        node.sync("fwd_pre", look_up_own_rows).sync("fwd_post", sum_looked_up)


def split_head(node: Schedule, gather: bool) -> None:
    """Shard the head by rows; gather its logits, or leave each rank its columns."""
    split_column(node, uneven=True).sync("bwd_post", "all_reduce")
    if gather:
        node.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


# --- types and seeds -----------------------------------------------------------------------------
def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model as Transformers' loader does.

    Computed buffers that are not saved, such as rotary frequencies, keep their precision.
    Parameters listed by the model's class do too.
    """
    # Transformers keeps the strict list for both dtypes, and the other one for float16 only.
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if dtype == torch.float16:
        names = (*names, *(getattr(model, "_keep_in_fp32_modules", None) or ()))
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            kept = any(f".{part}." in f".{path}.{name}." for part in names)
            if parameter is not None and parameter.is_floating_point() and not kept:
                # Keeps the parameter itself, so that ties, hooks and optimizers still refer to it.
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module._buffers.items():
            saved = name not in module._non_persistent_buffers_set
            if buffer is not None and buffer.is_floating_point() and saved:
                module._buffers[name] = buffer.to(dtype)


def require_seed(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Pre-hook: require a seed, since each rank's heads need different random values."""
    if module.training and TENSOR_PARALLEL not in get_rng_tracker().get_states():
        raise SlapoError(
            "attention drops weights of other heads on each rank, and no random state is set for "
            "that; call slapo.set_random_seed(seed, mesh=mesh), or tp_rank=sch.rank, before the "
            "first step"
        )


# --- inputs --------------------------------------------------------------------------------------
def broadcast_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pre-hook: broadcast the inputs of the group's first rank."""
    group = group_of(module)
    if group_size(group) == 1:
        return args, kwargs

    def received(tensor: Tensor) -> Tensor:
        # By carry_out(), which lets the placement check see the collective.
        return carry_out(BROADCAST, _from_first, tensor.detach(), group)

    return tree_map_only(Tensor, received, (args, kwargs))


def _from_first(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    # broadcast() writes in place and needs contiguous memory; the caller keeps its tensors.
    copy = tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(copy, group=group, group_src=0)
    return copy
