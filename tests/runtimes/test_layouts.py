"""3-D layouts of real models against one process: losses of five steps, all parameters after them.

The tolerance: float32 sums over ranks and micro-batches are in another order, so that each is off
by some 1e-7 of its size; five steps of momentum SGD let that grow to a few 1e-6 on parameters and
losses of size 1 to 4.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

pytest.importorskip("transformers")

from examples.parallel_models import FAMILIES
from tests.distributed import RankFailure, run_distributed
from tests.runtimes.layouts import MICRO_BATCHES, SIZES, compare_families, masks, train_twice

LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
TOLERANCE = 2e-5
#: Gradients of these models are of norm 1 and more at every step.
CLIP = 0.1


def check(layout: Any, target: str, without: str = "", **options: Any) -> None:
    names = [name for name in FAMILIES if name != without]
    for found in run_distributed(
        compare_families, prod(layout), names, target, layout, options, timeout=280
    ):
        assert list(found) == names
        for name, apart in found.items():
            assert max(apart.values()) < TOLERANCE, (name, apart)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
@pytest.mark.parametrize("target", ["torch", "deepspeed"])
def test_training_equals_one_process(target: str, layout: Any) -> None:
    if target == "deepspeed":
        pytest.importorskip("deepspeed")
    check(layout, target, clip_grad_norm=CLIP)


# T5's blocks hand on the position bias as a view; nothing writes to it.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_schedule": "interleaved_1f1b"},
        {"pipeline_schedule": "zero_bubble"},
        {"pipeline_schedule": "zbv"},
        {"pipeline_schedule": "gpipe", "data_parallel": "fsdp", "checkpoint_ratio": 0.5},
        {"data_parallel": "fsdp", "clip_grad_norm": CLIP},
        {"data_parallel": "fsdp", "shard_size": 1, "clip_grad_norm": CLIP},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_torch_schedules_and_sharding(options: dict[str, Any]) -> None:
    # torch cannot split the backward of a stage with an embedding of its own, as T5's decoder has.
    split = options.get("pipeline_schedule") in ("zero_bubble", "zbv")
    check((2, 2, 1), "torch", without="t5" if split else "", **options)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_backward_that_cannot_be_split() -> None:
    options = {"pipeline_schedule": "zbv"}
    with pytest.raises(RankFailure, match=r"'zbv' splits the backward of a stage in two"):
        run_distributed(compare_families, 2, ["t5"], "torch", (2, 1, 1), options, timeout=120)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("target", ["torch", "deepspeed"])
def test_dropout_repeats(target: str) -> None:
    if target == "deepspeed":
        pytest.importorskip("deepspeed")
    names = list(FAMILIES)
    for found in run_distributed(train_twice, 4, names, target, (2, 1, 2), timeout=280):
        assert list(found.values()) == [True] * len(names), found


@pytest.mark.distributed
def test_split_dropout_draws_other_numbers_on_each_rank() -> None:
    for within, after in run_distributed(masks, 2):
        assert within == (MICRO_BATCHES * SIZES.layers, 0)
        # Each layer ends two or three blocks.
        assert after[0] == after[1] > MICRO_BATCHES * SIZES.layers
