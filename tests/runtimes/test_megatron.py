"""Target "megatron" on gloo: its schedules, DDP and optimizers run, with the CPU for CUDA.

The tolerance is that of :mod:`tests.runtimes.test_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from typing import Any

import pytest

pytest.importorskip("transformers")

from examples.parallel_models import FAMILIES
from tests.distributed import run_distributed
from tests.runtimes import layouts
from tests.runtimes.megatron_cases import CASES, Layout
from tests.runtimes.megatron_jobs import CHECKS, Job, run

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed"),
]

TOLERANCE = 2e-5

# What each layout runs besides the four families. In one job, and so in one test: processes take
# seconds to import what they need.
TASKS: dict[Layout, list[str]] = {
    (2, 1, 1): ["clipped-t5", "half", "scaled", "evaluate", "repeats", "idle_stages"],
    (1, 2, 1): ["by hand", "megatron-sgd", "overlapped", "distributed", "no_gradient"],
    (1, 1, 2): ["by hand", "clipped", "scheduled"],
    (2, 2, 1): ["distributed", "distributed-overlapped", "mixed"],
    (2, 1, 2): ["clipped", "evaluate"],
}


def start(job: Job) -> list[dict[str, Any]]:
    return run_distributed(run, prod(job.layout), job, timeout=280)


# --- what came out of a rank ---------------------------------------------------------------------
def check_case(found: dict[str, float]) -> None:
    assert max(found.values()) < TOLERANCE


def check_by_hand(found: list[dict[str, float]]) -> None:
    for way in found:
        check_case(way)


def check_half(found: dict[str, Any]) -> None:
    """To the bit: the same numbers are added up in the same order."""
    assert found["losses"] < 1e-6  # a mean of two micro-batches, in float32
    assert found["state"] == 0.0
    assert [str(dtype) for dtype in found["dtypes"]] == ["torch.bfloat16"]
    assert found["kind"] == "Float16OptimizerWithFloat16Params"


def check_mixed(found: float) -> None:
    # Logits of size 1 have errors of 2**-9, and losses are means over some 60 of them.
    assert found < 2e-3


def check_scaled(found: dict[str, Any]) -> None:
    """Steps that would overflow are left out, and the scheduler's with them."""
    losses, rates = found["losses"], found["rates"]
    assert losses[0] == losses[1]
    assert rates[1] == layouts.LEARNING_RATE
    assert losses[-1] < losses[0]
    assert rates[-1] < layouts.LEARNING_RATE
    assert 1.0 < found["scale"] < 2.0**18


def check_evaluate(found: dict[str, Any]) -> None:
    assert found["loss"] < TOLERANCE
    assert found["modes"] == {True}
    assert found["same"]
    assert found["forms"] == 2


def check_idle_stages(found: float) -> None:
    assert found < TOLERANCE


def check_repeats(found: bool) -> None:
    assert found


def check_no_gradient(found: str) -> None:
    assert found.startswith("SlapoError: overlap_grad_reduce=True waits"), found
    assert "['unused.bias', 'unused.weight'] got none" in found


CHECKED: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys([*FAMILIES, *CASES], check_case),
    "by hand": check_by_hand,
    "half": check_half,
    "mixed": check_mixed,
    "scaled": check_scaled,
    "evaluate": check_evaluate,
    "repeats": check_repeats,
    "idle_stages": check_idle_stages,
    "no_gradient": check_no_gradient,
}


def shown(layout: Layout) -> str:
    return "x".join(map(str, layout))


@pytest.mark.parametrize("layout", TASKS, ids=shown)
def test_training_equals_one_process(layout: Layout) -> None:
    tasks = TASKS[layout]
    cases = [name for name in tasks if name in CASES]
    checks = [name for name in tasks if name in CHECKS]
    for found in start(Job(layout, list(FAMILIES), cases, checks)):
        assert sorted(found) == sorted([*FAMILIES, *tasks])
        for name, result in found.items():
            CHECKED[name](result)


def test_groups_of_a_job_that_is_over() -> None:
    (found,) = start(Job((1, 1, 1), checks=["restarted"]))
    first, second = found["restarted"]
    assert first == second


# --- bad input -----------------------------------------------------------------------------------
MESSAGES = {
    "callable": "ValueError: distributed_optimizer=True shares out the state of Megatron-Core's",
    "sgd": "ValueError: megatron's distributed optimizer is for Adam only",
    "rate": "ValueError: the OptimizerConfig has no learning rate",
    "gather": "ValueError: the OptimizerConfig has ['overlap_param_gather']",
    "contradiction": "ValueError: the OptimizerConfig is for torch.bfloat16 and dtype is torch.fl",
    "dtype": "ValueError: dtype is torch.float64; pass torch.float32",
    "fields": "ValueError: data_parallel_options has ['overlap_param_gather']",
    "loss": "ValueError: a pipeline needs a loss",
    "differing": "micro_batches differs between ranks: 1 on rank 0, 2 on rank 1",
    # Graphs follow the dtype, and a model of half precision is trained in it.
    "half trace": "nothing",
    "half model": "nothing",
    "batch": "ValueError: a batch of 4 samples is not divisible by micro_batches=3",
    "call": "SlapoError: a call of the engine would run one of 2 pipeline stages",
    "no optimizer": "SlapoError: train_batch needs an optimizer",
}


def test_faults() -> None:
    ranks = start(Job((2, 1, 1), checks=["refusals", "group_faults"], before=True))
    for found in ranks:
        for name, message in MESSAGES.items():
            assert message in found["refusals"][name], name
        check_groups(found["group_faults"])
        check_without(found["without_cuda"])
    here, there = (found["refusals"]["returned"] for found in ranks)
    assert there.startswith("TypeError: optimizer(parameters) returned a str")
    assert here.startswith("SlapoError: optimizer failed on rank 1 with TypeError")


def check_groups(found: dict[str, str]) -> None:
    assert found["same"] == "nothing"
    assert "SlapoError: megatron-core's groups are {'pp': 1, 'dp': 1, 'tp': 2}" in found["other"]


def check_without(found: dict[str, str]) -> None:
    assert found["cuda"].startswith('SlapoError: target="megatron" needs CUDA')
    assert 'target="torch" and target="deepspeed"' in found["cuda"]
    assert found["package"].startswith("MissingPackageError")
    assert 'pip install "slapo[megatron]"' in found["package"]
