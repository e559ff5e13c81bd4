"""Paths, primitives and searches."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

import slapo
from tests.mistakes import gelu, gpt2, llama, mistake, stack
from tests.primitives.models import Attention, Block, DataDependent, Tied


@mistake("trace_until")
def a_batch_with_its_targets_as_examples():
    sch = slapo.create_schedule(gpt2())
    yield sch
    batch = ({"input_ids": torch.ones(1, 4, dtype=torch.int64)}, torch.ones(1, 4))
    sch.trace_until("transformer", tracer="huggingface", example_inputs=batch)


@mistake("trace")
def a_leaf_by_its_class(sch):
    sch.trace(leaf_modules=[Block])


@mistake("find")
def torchs_own_function_as_a_pattern(sch):
    sch.find(F.gelu)


@mistake("fuse")
def matches_of_another_node():
    sch = stack()
    found = sch["layers.0"].find("fc1")
    yield sch
    sch["layers.1"].fuse(found)


# --- set -----------------------------------------------------------------------------------------
@mistake("set")
def an_attribute_that_is_none(sch):
    sch["layers.0.drop"].set("rate", 0.1)


@mistake("set")
def a_number_of_heads_by_division():
    sch = slapo.create_schedule(nn.Sequential(nn.MultiheadAttention(8, 4)))
    yield sch
    sch["0"].set("num_heads", 4 / 2)


@mistake("set")
def the_size_of_a_weight(sch):
    sch["layers.0.fc1"].set("out_features", 4)


@mistake("set")
def a_weight(sch):
    sch["layers.0.fc1"].set("weight", torch.ones(2, 4))


# --- paths ---------------------------------------------------------------------------------------
@mistake("paths")
def a_letter_is_missing(sch):
    sch["layer.0.fc1"].checkpoint()


@mistake("paths")
def the_list_itself(sch):
    sch["layers"].checkpoint()


@mistake("paths")
def a_part_of_a_layer_of_torch():
    sch = slapo.create_schedule(nn.Sequential(nn.TransformerEncoderLayer(8, 2, batch_first=True)))
    yield sch
    sch["0.self_attn.out_proj"].shard("weight", axis=1)


@mistake("paths")
def a_number(sch):
    sch[0]


@mistake("paths")
def an_item_of_the_list_by_number(sch):
    sch.layers[0].checkpoint()


@mistake("paths")
def a_child_as_an_attribute(sch):
    sch.head.shard("weight", axis=0)


@mistake("paths")
def an_attribute_of_the_module(sch):
    print(sch["head"].out_features)


@mistake("paths")
def a_parameter(sch):
    sch["head.weight"].shard("weight", axis=0)


@mistake("paths")
def the_whole_path_below_a_node(sch):
    sch["layers.0"]["layers.0.fc1"].checkpoint()


@mistake("paths")
def the_head_is_around_the_model():
    sch = slapo.create_schedule(gpt2())
    yield sch
    sch["h.0.attn.c_attn"].shard("weight", axis=1)


@mistake("paths")
def a_number_too_many(sch):
    for i in range(4):
        sch[f"layers.{i}"]


@mistake("paths")
def a_primitive_that_is_none(sch):
    sch["head"].shrad("weight", axis=0)


@mistake("paths")
def a_node_of_a_module_that_is_gone():
    sch = stack()
    fc1 = sch["layers.0.fc1"]
    sch["layers.0"].replace(Block())
    yield sch
    fc1.shard("weight", axis=0)


@mistake("paths")
def a_glob_that_matches_nothing(sch):
    sch.select("layer.*.fc1").shard("weight", axis=0)


@mistake("paths")
def one_module_for_a_selection(sch):
    sch.select("layers.*").replace(Block())


@mistake("paths")
def a_primitive_of_a_selection_that_is_none(sch):
    sch.select("layers.*").chekpoint()


# --- shard ---------------------------------------------------------------------------------------
@mistake("shard")
def a_tensor_that_is_none(sch):
    sch["head"].shard("weights", axis=0)


@mistake("shard")
def several_tensors(sch):
    sch["head"].shard(["weight", "bias"], axis=0)


@mistake("shard")
def a_tensor_further_down(sch):
    sch["layers.0"].shard("fc1.weight", axis=0)


@mistake("shard")
def a_tensor_of_a_list_item_from_the_root(sch):
    sch.shard("layers.0.fc1.weight", axis=0)


@mistake("shard")
def a_module_without_tensors(sch):
    sch["layers.0"].shard("weight", axis=0)


@mistake("shard")
def an_axis_beyond_the_last(sch):
    sch["head"].shard("bias", axis=1)


@mistake("shard")
def an_axis_in_quotes(sch):
    sch["head"].shard("weight", axis="0")


@mistake("shard")
def no_axis(sch):
    sch["head"].shard("weight")


@mistake("shard")
def a_keyword_of_another_library(sch):
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
def blocks_that_do_not_fit(sch):
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
    """One key and value head cannot be on two ranks."""
    sch = slapo.create_schedule(llama(kv_heads=1))
    yield sch
    sch["model.layers.0.self_attn.k_proj"].shard("weight", axis=0, blocks=[1, 3])


# --- sync ----------------------------------------------------------------------------------------
@mistake("sync")
def an_op_that_is_none(sch):
    sch["head"].sync("fwd_post", "allreduce")


@mistake("sync")
def a_mode_that_is_none(sch):
    sch["head"].sync("forward", "all_reduce")


@mistake("sync")
def op_and_mode_swapped(sch):
    sch["head"].sync("all_reduce", "fwd_post")


@mistake("sync")
def an_op_in_a_mode_that_is_not_its_own(sch):
    sch["head"].sync("fwd_pre", "all_reduce")


@mistake("sync")
def no_axis_to_gather_along(sch):
    sch["head"].sync("fwd_post", "all_gather")


@mistake("sync")
def a_keyword_that_the_op_does_not_take(sch):
    sch["head"].sync("fwd_post", "all_reduce", axis=-1)


@mistake("sync")
def no_op(sch):
    sch["head"].sync("fwd_post")


@mistake("sync")
def a_function_of_torch(sch):
    sch["head"].sync("fwd_post", dist.all_reduce)


@mistake("sync")
def a_hook_of_the_output_alone(sch):
    sch["head"].sync("fwd_post", lambda output: 2 * output)


@mistake("sync")
def a_function_with_an_axis(sch):
    sch["head"].sync("fwd_post", lambda module, args, output: output, axis=0)


@mistake("sync")
def an_input_that_is_none(sch):
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
def a_class(sch):
    sch["layers.0.drop"].replace(nn.Identity)


@mistake("replace")
def a_function_for_a_module(sch):
    sch["layers.0.drop"].replace(F.dropout)


@mistake("replace")
def a_node_of_the_schedule(sch):
    sch["layers.0"].replace(sch["layers.1"])


@mistake("replace")
def nothing_to_replace_by(sch):
    sch["head"].replace()


@mistake("replace")
def the_module_that_is_there(sch):
    sch["head"].replace(sch["head"].mod)


@mistake("replace")
def a_module_around_the_model(sch):
    sch["head"].replace(nn.Sequential(sch.mod))


@mistake("replace")
def a_name_without_operations(sch):
    sch["head"].replace(nn.Linear(4, 4), name="Head")


@mistake("replace")
def a_regular_expression_for_matches(sch):
    sch["layers.0"].replace(nn.GELU(), "gelu")


@mistake("replace")
def a_search_that_found_nothing(sch):
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
def one_module_for_all(sch):
    sch.replace_all(nn.Dropout, nn.Identity())


@mistake("replace_all")
def the_name_of_a_class(sch):
    sch.replace_all("Dropout", lambda path, module: nn.Identity())


@mistake("replace_all")
def a_class_that_does_not_occur(sch):
    sch.replace_all(nn.LayerNorm, lambda path, module: nn.RMSNorm(4))


@mistake("replace_all")
def a_class_that_is_made_of_other_things(sch):
    sch.replace_all(nn.Dropout, nn.GELU)


@mistake("replace_all")
def a_function_without_the_path(sch):
    sch.replace_all(nn.Dropout, lambda module: nn.Identity())


@mistake("replace_all")
def a_function_that_returns_nothing(sch):
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
def a_path_for_a_pattern(sch):
    sch["layers.0"].find(3)


@mistake("find")
def a_regular_expression_that_is_none(sch):
    sch["layers.0"].find("*fc1")


@mistake("find")
def a_module_that_cannot_be_traced():
    sch = slapo.create_schedule(DataDependent())
    yield sch
    sch.find(gelu)


@mistake("find")
def a_layer_of_torch(sch):
    sch["head"].find(gelu)


@mistake("find_node")
def no_node_is_indexed():
    sch = slapo.create_schedule(Block())
    yield sch
    sch.find_node(lambda node: node.op == "call_method")[0]


# --- fuse ----------------------------------------------------------------------------------------
@mistake("fuse")
def the_name_of_a_module_to_fuse(sch):
    sch["layers.0"].fuse("act")


@mistake("fuse")
def nothing(sch):
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
def a_path(sch):
    sch.checkpoint("layers.0")


@mistake("checkpoint")
def a_search_without_a_match():
    sch = slapo.create_schedule(Block())
    yield sch
    sch.checkpoint(sch.find(lambda x: torch.tanh(x)))


# --- annotate, fork_rng --------------------------------------------------------------------------
@mistake("annotate")
def a_parameter_that_is_none(sch):
    sch["head"].annotate("weights", "partial_grad", True)


@mistake("annotate")
def a_key_of_torch(sch):
    sch["head"].annotate("weight", "grad", True)


@mistake("annotate")
def a_word_for_true(sch):
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
def a_tracer_that_is_none(sch):
    sch.trace(tracer="hf")


@mistake("trace")
def a_leaf_that_is_none(sch):
    sch.trace(leaf_modules=["Blck"])


@mistake("trace")
def one_leaf(sch):
    sch.trace(leaf_modules="Block")


@mistake("trace")
def an_argument_that_is_none(sch):
    sch.trace(concrete_args={"use_cache": False})


@mistake("trace")
def a_layer_alone(sch):
    sch["head"].trace()


@mistake("trace")
def control_flow_by_values():
    sch = slapo.create_schedule(DataDependent())
    yield sch
    sch.trace()


@mistake("trace_until")
def below_the_root(sch):
    sch["layers.0"].trace_until("fc1")


@mistake("trace_until")
def a_path_that_does_not_exist(sch):
    sch.trace_until("encoder.layer")


# --- compile -------------------------------------------------------------------------------------
@mistake("compile")
def compiled_twice():
    sch = stack()
    sch["layers.0"].compile()
    yield sch
    sch["layers.0"].compile()


@mistake("compile")
def a_misspelled_backend(sch):
    sch["layers.0"].compile(backend="indcutor")


# --- cut_pipeline_stage --------------------------------------------------------------------------
@mistake("cut_pipeline_stage")
def before_the_trace(sch):
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
