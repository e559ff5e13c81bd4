"""Rows of large tables that ``make test`` leaves to ``make test-wide``.

Each costs many seconds, and another row of its table runs the same code: the same engine in another
layout, the same layout on another engine, or a family with the same tracing.
"""

#: Test -> its rows, by the identifiers that pytest shows in brackets; no rows: the whole test.
WIDE: dict[str, tuple[str, ...]] = {
    "check/test_planted.py::test_they_are_mistakes": (),
    "cost/test_dryrun.py::test_peak_of_one_process": ("t5-0.0-1", "t5-0.5-1", "t5-1.0-1"),
    "cost/test_ranks.py::test_peak_of_two_ranks": ("replicas", "zero"),
    "examples/test_train.py::test_it_trains": ("deepspeed",),
    "examples/test_train.py::test_options_of_recipes_leave_the_loss_as_it_is": (),
    "graph/test_families.py::test_a_rewritten_flat_layer_equals_the_plain_one": (
        "gpt2",
        "swin",
        "mixtral",
        "bert",
        "llama",
    ),
    "graph/test_families.py::test_a_rewritten_root_equals_the_plain_model": (
        "bert-flat",
        "bert-leaves",
        "llama-leaves",
    ),
    "graph/test_families.py::test_what_transformers_collects_is_as_in_the_plain_model_or_refused": (
        "t5-output_hidden_states-flat",
        "t5-output_hidden_states-leaves",
        "t5-output_hidden_states-layer",
        "t5-output_attentions-leaves",
        "llama-output_attentions-flat",
        "mixtral-output_router_logits-flat",
    ),
    "op/test_residual.py::test_the_kernel_by_the_interpreter": ("gradient",),
    "pipeline/test_families.py::test_two_stages": (
        "qwen2-True",
        "mistral-True",
        "roberta-True",
        "gpt2_classifier-True",
    ),
    "primitives/test_kinds.py::test_every_kind_of_call": (
        "checkpointed-by proxies",
        "fused-by proxies",
        "replaced-by proxies",
        "twice-by proxies",
        "horizontal-by proxies",
        "by_hand-by proxies",
        "everything-by proxies",
    ),
    "runtimes/test_communication.py::test_each_boundary_sends_its_tensors_and_gradients_once": (
        "zbv",
    ),
    "runtimes/test_contract.py::test_what_must_be_alike_is_compared": (
        "megatron-dp",
        "megatron-tp",
    ),
    "runtimes/test_engine.py::test_losses_of_uneven_targets_are_exact": (
        "torch-2x1x1-[{'backend': 'aot_eager'}]-counted",
        "megatron-2x1x1-[]-counted",
        "megatron-1x2x1-[]-counted",
    ),
    "runtimes/test_engine.py::test_the_whole_surface": (
        "megatron-2x1x1-[]",
        "megatron-1x2x1-[]",
        "deepspeed-1x2x1-[2]",
    ),
    "runtimes/test_faults.py::test_a_rank_that_is_killed_or_hangs_is_named": ("megatron-hangs",),
    "runtimes/test_faults.py::test_a_rank_that_raises_is_named_with_its_error": ("megatron",),
    "runtimes/test_faults.py::test_processes_without_a_fault_end_in_silence": ("by hand",),
    "runtimes/test_layouts.py::test_torch_schedules_and_sharding": ("gpipe-fsdp-0.5",),
    "runtimes/test_layouts.py::test_training_equals_one_process": (
        "torch-2x1x1-first",
        "torch-2x2x1-first",
        "torch-2x1x2-first",
        "deepspeed-2x1x1-first",
        "deepspeed-1x1x2-first",
        "deepspeed-2x2x2-first",
    ),
    "runtimes/test_megatron.py::test_training_equals_one_process": ("2x2x1", "1x2x1"),
    "runtimes/test_optimizers.py::test_steps_equal_those_of_one_process": (
        "megatron-layout6-options6-gpt2",
    ),
    "runtimes/test_partly_used.py::test_stages_above_frozen_ones_train": (
        "zbv-{}",
        "zbv-{'data_parallel': 'fsdp'}",
        "interleaved_1f1b-{'data_parallel': 'fsdp'}",
    ),
    "sharding/test_shared_heads.py::test_engines": ("deepspeed", "megatron"),
    "sharding/test_tensor_parallel.py::test_a_schedule_computes_what_the_model_does": (
        "whole states read by several blocks-4",
        "column-row without bias-4",
    ),
    "test_gallery.py::test_several_devices_by_torchrun": (),
    "weights/test_pretrained.py::test_folders_come_back_the_same": (
        "pp 2",
        "zero 1 late",
        "zero 3 late",
        "tp 4",
        "pp 2 fsdp",
    ),
}


def is_wide(node: str) -> bool:
    """Return whether a test, by the identifier that pytest has for it, is in the table."""
    test, _, row = node.removeprefix("tests/").partition("[")
    rows = WIDE.get(test)
    return rows is not None and (not rows or row.removesuffix("]") in rows)
