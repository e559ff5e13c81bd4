"""Tensor parallelism by the plan that a config of Transformers carries: module -> style.

A style says how one module is split and what it communicates. Transformers carries it out with
distributed tensors; here it is primitives on plain ones, and the gradient of an input that several
column layers share is summed once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from slapo.model_schedule.recipe import TOKENS
from slapo.model_schedule.tensor_parallel import (
    divide_groups,
    group_of,
    split_column,
    split_row,
    split_table,
    sum_gradients,
)
from slapo.schedule import Schedule
from slapo.sharding.collectives import copy_to_group, reduce_from_group
from slapo.sharding.groups import group_size

#: Model type -> what its plan lacks or has wrong; each found by the placement check.
PLAN_FIXES: dict[str, dict[str, str]] = {
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    "inkling_text": {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
    "inkling2_text": {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
    **{
        name: {
            "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
            "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        }
        for name in ("qwen3_vl_moe_text", "qwen3_omni_moe_text", "qwen3_omni_moe_talker_text")
    },
}

#: Arguments of a second sequence, whose gradient is summed by itself.
_SECOND_INPUTS = frozenset({"encoder_hidden_states", "key_value_states", "cross_attention_states"})
#: Styles of modules within a block whose input every one of them takes as slices, or not at all.
_SPLIT = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce", "local_params"})

#: Projections whose heads several ranks share if there are fewer, and how many queries a head has.
_KEYS_VALUES, _GROUPS = ("k_proj", "v_proj"), "num_key_value_groups"

#: Within attention over latents: what norms them, and the projection from them to the heads.
_FROM_LATENT, _TO_HEADS = "kv_a", "kv_b"


# --- the plan of a model -------------------------------------------------------------------------
def plan_of(model: nn.Module) -> dict[str, str]:
    """The plan with its fixes; digits of paths are ``*``, and paths are from the whole model."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    config: Any = getattr(model, "config", None)
    own = getattr(config, "model_type", "")
    text = getattr(config.get_text_config(), "model_type", "") if config is not None else ""
    within = _commonest_start(plan)
    for kind in dict.fromkeys((own, text)):
        for path, style in PLAN_FIXES.get(kind, {}).items():
            plan[f"{within}{path}"] = style
    return plan


def _commonest_start(plan: Mapping[str, str]) -> str:
    """The path in front of ``layers.*``."""
    found = next((path for path in plan if "layers.*" in path), "layers.*")
    return found[: found.index("layers.*")]


def entries(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Path of a module or parameter -> style; parameters of a module before the module."""
    found = {}
    for path, module in model.named_modules():
        names = [f"{path}.{name}" if path else name for name in module._parameters]
        for each in (*names, path):
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", each))
            if style is not None:
                found[each] = style
    return found


def unknown_styles(plan: Mapping[str, str]) -> dict[str, str]:
    """Entries whose style nothing is known of."""
    return {path: s for path, s in plan.items() if s not in _MODULES and s not in _PARAMETERS}


# --- carried out ---------------------------------------------------------------------------------
def split_by_plan(
    sch: Schedule,
    plan: Mapping[str, str],
    layers: list[Schedule],
    tokens: bool,
    key_values: int | None = None,
) -> None:
    """Shard and sync as a plan says; `key_values` heads are shared by several ranks each."""
    found = entries(sch.mod, plan)
    few = {p for p in found if p.rpartition(".")[2] in _KEYS_VALUES} if key_values else set[str]()
    if key_values and not few:
        raise ValueError(
            f"{key_values} heads of keys and values are fewer than the {sch.world_size} ranks, and "
            f"the plan has none of {list(_KEYS_VALUES)} to be shared; pick a group of no more ranks"
        )
    sharing = _sharing(sch, found)
    latent = {path.rpartition(".")[0] for path, each in found.items() if each == "mla_kv_a_proj"}
    paths = {layer.path for layer in layers}
    blocks = {path for path in sharing if path.rpartition(".")[0] in paths} if tokens else set()
    for path, style in found.items():
        owner, _, leaf = path.rpartition(".")
        if path not in sch:
            _PARAMETERS[style](sch[owner] if owner else sch, leaf)
        elif style == "rowwise" and owner in blocks:
            split_row(sch[path]).sync("fwd_post", "reduce_scatter", axis=TOKENS)
        else:
            if path in few:
                split_column(sch[path], parts=key_values)
            else:
                _MODULES[style](sch[path])
            summed = owner in sharing or (owner in latent and leaf.startswith(_TO_HEADS))
            if style in _COLUMNS and not summed:
                sch[path].sync("bwd_post", "all_reduce")
    for path in sorted(sharing - blocks):  # a set has another order on each rank
        sch[path].sync("bwd_post", "all_reduce")
    for layer in layers if tokens else ():
        _gather_at_blocks(layer, blocks)
    for owner in sorted({path.rpartition(".")[0] for path in few}):
        if key_values and hasattr(sch[owner].mod, _GROUPS):
            divide_groups(sch[owner], _GROUPS, key_values)


def _sharing(sch: Schedule, plan: Mapping[str, str]) -> set[str]:
    """Modules of which all is split: one sum of their input's gradient is enough."""
    found = set()
    for path in {path.rpartition(".")[0] for path, style in plan.items() if style == "colwise"}:
        if not path or path not in sch:
            continue
        module = sch[path].mod
        own = [f"{path}.{name}" for name, each in module.named_modules() if each._parameters]
        takes = set(inspect.signature(module.forward).parameters)
        split = f"{path}." not in own and all(plan.get(each) in _SPLIT for each in own)
        if split and not _SECOND_INPUTS & takes:
            found.add(path)
    return found


def _gather_at_blocks(layer: Schedule, blocks: set[str]) -> None:
    """`blocks` gather tokens and scatter their sum; others have all tokens on every rank."""
    for block in list(layer.child.values()):
        if block.path in blocks:
            block.sync("fwd_pre", "all_gather", axis=TOKENS)
        elif block.child:
            block.sync("fwd_pre", "all_gather", axis=TOKENS, tensor_parallel_output_grad=False)
            block.sync("fwd_post", "scatter", axis=TOKENS)
        else:
            sum_gradients(block)
    layer.fork_rng()


# --- styles of modules ---------------------------------------------------------------------------
def _gathered_column(node: Schedule) -> None:
    split_column(node)
    node.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


def _row(node: Schedule) -> None:
    split_row(node).sync("fwd_post", "all_reduce")


def _row_of_whole(node: Schedule) -> None:
    split_row(node).sync("fwd_pre", "RR->RS").sync("fwd_post", "all_reduce")


def _table_columns(node: Schedule) -> None:
    node.shard("weight", axis=1)
    node.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


def _experts(node: Schedule) -> None:
    """A slice of every expert; routing weights get parts of their gradient too."""
    node.sync("fwd_pre", enter_floats).sync("fwd_post", "all_reduce")


def _latent(node: Schedule) -> None:
    """A latent projection: all that is made of it, by heads, sums its gradient here, once.

    Rotary features go to the heads directly, the others through a norm and another projection,
    which leaves its part of the gradient as it is.
    """
    node.sync("fwd_post", copy_output)
    owner, own = node.parent, node.path.rpartition(".")[2]
    for name, child in owner.child.items() if owner is not None else ():
        if name != own and name.startswith(_FROM_LATENT):
            sum_gradients(child)


def _nothing(node: Schedule) -> None:
    """Parameters are plain tensors here anyway."""


def _summed(node: Schedule) -> None:
    node.sync("fwd_post", sum_output)


def _identity_expert(node: Schedule) -> None:
    node.sync("fwd_pre", divide_input)


_COLUMNS = ("colwise", "packed_colwise", "colwise_rep", "colwise_gather_output")
_MODULES: dict[str, Callable[[Schedule], Any]] = {
    "colwise": split_column,
    "colwise_rep": _gathered_column,
    "colwise_gather_output": _gathered_column,
    "packed_colwise": lambda node: split_column(node, blocks=2),
    "rowwise": _row,
    "rowwise_rep": _row_of_whole,
    "rowwise_split_input": _row_of_whole,
    "replicated_with_grad_allreduce": sum_gradients,
    "embedding_rowwise": split_table,
    "embedding_colwise": _table_columns,
    "moe_tp_experts": _experts,
    "mla_kv_a_proj": _latent,
    "moe_identity_expert": _identity_expert,
    "all_reduce": _summed,
    "local_params": _nothing,
    "replicate": _nothing,
}


# --- styles of bare parameters -------------------------------------------------------------------
def _outputs(node: Schedule, name: str, blocks: int = 1) -> None:
    """Shard outputs of experts ``(experts, out, in)``, along the last axis but one."""
    dims = node.mod._parameters[name].dim()  # type: ignore[union-attr]
    node.shard(name, axis=max(dims - 2, 0) if dims != 2 or "bias" not in name else 1, blocks=blocks)


def _inputs(node: Schedule, name: str, blocks: int = 1) -> None:
    if "bias" not in name:
        node.shard(name, axis=-1, blocks=blocks)


_PARAMETERS: dict[str, Callable[[Schedule, str], Any]] = {
    "colwise": _outputs,
    "packed_colwise": lambda node, name: _outputs(node, name, 2),
    "rowwise": _inputs,
    "packed_rowwise": lambda node, name: _inputs(node, name, 2),
    "replicate": lambda node, name: None,
}


# --- hooks ---------------------------------------------------------------------------------------
def enter_floats(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hook: sum the gradients of all floating-point inputs."""
    group = group_of(module)
    floats = [isinstance(each, Tensor) and each.is_floating_point() for each in args]
    return tuple(
        copy_to_group(each, group) if is_float else each
        for each, is_float in zip(args, floats, strict=True)
    )


def copy_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Hook: sum the gradient of the output."""
    return copy_to_group(output, group_of(module))


def sum_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Hook: the sum over the ranks."""
    return reduce_from_group(output, group_of(module))


def divide_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hook: each rank's part of what is summed behind."""
    group = group_of(module)
    ranks = group_size(group)
    return (args[0] / ranks, *args[1:])
