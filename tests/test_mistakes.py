"""Mistakes that users make, and what they are told: golden files, written by ``--update-golden``.

A mistake is a generator: up to its ``yield`` all is well, after it comes the mistake. What it
yields is the schedule that the mistake must not change, if there is one.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.pytorch_utils import Conv1D

import slapo
from slapo import Schedule
from tests.distributed import run_distributed
from tests.fingerprint import fingerprint
from tests.primitives.models import Attention, Block, DataDependent, Stack, Tied

GOLDEN = Path(__file__).parent / "golden" / "mistakes"

Mistake = Callable[[], Iterator[Schedule | None]]
#: (what the user called, number of ranks) -> mistakes
TABLE: dict[tuple[str, int], list[Mistake]] = {}


def mistake(group: str, ranks: int = 1) -> Callable[[Mistake], Mistake]:
    def add(function: Mistake) -> Mistake:
        TABLE.setdefault((group, ranks), []).append(function)
        return function

    return add


def stack() -> Schedule:
    return slapo.create_schedule(Stack())


def gelu(x: Any) -> Any:
    return F.gelu(x)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=12,
        n_head=3,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def llama(heads: int = 4, kv_heads: int = 1) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


# --- paths ---------------------------------------------------------------------------------------
@mistake("paths")
def a_letter_is_missing():
    sch = stack()
    yield sch
    sch["layer.0.fc1"].checkpoint()


@mistake("paths")
def the_list_itself():
    sch = stack()
    yield sch
    sch["layers"].checkpoint()


@mistake("paths")
def a_number():
    sch = stack()
    yield sch
    sch[0]


@mistake("paths")
def an_item_of_the_list_by_number():
    sch = stack()
    yield sch
    sch.layers[0].checkpoint()


@mistake("paths")
def a_child_as_an_attribute():
    sch = stack()
    yield sch
    sch.head.shard("weight", axis=0)


@mistake("paths")
def an_attribute_of_the_module():
    sch = stack()
    yield sch
    print(sch["head"].out_features)


@mistake("paths")
def a_parameter():
    sch = stack()
    yield sch
    sch["head.weight"].shard("weight", axis=0)


@mistake("paths")
def the_whole_path_below_a_node():
    sch = stack()
    yield sch
    sch["layers.0"]["layers.0.fc1"].checkpoint()


@mistake("paths")
def the_head_is_around_the_model():
    sch = slapo.create_schedule(gpt2())
    yield sch
    sch["h.0.attn.c_attn"].shard("weight", axis=1)


@mistake("paths")
def a_number_too_many():
    sch = stack()
    yield sch
    for i in range(4):
        sch[f"layers.{i}"]


@mistake("paths")
def a_primitive_that_is_none():
    sch = stack()
    yield sch
    sch["head"].shrad("weight", axis=0)


@mistake("paths")
def a_node_of_a_module_that_is_gone():
    sch = stack()
    fc1 = sch["layers.0.fc1"]
    sch["layers.0"].replace(Block())
    yield sch
    fc1.shard("weight", axis=0)


@mistake("paths")
def a_glob_that_matches_nothing():
    sch = stack()
    yield sch
    sch.select("layer.*.fc1").shard("weight", axis=0)


@mistake("paths")
def one_module_for_a_selection():
    sch = stack()
    yield sch
    sch.select("layers.*").replace(Block())


@mistake("paths")
def a_primitive_of_a_selection_that_is_none():
    sch = stack()
    yield sch
    sch.select("layers.*").chekpoint()


# --- create_schedule -----------------------------------------------------------------------------
@mistake("create_schedule")
def the_class_of_the_model():
    yield
    slapo.create_schedule(Stack)


@mistake("create_schedule")
def the_name_of_a_model():
    yield
    slapo.create_schedule("gpt2")


@mistake("create_schedule")
def a_schedule_twice():
    sch = stack()
    yield sch
    slapo.create_schedule(sch)


@mistake("create_schedule")
def a_group_before_its_time():
    yield
    slapo.create_schedule(Stack(), group="tp")


@mistake("create_schedule")
def all_dimensions_of_a_mesh():
    mesh = slapo.init_mesh(device="cpu")
    yield
    slapo.create_schedule(Stack(), group=mesh)


@mistake("create_schedule")
def the_name_of_a_dimension():
    slapo.init_mesh(device="cpu")
    yield
    slapo.create_schedule(Stack(), group="tp")


# --- shard ---------------------------------------------------------------------------------------
@mistake("shard")
def a_tensor_that_is_none():
    sch = stack()
    yield sch
    sch["head"].shard("weights", axis=0)


@mistake("shard")
def several_tensors():
    sch = stack()
    yield sch
    sch["head"].shard(["weight", "bias"], axis=0)


@mistake("shard")
def a_tensor_further_down():
    sch = stack()
    yield sch
    sch["layers.0"].shard("fc1.weight", axis=0)


@mistake("shard")
def a_tensor_of_a_list_item_from_the_root():
    sch = stack()
    yield sch
    sch.shard("layers.0.fc1.weight", axis=0)


@mistake("shard")
def a_module_without_tensors():
    sch = stack()
    yield sch
    sch["layers.0"].shard("weight", axis=0)


@mistake("shard")
def an_axis_beyond_the_last():
    sch = stack()
    yield sch
    sch["head"].shard("bias", axis=1)


@mistake("shard")
def an_axis_in_quotes():
    sch = stack()
    yield sch
    sch["head"].shard("weight", axis="0")


@mistake("shard")
def no_axis():
    sch = stack()
    yield sch
    sch["head"].shard("weight")


@mistake("shard")
def a_keyword_of_another_library():
    sch = stack()
    yield sch
    sch["head"].shard("weight", dim=0)


@mistake("shard")
def a_bias_that_is_none():
    sch = slapo.create_schedule(Tied())
    yield sch
    sch["head"].shard("bias", axis=0)


@mistake("shard")
def twice():
    sch = stack()
    sch["head"].shard("weight", axis=0)
    yield sch
    sch["head"].shard("weight", axis=0)


@mistake("shard")
def blocks_that_do_not_fit():
    sch = stack()
    yield sch
    sch["head"].shard("weight", axis=0, blocks=3)


@mistake("checkpoint")
def a_module_of_a_flat_graph():
    sch = slapo.create_schedule(nn.Sequential(Block(), nn.Linear(4, 4)))
    sch.trace(flatten=True)
    yield sch
    sch["0"].checkpoint()


@mistake("shard", ranks=2)
def a_size_that_is_not_divided():
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 5)))
    yield sch
    sch["0"].shard("weight", axis=0)


@mistake("shard", ranks=2)
def a_vocabulary_that_is_not_divided():
    sch = slapo.create_schedule(nn.Sequential(nn.Embedding(50257, 2)))
    yield sch
    sch["0"].shard("weight", axis=0)


@mistake("shard", ranks=2)
def a_layer_norm():
    sch = slapo.create_schedule(nn.Sequential(nn.LayerNorm(4)))
    yield sch
    sch["0"].shard("weight", axis=0)


@mistake("shard", ranks=2)
def attention_of_torch():
    sch = slapo.create_schedule(nn.Sequential(nn.MultiheadAttention(4, 2)))
    yield sch
    sch["0"].shard("in_proj_weight", axis=0)


@mistake("shard", ranks=2)
def the_bias_of_a_row_layer():
    sch = stack()
    sch["head"].shard("weight", axis=1)
    yield sch
    sch["head"].shard("bias", axis=0)


@mistake("shard", ranks=2)
def weight_and_bias_in_other_blocks():
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 12)))
    sch["0"].shard("weight", axis=0, blocks=3)
    yield sch
    sch["0"].shard("bias", axis=0)


@mistake("shard", ranks=2)
def a_tie_along_another_axis():
    sch = slapo.create_schedule(Tied())
    sch["emb"].shard("weight", axis=0)
    yield sch
    sch["head"].shard("weight", axis=1)


@mistake("shard", ranks=2)
def more_blocks_than_heads():
    """One key and value head cannot lie on two ranks."""
    sch = slapo.create_schedule(llama(kv_heads=1))
    yield sch
    sch["model.layers.0.self_attn.k_proj"].shard("weight", axis=0, blocks=[1, 3])


# --- sync ----------------------------------------------------------------------------------------
@mistake("sync")
def an_op_that_is_none():
    sch = stack()
    yield sch
    sch["head"].sync("fwd_post", "allreduce")


@mistake("sync")
def a_mode_that_is_none():
    sch = stack()
    yield sch
    sch["head"].sync("forward", "all_reduce")


@mistake("sync")
def op_and_mode_swapped():
    sch = stack()
    yield sch
    sch["head"].sync("all_reduce", "fwd_post")


@mistake("sync")
def an_op_in_a_mode_that_is_not_its_own():
    sch = stack()
    yield sch
    sch["head"].sync("fwd_pre", "all_reduce")


@mistake("sync")
def no_axis_to_gather_along():
    sch = stack()
    yield sch
    sch["head"].sync("fwd_post", "all_gather")


@mistake("sync")
def a_keyword_that_the_op_does_not_take():
    sch = stack()
    yield sch
    sch["head"].sync("fwd_post", "all_reduce", axis=-1)


@mistake("sync")
def no_op():
    sch = stack()
    yield sch
    sch["head"].sync("fwd_post")


@mistake("sync")
def a_function_of_torch():
    sch = stack()
    yield sch
    sch["head"].sync("fwd_post", dist.all_reduce)


@mistake("sync")
def a_hook_of_the_output_alone():
    sch = stack()
    yield sch
    sch["head"].sync("fwd_post", lambda output: 2 * output)


@mistake("sync")
def a_function_with_an_axis():
    sch = stack()
    yield sch
    sch["head"].sync("fwd_post", lambda module, args, output: output, axis=0)


@mistake("sync")
def an_input_that_is_none():
    sch = stack()
    yield sch
    sch["layers.0"].sync("bwd_post", "all_reduce", argument="hidden_states")


@mistake("sync", ranks=2)
def a_slice_is_reduced():
    sch = stack()
    sch["layers.0.fc1"].shard("weight", axis=0).shard("bias", axis=0)
    yield sch
    sch["layers.0.fc1"].sync("fwd_post", "all_reduce")


@mistake("sync", ranks=2)
def a_partial_sum_is_gathered():
    sch = stack()
    sch["layers.0.fc2"].shard("weight", axis=1)
    yield sch
    sch["layers.0.fc2"].sync("fwd_post", "all_gather", axis=-1)


@mistake("sync", ranks=2)
def a_sum_twice():
    sch = stack()
    sch["layers.0.fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    yield sch
    sch["layers.0.fc2"].sync("fwd_post", "all_reduce")


@mistake("sync", ranks=2)
def a_gradient_twice():
    sch = stack()
    sch["layers.0.fc1"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    yield sch
    sch["layers.0.fc1"].sync("bwd_post", "all_reduce")


@mistake("sync", ranks=2)
def a_gather_along_another_axis():
    sch = stack()
    sch["head"].shard("weight", axis=0).shard("bias", axis=0)
    yield sch
    sch["head"].sync("fwd_post", "all_gather", axis=-2)


@mistake("sync", ranks=2)
def the_axis_of_a_linear_layer_for_a_conv1d():
    """Its weight is (in, out): axis 0 makes it a row layer."""
    sch = slapo.create_schedule(nn.Sequential(Conv1D(8, 4)))
    sch["0"].shard("weight", axis=0)
    yield sch
    sch["0"].sync("fwd_post", "all_gather", axis=-1)


# --- replace -------------------------------------------------------------------------------------
@mistake("replace")
def a_class():
    sch = stack()
    yield sch
    sch["layers.0.drop"].replace(nn.Identity)


@mistake("replace")
def a_function_for_a_module():
    sch = stack()
    yield sch
    sch["layers.0.drop"].replace(F.dropout)


@mistake("replace")
def a_node_of_the_schedule():
    sch = stack()
    yield sch
    sch["layers.0"].replace(sch["layers.1"])


@mistake("replace")
def nothing_to_replace_by():
    sch = stack()
    yield sch
    sch["head"].replace()


@mistake("replace")
def the_module_that_is_there():
    sch = stack()
    yield sch
    sch["head"].replace(sch["head"].mod)


@mistake("replace")
def a_module_around_the_model():
    sch = stack()
    yield sch
    sch["head"].replace(nn.Sequential(sch.mod))


@mistake("replace")
def a_name_without_operations():
    sch = stack()
    yield sch
    sch["head"].replace(nn.Linear(4, 4), name="Head")


@mistake("replace")
def a_regular_expression_for_matches():
    sch = stack()
    yield sch
    sch["layers.0"].replace(nn.GELU(), "gelu")


@mistake("replace")
def a_search_that_found_nothing():
    sch = stack()
    yield sch
    sch["layers.0"].replace(torch.tanh, sch["layers.0"].find(lambda x, b: F.gelu(x + b)))


@mistake("replace")
def another_number_of_arguments():
    sch = slapo.create_schedule(Block())
    sch.trace()
    match = sch.find(lambda x: F.gelu(x))
    yield sch
    sch.replace(nn.Bilinear(8, 8, 8), match)


@mistake("replace")
def matches_of_an_earlier_graph():
    sch = slapo.create_schedule(Block())
    match = sch.find(gelu)
    sch.replace(torch.tanh, match)
    yield sch
    sch.replace(torch.relu, match)


@mistake("replace")
def matches_in_several_graphs():
    sch = stack()
    sch.trace()
    matches = sch.find(gelu)
    yield sch
    sch.replace(nn.ReLU(), matches)


@mistake("replace")
def the_name_of_a_function():
    sch = slapo.create_schedule(Attention())
    sch.trace()
    match = sch.find(lambda q, k: torch.softmax(q @ k.transpose(-1, -2), -1))
    yield sch
    sch.replace("softmax", match)


@mistake("replace")
def a_value_that_is_used_elsewhere():
    class Gate(nn.Module):
        def forward(self, x):
            gate = torch.sigmoid(x)
            return torch.relu(gate) * gate

    sch = slapo.create_schedule(Gate())
    match = sch.find(lambda x: torch.relu(torch.sigmoid(x)))
    yield sch
    sch.replace(torch.tanh, match)


# --- replace_all ---------------------------------------------------------------------------------
@mistake("replace_all")
def one_module_for_all():
    sch = stack()
    yield sch
    sch.replace_all(nn.Dropout, nn.Identity())


@mistake("replace_all")
def the_name_of_a_class():
    sch = stack()
    yield sch
    sch.replace_all("Dropout", lambda path, module: nn.Identity())


@mistake("replace_all")
def a_class_that_does_not_occur():
    sch = stack()
    yield sch
    sch.replace_all(nn.LayerNorm, lambda path, module: nn.RMSNorm(4))


@mistake("replace_all")
def a_class_that_is_made_of_other_things():
    sch = stack()
    yield sch
    sch.replace_all(nn.Dropout, nn.GELU)


@mistake("replace_all")
def a_function_without_the_path():
    sch = stack()
    yield sch
    sch.replace_all(nn.Dropout, lambda module: nn.Identity())


@mistake("replace_all")
def a_function_that_returns_nothing():
    sch = stack()
    yield sch
    sch.replace_all(nn.Dropout, lambda path, module: print(path, end=""))


# --- find ----------------------------------------------------------------------------------------
@mistake("find")
def an_empty_list_is_indexed():
    sch = slapo.create_schedule(Block())
    yield sch
    sch.find(lambda x, bias: F.gelu(x + bias))[0]


@mistake("find")
def an_empty_list_is_indexed_behind_opaque_calls():
    sch = stack()
    sch.trace(recursive=False)
    yield sch
    sch.find(gelu)[0]


@mistake("find")
def a_regular_expression_from_the_middle():
    sch = stack()
    sch.trace(flatten=True)
    yield sch
    sch.find("fc1")[0]


@mistake("find")
def a_path_for_a_pattern():
    sch = stack()
    yield sch
    sch["layers.0"].find(3)


@mistake("find")
def a_regular_expression_that_is_none():
    sch = stack()
    yield sch
    sch["layers.0"].find("*fc1")


@mistake("find")
def a_module_that_cannot_be_traced():
    sch = slapo.create_schedule(DataDependent())
    yield sch
    sch.find(gelu)


@mistake("find")
def a_layer_of_torch():
    sch = stack()
    yield sch
    sch["head"].find(gelu)


@mistake("find_node")
def no_node_is_indexed():
    sch = slapo.create_schedule(Block())
    yield sch
    sch.find_node(lambda node: node.op == "call_method")[0]


# --- fuse ----------------------------------------------------------------------------------------
@mistake("fuse")
def the_name_of_a_module_to_fuse():
    sch = stack()
    yield sch
    sch["layers.0"].fuse("act")


@mistake("fuse")
def nothing():
    sch = stack()
    yield sch
    sch["layers.0"].fuse()


@mistake("fuse")
def no_match():
    sch = slapo.create_schedule(Block())
    yield sch
    sch.fuse(sch.find(lambda x, bias: F.gelu(x + bias)))


@mistake("fuse")
def several_matches():
    sch = stack()
    sch.trace(flatten=True)
    matches = sch.find(gelu)
    yield sch
    sch.fuse(matches)


@mistake("fuse")
def a_pattern_for_its_matches():
    sch = slapo.create_schedule(Block())
    yield sch
    sch.fuse(gelu)


@mistake("fuse")
def a_compiler_that_is_none():
    sch = slapo.create_schedule(Block())
    match = sch.find(gelu)
    yield sch
    sch.fuse(match, compiler="torchscript")


# --- decompose -----------------------------------------------------------------------------------
@mistake("decompose")
def a_layer_that_is_decomposed():
    sch = stack()
    sch["head"].decompose()
    yield sch
    sch["head"].decompose()


@mistake("decompose")
def a_layer_without_bias():
    sch = slapo.create_schedule(Tied())
    yield sch
    sch["head"].decompose()


@mistake("decompose")
def a_layer_of_another_kind():
    sch = slapo.create_schedule(gpt2())
    yield sch
    sch["transformer.h.0.mlp.c_fc"].decompose()


@mistake("decompose")
def after_the_trace():
    sch = slapo.create_schedule(Block())
    sch.trace()
    yield sch
    sch["fc1"].decompose()


@mistake("decompose", ranks=2)
def after_the_shard():
    sch = stack()
    sch["head"].shard("weight", axis=0)
    yield sch
    sch["head"].decompose()


# --- checkpoint ----------------------------------------------------------------------------------
@mistake("checkpoint")
def a_module_that_is_checkpointed():
    sch = stack()
    sch["layers.0"].checkpoint()
    yield sch
    sch["layers.0"].checkpoint()


@mistake("checkpoint")
def a_path():
    sch = stack()
    yield sch
    sch.checkpoint("layers.0")


@mistake("checkpoint")
def a_search_without_a_match():
    sch = slapo.create_schedule(Block())
    yield sch
    sch.checkpoint(sch.find(lambda x: torch.tanh(x)))


# --- annotate, fork_rng --------------------------------------------------------------------------
@mistake("annotate")
def a_parameter_that_is_none():
    sch = stack()
    yield sch
    sch["head"].annotate("weights", "partial_grad", True)


@mistake("annotate")
def a_key_of_torch():
    sch = stack()
    yield sch
    sch["head"].annotate("weight", "grad", True)


@mistake("annotate")
def a_word_for_true():
    sch = stack()
    yield sch
    sch["head"].annotate("weight", "partial_grad", "yes")


@mistake("fork_rng")
def a_fork_within_a_fork():
    sch = stack()
    sch["layers.0.drop"].fork_rng()
    yield sch
    sch["layers.0.drop"].fork_rng()


@mistake("fork_rng")
def a_state_that_was_never_seeded():
    slapo.get_rng_tracker().reset()
    sch = slapo.create_schedule(nn.Sequential(nn.Dropout(0.5)))
    sch["0"].fork_rng()
    yield sch
    sch.mod(torch.ones(2))


# --- trace ---------------------------------------------------------------------------------------
@mistake("trace")
def a_tracer_that_is_none():
    sch = stack()
    yield sch
    sch.trace(tracer="hf")


@mistake("trace")
def a_leaf_that_is_none():
    sch = stack()
    yield sch
    sch.trace(leaf_modules=["Blck"])


@mistake("trace")
def one_leaf():
    sch = stack()
    yield sch
    sch.trace(leaf_modules="Block")


@mistake("trace")
def an_argument_that_is_none():
    sch = stack()
    yield sch
    sch.trace(concrete_args={"use_cache": False})


@mistake("trace")
def a_layer_alone():
    sch = stack()
    yield sch
    sch["head"].trace()


@mistake("trace")
def control_flow_by_values():
    sch = slapo.create_schedule(DataDependent())
    yield sch
    sch.trace()


@mistake("trace_until")
def below_the_root():
    sch = stack()
    yield sch
    sch["layers.0"].trace_until("fc1")


@mistake("trace_until")
def a_path_that_does_not_exist():
    sch = stack()
    yield sch
    sch.trace_until("encoder.layer")


# --- cut_pipeline_stage --------------------------------------------------------------------------
@mistake("cut_pipeline_stage")
def before_the_trace():
    sch = stack()
    yield sch
    sch["layers.1"].cut_pipeline_stage()


@mistake("cut_pipeline_stage")
def after_the_whole_model():
    sch = stack()
    sch.trace_until("")
    yield sch
    sch.cut_pipeline_stage()


@mistake("cut_pipeline_stage")
def the_same_cut_twice():
    sch = stack()
    sch.trace_until("")
    sch["layers.1"].cut_pipeline_stage()
    yield sch
    sch["layers.1"].cut_pipeline_stage()


@mistake("cut_pipeline_stage")
def in_a_flat_graph():
    sch = stack()
    sch.trace(flatten=True)
    yield sch
    sch["layers.1"].cut_pipeline_stage()


# --- build ---------------------------------------------------------------------------------------
@mistake("build")
def the_model():
    sch = stack()
    yield sch
    slapo.build(sch.mod)


@mistake("build")
def a_part_of_a_schedule():
    sch = stack()
    yield sch
    slapo.build(sch["layers.0"])


@mistake("build")
def a_target_that_is_none():
    sch = stack()
    yield sch
    slapo.build(sch, target="pytorch")


@mistake("build")
def options_without_a_target():
    sch = stack()
    yield sch
    slapo.build(sch, loss_fn=F.mse_loss)


@mistake("build")
def a_typo_without_a_target():
    sch = stack()
    yield sch
    slapo.build(sch, init_weight=False)


@mistake("build")
def an_option_with_a_typo():
    sch = stack()
    mesh = slapo.init_mesh(device="cpu")
    yield sch
    slapo.build(sch, target="torch", mesh=mesh, los_fn=F.mse_loss)


@mistake("build")
def no_mesh():
    sch = stack()
    yield sch
    slapo.build(sch, target="torch", loss_fn=F.mse_loss)


@mistake("build")
def a_mesh_of_ones_own():
    slapo.init_mesh(device="cpu")
    sch = stack()
    yield sch
    slapo.build(sch, target="torch", mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))


@mistake("build")
def an_optimizer_in_place_of_its_maker():
    mesh = slapo.init_mesh(device="cpu")
    sch = stack()
    yield sch
    slapo.build(
        sch, target="torch", mesh=mesh, optimizer=torch.optim.SGD(sch.mod.parameters(), lr=0.1)
    )


@mistake("build")
def initial_weights_by_name():
    sch = stack()
    yield sch
    slapo.build(sch, init_weights="normal")


@mistake("build")
def cuts_without_a_target():
    sch = stack()
    sch.trace_until("")
    sch["layers.1"].cut_pipeline_stage()
    yield sch
    slapo.build(sch)


@mistake("build")
def cuts_without_ranks_for_the_stages():
    mesh = slapo.init_mesh(device="cpu")
    sch = slapo.create_schedule(Stack(), group=mesh["tp"])
    sch.trace_until("")
    sch["layers.1"].cut_pipeline_stage()
    yield sch
    slapo.build(sch, target="torch", mesh=mesh, loss_fn=F.mse_loss)


class Scale(nn.Module):
    """Has a parameter, and nothing that would initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@mistake("build")
def a_module_that_cannot_initialise_itself():
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(nn.Sequential(Scale()))
    yield sch
    slapo.build(sch)


@mistake("build")
def weights_that_nobody_gives():
    mesh = slapo.init_mesh(device="cpu")
    with slapo.init_empty_weights():
        sch = stack()
    yield sch
    slapo.build(sch, target="torch", mesh=mesh, init_weights=False)


@mistake("build", ranks=2)
def a_pipeline_without_a_loss():
    mesh = slapo.init_mesh(pp=2, device="cpu")
    sch = slapo.create_schedule(Stack(), group=mesh["tp"])
    sch.trace_until("")
    sch["layers.1"].cut_pipeline_stage()
    yield sch
    slapo.build(sch, target="torch", mesh=mesh)


@mistake("build", ranks=2)
def a_pipeline_without_cuts():
    mesh = slapo.init_mesh(pp=2, device="cpu")
    sch = slapo.create_schedule(Stack(), group=mesh["tp"])
    yield sch
    slapo.build(sch, target="torch", mesh=mesh, loss_fn=F.mse_loss)


@mistake("build", ranks=2)
def a_schedule_over_the_data_parallel_ranks():
    mesh = slapo.init_mesh(dp=2, device="cpu")
    sch = stack()
    yield sch
    slapo.build(sch, target="torch", mesh=mesh, loss_fn=F.mse_loss)


@mistake("build", ranks=2)
def a_column_layer_with_a_whole_bias():
    sch = stack()
    sch["layers.0.fc1"].shard("weight", axis=0)
    yield sch
    slapo.build(sch)


@mistake("build", ranks=2)
def a_bias_of_a_whole_layer():
    sch = stack()
    sch["head"].shard("bias", axis=0)
    yield sch
    slapo.build(sch)


@mistake("build", ranks=2)
def rows_of_a_table_without_a_sum():
    sch = slapo.create_schedule(nn.Sequential(nn.Embedding(8, 4)))
    sch["0"].shard("weight", axis=0)
    yield sch
    slapo.build(sch)


@mistake("build", ranks=2)
def another_schedule_on_each_rank():
    sch = stack()
    if dist.get_rank() == 0:
        sch["layers.0"].checkpoint()
    yield sch
    slapo.build(sch)


# --- Verify --------------------------------------------------------------------------------------
@mistake("Verify")
def the_model_itself():
    sch = stack()
    yield sch
    slapo.Verify(sch.mod, torch.ones(2, 4))


@mistake("Verify")
def the_shape_of_an_input():
    sch = stack()
    yield sch
    slapo.Verify(sch, 4)


@mistake("Verify")
def an_input_of_another_size():
    sch = stack()
    yield sch
    with slapo.Verify(sch, torch.ones(2, 5)):
        pass


@mistake("Verify")
def an_input_by_another_name():
    sch = stack()
    yield sch
    with slapo.Verify(sch, {"input_ids": torch.ones(2, 4)}):
        pass


@mistake("Verify")
def one_input_too_many():
    sch = stack()
    yield sch
    with slapo.Verify(sch, (torch.ones(2, 4), torch.ones(2, 4))):
        pass


@mistake("Verify")
def another_activation():
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    yield
    with slapo.Verify(sch, torch.ones(2, 4)):
        sch["1"].replace(nn.ReLU())


@mistake("Verify")
def a_cut_in_the_block():
    sch = stack()
    yield
    with slapo.Verify(sch, torch.ones(2, 4)):
        sch.trace_until("")
        sch["layers.1"].cut_pipeline_stage()


@mistake("Verify", ranks=2)
def a_forgotten_sum():
    sch = stack()
    yield
    with slapo.Verify(sch, torch.ones(2, 4)):
        sch["layers.0.fc1"].shard("weight", axis=0).shard("bias", axis=0)
        sch["layers.0.fc2"].shard("weight", axis=1)


@mistake("Verify", ranks=2)
def a_forgotten_sum_of_gradients():
    sch = stack()
    yield
    with slapo.Verify(sch, torch.ones(2, 4)):
        sch["layers.1.fc1"].shard("weight", axis=0).shard("bias", axis=0)
        sch["layers.1.fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


@mistake("Verify", ranks=2)
def heads_that_are_not_divided():
    sch = slapo.create_schedule(gpt2())
    tokens = torch.arange(6).view(1, 6)
    yield
    with slapo.Verify(sch, tokens):
        attn = sch["transformer.h.0.attn"]
        attn["c_attn"].shard("weight", axis=1, blocks=3).shard("bias", axis=0, blocks=3)
        attn["c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
        attn.sync("bwd_post", "all_reduce")


@mistake("Verify", ranks=2)
def fewer_key_heads_than_ranks():
    sch = slapo.create_schedule(llama(kv_heads=1))
    tokens = torch.arange(6).view(1, 6)
    yield
    with slapo.Verify(sch, tokens):
        attn = sch["model.layers.0.self_attn"]
        for name in ("q_proj", "k_proj", "v_proj"):
            attn[name].shard("weight", axis=0)
        attn["o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        attn.sync("bwd_post", "all_reduce")


# --- register_primitive --------------------------------------------------------------------------
@mistake("register_primitive")
def without_parentheses():
    yield

    @slapo.register_primitive
    class Freeze(slapo.Primitive):
        pass


@mistake("register_primitive")
def a_class_that_is_no_primitive():
    yield

    @slapo.register_primitive()
    class Freeze:
        pass


@mistake("register_primitive")
def a_name_that_is_taken():
    yield

    @slapo.register_primitive()
    class Shard(slapo.Primitive):
        @staticmethod
        def name():
            return "shard"

        @staticmethod
        def apply(sch):
            sch.mod.requires_grad_(False)


@mistake("register_primitive")
def a_name_that_is_not_static():
    yield

    @slapo.register_primitive()
    class Freeze(slapo.Primitive):
        def name(self):
            return "freeze"

        @staticmethod
        def apply(sch):
            sch.mod.requires_grad_(False)


@mistake("register_primitive")
def a_class_without_a_name():
    yield

    @slapo.register_primitive()
    class Freeze(slapo.Primitive):
        @staticmethod
        def apply(sch):
            sch.mod.requires_grad_(False)


# --- models on meta ------------------------------------------------------------------------------
@mistake("init_empty_weights")
def a_forward_before_build():
    with slapo.init_empty_weights():
        sch = stack()
    yield sch
    sch.mod(torch.ones(2, 4))


@mistake("init_empty_weights")
def a_forward_of_transformers_before_build():
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(gpt2())
    yield sch
    sch.mod(torch.arange(6).view(1, 6))


# --- meshes and seeds ----------------------------------------------------------------------------
@mistake("init_mesh")
def more_ranks_than_processes():
    yield
    slapo.init_mesh(tp=2, device="cpu")


@mistake("init_mesh")
def a_size_of_zero():
    yield
    slapo.init_mesh(dp=0, device="cpu")


@mistake("init_mesh")
def a_size_in_quotes():
    yield
    slapo.init_mesh(tp="2", device="cpu")


@mistake("init_mesh", ranks=2)
def other_sizes_on_each_rank():
    sizes = {"tp": 2} if dist.get_rank() else {"dp": 2}
    yield
    slapo.init_mesh(**sizes, device="cpu")


@mistake("set_random_seed")
def a_seed_in_quotes():
    yield
    slapo.set_random_seed("2013")


@mistake("set_random_seed")
def a_rank_below_zero():
    yield
    slapo.set_random_seed(2013, tp_rank=-1)


@mistake("set_random_seed")
def mesh_and_ranks():
    mesh = slapo.init_mesh(device="cpu")
    yield
    slapo.set_random_seed(2013, mesh=mesh, tp_rank=0)


# --- the suite ----------------------------------------------------------------------------------
@dataclass
class Told:
    """What came of a mistake."""

    error: str
    message: str
    #: what of the schedule and the model is another thing than before
    changed: list[str]


def commit(function: Mistake) -> Told:
    """Make a mistake."""
    torch.manual_seed(0)
    steps = function()
    sch = next(steps)
    before = fingerprint(sch) if sch is not None else {}
    try:
        next(steps, None)
    except Exception as error:
        after = fingerprint(sch) if sch is not None else {}
        changed = [key for key in before | after if before.get(key) != after.get(key)]
        # A KeyError's own text is its argument in quotes.
        text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        return Told(type(error).__name__, stable(text), changed)
    raise AssertionError(f"{function.__name__} went unnoticed")


def stable(text: str) -> str:
    """A message without what differs between machines, runs and versions of this file."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", text)
    text = re.sub(r"\S*/(\w+\.py):\d+", r"\1", text)
    return re.sub(r"by \S+ where \S+ is allowed", "by ... where ... is allowed", text)


def commit_all(rank: int, world_size: int) -> dict[str, Told]:
    chosen = [f for (_, ranks), functions in TABLE.items() if ranks > 1 for f in functions]
    return {function.__name__: commit(function) for function in chosen}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Told]]:
    """Of all mistakes that need two ranks: one job."""
    return run_distributed(commit_all, 2)


def source_of(function: Mistake) -> str:
    """The lines after the ``yield``."""
    lines = inspect.getsource(function).splitlines()
    start = next(k for k, line in enumerate(lines) if line.strip().startswith("yield"))
    return textwrap.dedent("\n".join(lines[start + 1 :])).strip("\n")


def check(group: str, told: dict[Mistake, Told], update: bool) -> None:
    """Compare with the golden file."""
    entries = [
        f"# {function.__name__.replace('_', ' ')}\n"
        f"{textwrap.indent(source_of(function), '    ')}\n{it.error}: {it.message}\n"
        for function, it in told.items()
    ]
    text = "\n".join(entries)
    file = GOLDEN / f"{group}.txt"
    if update:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.exists(), f"{file} is missing; run pytest with --update-golden"
    assert text == file.read_text()


@pytest.mark.parametrize("group", [group for group, ranks in TABLE if ranks == 1])
def test_what_users_are_told(group: str, update_golden: bool) -> None:
    told = {}
    for function in TABLE[group, 1]:
        told[function] = commit(function)
        if dist.is_initialized():
            dist.destroy_process_group()
    check(group, told, update_golden)
    check_parts(told)


@pytest.mark.distributed
@pytest.mark.parametrize("group", [group for group, ranks in TABLE if ranks > 1])
def test_what_users_of_two_ranks_are_told(
    group: str, on_two_ranks: list[dict[str, Told]], update_golden: bool
) -> None:
    first, second = ({f: told[f.__name__] for f in TABLE[group, 2]} for told in on_two_ranks)
    check(f"{group}_on_two_ranks", first, update_golden)
    check_parts(first)
    check_parts(second)
    assert [it.error for it in first.values()] == [it.error for it in second.values()]


# --- the parts of a message ----------------------------------------------------------------------
#: Says what to do, or what there is to choose from.
REMEDY = re.compile(
    r"(?:[;:,.?] |- )(?:(?:and|or) )?"
    r"(?:add|apply|bind|build|call|choose|create|cut|decompose|derive|fix|fuse|keep|launch|leave|look"
    r"|make|name|pad|pass|pick|replace|return|shard|take|trace|use|write)\b"
    r"|did you mean"
    r"|\b(?:known|nearest paths|there|classes|parameters|primitives) are |it has \['|\btakes [([]"
    r"|children are items|that of the module is|\.trace\(flatten=True\)|\.decompose\(\)"
    r"|primitives applied there:\n|must be the same on every rank"
)
#: A value: in quotes, in brackets, a number, or what was given.
VALUE = re.compile(r"'[^']+'|\"[^\"]+\"|\[.*\]|\d|\bgot \w+|\w+=\w+")
#: Told by an error of torch, Transformers or Python, of which no message of ours says the reason.
UNEXPLAINED = {
    "an_input_of_another_size",
    "an_input_by_another_name",
    "one_input_too_many",
    "heads_that_are_not_divided",
    "fewer_key_heads_than_ranks",
}


def check_parts(told: dict[Mistake, Told]) -> None:
    """What was wrong, the values and a remedy, as far as a machine can see them."""
    for function, it in told.items():
        name = function.__name__
        assert it.changed == [], name
        assert VALUE.search(it.message), (name, it.message)
        assert bool(REMEDY.search(it.message)) == (name not in UNEXPLAINED), (name, it.message)


def test_the_table() -> None:
    names = [function.__name__ for functions in TABLE.values() for function in functions]
    assert len(names) == len(set(names))
    files = {f"{group}{'_on_two_ranks' if ranks > 1 else ''}.txt" for group, ranks in TABLE}
    assert {file.name for file in GOLDEN.iterdir()} == files
