"""3-D layouts of real models against one process: losses of five steps, parameters after them."""

from typing import Any

import pytest

pytest.importorskip("transformers")

from examples.parallel_models import FAMILIES
from tests.distributed import RankFailure, run_distributed
from tests.runtimes.layouts import (
    batches,
    build,
    check_families,
    check_repeats,
)
from tests.runtimes.ranks import on_ranks

LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
#: Along one axis every family trains on every target; along several at once, these do.
PAIRS = {"torch": ("gpt2", "t5"), "deepspeed": ("bert", "llama")}
#: DeepSpeed's engine has one way through all layouts with several axes.
FURTHER = [("deepspeed", (2, 2, 1)), ("deepspeed", (2, 1, 2))]
CASES = [
    pytest.param(
        target,
        layout,
        names,
        marks=[pytest.mark.wide] if is_further or (target, layout) in FURTHER else [],
        id=f"{target}-{'x'.join(map(str, layout))}-{'further' if is_further else 'first'}",
    )
    for target, pair in PAIRS.items()
    for layout in LAYOUTS
    for is_further, names in enumerate(
        [list(FAMILIES)] if layout.count(1) > 1 else [[pair[layout[1] - 1]], [pair[2 - layout[1]]]]
    )
]
#: Gradients of these models are of norm 1 and more at every step.
CLIP = 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("target", "layout", "names"), CASES)
@on_ranks(timeout=280)
def test_training_equals_one_process(target: str, layout: Any, names: Any) -> None:
    check_families(names, target, layout, clip_grad_norm=CLIP)


# T5's blocks hand on the position bias as a view; nothing writes to it.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"pipeline_schedule": "interleaved_1f1b"}, marks=pytest.mark.wide),
        pytest.param({"pipeline_schedule": "zero_bubble"}, marks=pytest.mark.wide),
        {"pipeline_schedule": "zbv"},
        {"pipeline_schedule": "gpipe", "data_parallel": "fsdp", "checkpoint_ratio": 0.5},
        pytest.param({"data_parallel": "fsdp", "clip_grad_norm": CLIP}, marks=pytest.mark.wide),
        {"data_parallel": "fsdp", "shard_size": 1, "clip_grad_norm": CLIP},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@on_ranks(4, timeout=280)
def test_torch_schedules_and_sharding(options: dict[str, Any]) -> None:
    # torch cannot split the backward of a stage with an embedding of its own, as T5's decoder has.
    split = options.get("pipeline_schedule") in ("zero_bubble", "zbv")
    names = ("bert",) if split else ("t5",)
    check_families(names, "torch", (2, 2, 1), **options)


def train_what_cannot_be_split(rank: int, world_size: int) -> None:
    engine = build("t5", "torch", (2, 1, 1), pipeline_schedule="zbv")
    engine.train_batch(iter(batches(FAMILIES["t5"])))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_backward_that_cannot_be_split() -> None:
    with pytest.raises(RankFailure, match=r"'zbv' splits the backward of a stage in two"):
        run_distributed(train_what_cannot_be_split, 2, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(target, name, marks=[] if name == "gpt2" else [pytest.mark.wide])
        for target, pair in PAIRS.items()
        for name in pair
    ],
)
@on_ranks(4, timeout=280)
def test_dropout_repeats(target: str, name: str) -> None:
    check_repeats(name, target, (2, 1, 2))
