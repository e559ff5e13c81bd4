"""Target "deepspeed" trains as one process does, in every layout.

Tolerances, float32: sums over ranks and micro-batches are added in another order than on one
process; 4 steps leave differences of about 1e-6 in losses of about 3 and in parameters of about 1.
AdamW divides by the root of the squared gradient, which makes up to 1e-5 of rounding.
"""

import copy
import os
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import slapo
from tests.runtimes.alone import compare
from tests.runtimes.deepspeed_models import (
    ADAMW,
    SGD,
    alone,
    batches,
    make,
    seeded,
)
from tests.runtimes.ranks import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

STEPS, MICRO_BATCHES, CLIP = 4, 2, 0.3
HALVING = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


@dataclass(frozen=True)
class Case:
    pp: int
    dp: int
    tp: int
    optimizer: Any = SGD
    dtype: torch.dtype = torch.float32
    scalar: bool = True  # ZeRO-3 takes none
    late: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    norms: float = 0.0

    def __str__(self) -> str:
        return f"{self.pp}x{self.dp}x{self.tp} {self.dtype} {self.options}"


def check(case: Case) -> None:
    model = seeded(case.scalar)
    reference = alone(
        copy.deepcopy(model),
        case.optimizer,
        MICRO_BATCHES * case.dp,
        clip=case.options.get("clip_grad_norm"),
        lr_scheduler=case.options.get("lr_scheduler"),
        dtype=case.dtype,
    )
    layout = (case.pp, case.dp, case.tp)
    mesh = slapo.init_mesh(*layout)
    if mesh.get_local_rank("dp") or mesh.get_local_rank("pp"):
        with torch.no_grad():  # replicas, and the tied weights of stages, are made equal
            model.emb.weight.add_(1.0)
            model.temperature.add_(1.0)
    engine = make(
        layout,
        model,
        cuts=[3] if case.late else None,
        optimizer=case.optimizer,
        dtype=case.dtype,
        sync_replicated=True,
        **case.options,
    )
    data = batches(case.dp, STEPS, size=2 * MICRO_BATCHES)
    found = compare(engine, reference, data)
    assert max(found["losses"], found["state"]) <= case.tolerance, (str(case), found)
    # A number of about 1, added up in another order; in half precision, of rounded parts.
    assert found["norms"] <= (case.norms or 10 * case.tolerance), (str(case), found)


CLIPPED = {"clip_grad_norm": CLIP}


CASES = {
    # The same operations in the same order as on one process, bfloat16 included.
    "pp2": [
        Case(2, 1, 1, options=CLIPPED),
        Case(2, 1, 1, ADAMW, options={"zero": 1, **CLIPPED, "lr_scheduler": HALVING}),
        Case(2, 1, 1, dtype=torch.bfloat16, options=CLIPPED, tolerance=1e-3),
    ],
    "dp2": [
        Case(1, 2, 1, ADAMW, options={"zero": 0, "lr_scheduler": HALVING}),
        Case(1, 2, 1, options={"zero": 0, **CLIPPED}),
        Case(1, 2, 1, ADAMW, options={"zero": 1, **CLIPPED}),
        Case(1, 2, 1, ADAMW, options={"zero": 2, **CLIPPED}),
        Case(1, 2, 1, ADAMW, scalar=False, options={"zero": 3, **CLIPPED}),
        Case(1, 2, 1, dtype=torch.bfloat16, options=CLIPPED, tolerance=1e-2),
    ],
    "tp2": [
        Case(1, 1, 2, options={"zero": 0, **CLIPPED}),
        Case(1, 1, 2, options={"zero": 1, **CLIPPED}),
        Case(1, 1, 2, ADAMW, options={"zero": 2, **CLIPPED}),
        Case(1, 1, 2, scalar=False, options={"zero": 3, **CLIPPED}),
        # Partial sums are rounded to bfloat16, which has 8 bits.
        Case(1, 1, 2, dtype=torch.bfloat16, options=CLIPPED, tolerance=3e-2),
    ],
    "four ranks": [
        Case(2, 2, 1, options=CLIPPED),
        Case(2, 1, 2, options=CLIPPED),
        Case(2, 1, 2, ADAMW, options={"zero": 1, **CLIPPED}),
        Case(4, 1, 1, options=CLIPPED),
        # Where the second tensor-parallel rank of the last stage has no gradient to count.
        Case(2, 1, 2, dtype=torch.bfloat16, late=True, options=CLIPPED, tolerance=3e-2),
    ],
    "eight ranks": [Case(2, 2, 2, options={"zero": 1, **CLIPPED})],
}


def world_of(name: str) -> tuple[int, int, int]:
    case = CASES[name][0]
    return case.pp, case.dp, case.tp


@pytest.mark.parametrize(("name", "layout"), [(name, world_of(name)) for name in CASES], ids=str)
@on_ranks(timeout=240)
def test_training_equals_one_process(name: str, layout: Any) -> None:
    """All cases of as many processes, in one job: these take seconds to import DeepSpeed."""
    for case in CASES[name]:
        check(case)


@on_ranks(2, timeout=240)
def test_float16_scales_the_loss() -> None:
    """As if the CPU were a device on which DeepSpeed has float16; torch does compute in it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    from slapo.framework_dialect.deepspeed import config

    merge_dtype = config._merge_dtype
    get_accelerator().is_fp16_supported = lambda: True
    config._merge_dtype = lambda *given: merge_dtype(*given[:-1], "cuda")
    # From the default of 2**16 the first steps overflow and are left out, as DeepSpeed has it.
    options = {"config": {"fp16": {"initial_scale_power": 8}}, **CLIPPED}
    for layout in ((2, 1, 1), (1, 2, 1)):
        # Eleven bits for each of a loss's many parts, whose sizes are about 1.
        check(Case(*layout, dtype=torch.float16, options=options, tolerance=3e-3, norms=1e-2))
