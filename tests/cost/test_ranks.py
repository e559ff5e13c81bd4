"""Predictions of ranks against two processes that run the engine."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import slapo
from slapo.cost import steptime
from slapo.cost.meter import Meter
from tests.cost.real import peak, predict
from tests.distributed import run_distributed
from tests.runtimes.ranks import on_ranks

Case = tuple[str, dict[str, Any]]

_PLAIN: dict[str, Any] = {"ckpt_ratio": 0.0, "sequence_parallel": False}
_SPREAD: dict[str, Any] = {"ckpt_ratio": 1.0, "sequence_parallel": True}
_1F1B: dict[str, Any] = {"ckpt_ratio": 0.0, "schedule": "1f1b", "micro_batches": 4}
_GPIPE: dict[str, Any] = {"ckpt_ratio": 1.0, "schedule": "gpipe", "micro_batches": 4}
# Each family once, in one of the two ways; Llama in both, the second of them by itself.
TENSOR: list[Case] = [("gpt2", _PLAIN), ("llama", _PLAIN), ("bert", _SPREAD), ("t5", _SPREAD)]
PIPELINE: list[Case] = [("bert", _1F1B), ("llama", _1F1B), ("gpt2", _GPIPE), ("t5", _GPIPE)]
PIPELINE.append(("llama", {"micro_batches": 8}))
_FSDP = {"data_parallel": "fsdp"}
_HALF = {**_FSDP, "dtype": torch.bfloat16}
REPLICAS: list[Case] = [
    ("gpt2", {"ckpt_ratio": 0.0, "micro_batches": 1}),
    ("gpt2", {"ckpt_ratio": 0.0, "micro_batches": 1, **_FSDP}),
    ("llama", {"ckpt_ratio": 1.0, "micro_batches": 2, **_FSDP}),
    ("llama", {"ckpt_ratio": 1.0, "micro_batches": 2, **_HALF}),
    ("bert", {"ckpt_ratio": 0.0, "micro_batches": 2, **_HALF}),
    ("t5", {"ckpt_ratio": 1.0, "micro_batches": 1}),
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
        pytest.param({"tp": 2}, [("llama", _SPREAD)], id="llama-tensor", marks=pytest.mark.wide),
        pytest.param({"pp": 2}, [("llama", _GPIPE)], id="llama-pipeline", marks=pytest.mark.wide),
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


class _Operators(TorchDispatchMode):
    """Counts all operators, also views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_what_zero_adds_to_a_step() -> None:
    """Operators, and bytes moved, with 4 and with 12 parameters."""
    mesh, size = slapo.init_mesh(dp=2, device="cpu"), 64
    found = []
    for count in (4, 12):
        model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count)))
        x = torch.ones(8, size)
        with _Operators() as plain:
            model(x).sum().backward()
        model.zero_grad()
        engine, _ = slapo.build(
            slapo.create_schedule(model, mesh=mesh),
            mesh=mesh,
            target="deepspeed",
            zero=1,
            loss_fn=lambda output, _: output.sum(),
            optimizer=torch.optim.AdamW,
        )
        for _ in range(2):
            engine.train_batch(iter([(x, x)]))
        with _Operators() as all_of:
            engine.train_batch(iter([(x, x)]))
        with Meter() as meter:
            engine.train_batch(iter([(x, x)]))
        # The meter counts the destination of a copy twice.
        parts = {
            "copy_": 2 / 3,
            **dict.fromkeys(("cat", "div_", "_to_copy", "linalg_vector_norm"), 1),
        }
        moved = sum(parts.get(kernel.name, 0.0) * kernel.moved for kernel in meter.kernels)
        found.append((all_of.count - plain.count, moved))
    (few, less), (many, more) = found
    expected = steptime.ZERO_OPERATORS + steptime.ZERO_NORM_OPERATORS / 2
    assert (many - few) / 8 == pytest.approx(expected, rel=0.1)
    # Three copies of all gradients and two of a rank's half, each read and written in float32.
    copied = 8 * (3 + 2 / 2) + steptime.ZERO_TRAFFIC / 2
    assert (more - less) / (8 * 64 * 64) == pytest.approx(copied, rel=0.02)
