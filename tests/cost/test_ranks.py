"""Predictions of ranks against two processes that run the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cost.real import peak, predict
from tests.distributed import run_distributed

Case = tuple[str, dict[str, Any]]

# Each family once, in one of the two ways; Llama in both, the second of them below.
TENSOR: list[Case] = [
    (key, {"ckpt_ratio": ratio, "sequence_parallel": spread})
    for keys, ratio, spread in (
        (("gpt2", "llama"), 0.0, False),
        (("bert", "t5"), 1.0, True),
    )
    for key in keys
]
PIPELINE: list[Case] = [
    (key, {"ckpt_ratio": ratio, "schedule": schedule, "micro_batches": 4})
    for keys, ratio, schedule in (
        (("bert", "llama"), 0.0, "1f1b"),
        (("gpt2", "t5"), 1.0, "gpipe"),
    )
    for key in keys
]
PIPELINE.append(("llama", {"micro_batches": 8}))
BOTH_TENSOR: list[Case] = [("llama", {"ckpt_ratio": 1.0, "sequence_parallel": True})]
BOTH_PIPELINE: list[Case] = [
    ("llama", {"ckpt_ratio": 1.0, "schedule": "gpipe", "micro_batches": 4})
]
_FSDP = {"data_parallel": "fsdp"}
REPLICAS: list[Case] = [
    (key, {"ckpt_ratio": ratio, "micro_batches": count, **how})
    for key, ratio, count, *hows in (
        ("gpt2", 0.0, 1, {}, _FSDP),
        ("llama", 1.0, 2, _FSDP, {**_FSDP, "dtype": torch.bfloat16}),
        ("bert", 0.0, 2, {**_FSDP, "dtype": torch.bfloat16}),
        ("t5", 1.0, 1, {}),
    )
    for how in hows
]
_ZERO = {"target": "deepspeed", "zero": 1, "bucket": 200_000}
ZERO: list[Case] = [
    (key, {"ckpt_ratio": ratio, "micro_batches": count, **_ZERO})
    for key, ratio, count in (("gpt2", 0.0, 1), ("llama", 1.0, 2), ("bert", 0.0, 2), ("t5", 1.0, 1))
]


def peaks(rank: int, world: int, mesh: dict[str, int], cases: list[Case]) -> list[int]:
    """Of each case on this rank."""
    return [peak(key, mesh, changes) for key, changes in cases]


def _in_two(name: str, mesh: dict[str, int], cases: list[Case]) -> list[Any]:
    """Every second one, and the others where all families are asked for."""
    return [
        pytest.param(mesh, cases[::2], id=name),
        pytest.param(mesh, cases[1::2], id=f"{name}, others", marks=pytest.mark.wide),
    ]


@pytest.mark.distributed
@pytest.mark.slow
# BERT's logits are a view, which is not written to.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        *_in_two("tensor", {"tp": 2}, TENSOR),
        *_in_two("pipeline", {"pp": 2}, PIPELINE),
        *_in_two("replicas", {"dp": 2}, REPLICAS),
        *_in_two("zero", {"dp": 2}, ZERO),
        pytest.param({"tp": 2}, BOTH_TENSOR, id="llama-tensor", marks=pytest.mark.wide),
        pytest.param({"pp": 2}, BOTH_PIPELINE, id="llama-pipeline", marks=pytest.mark.wide),
    ],
)
def test_peak_of_two_ranks(mesh: dict[str, int], cases: list[Case]) -> None:
    ranks = run_distributed(peaks, 2, mesh, cases, timeout=280)
    wrong = []
    for number, (key, changes) in enumerate(cases):
        stages = predict(key, mesh, **changes).stages
        for rank, found in enumerate(ranks):
            stage = stages[rank if len(stages) > 1 else 0]
            error = stage.peak / found[number] - 1
            if abs(error) > 0.05:
                wrong.append(f"{key} {changes}, rank {rank}: {error:+.1%} of {found[number]}")
    assert not wrong
