"""How far one reads to follow a call: the files and functions of the library that it enters."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from tests.check.verdicts import fake_world

ROOT = str(Path(slapo.__file__).parent)
#: Walk -> most files, most functions. They may become fewer.
BUDGETS = {
    "shard": (17, 73),
    "sync": (14, 52),
    "build": (16, 39),
    "build for torch": (30, 102),
    "apply_schedule": (36, 152),
    "train step": (8, 63),
}


def walk(run: Callable[[], Any]) -> tuple[int, int]:
    """Files and functions of the library that a call enters; comprehensions are no functions."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(ROOT) and not code.co_name.startswith("<")
        if event == "call" and is_ours:
            seen.add(code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len({code.co_filename for code in seen}), len(seen)


def schedule() -> slapo.Schedule:
    return slapo.create_schedule(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))


def engine(sch: slapo.Schedule, mesh: Any) -> Any:
    return slapo.build(
        sch,
        target="torch",
        mesh=mesh,
        loss_fn=lambda output, target: (output - target).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )[0]


def shard() -> tuple[int, int]:
    with fake_world(2):
        sch = schedule()
        return walk(lambda: sch["0"].shard("weight", axis=0))


def sync() -> tuple[int, int]:
    with fake_world(2):
        sch = schedule()
        sch["0"].shard("weight", axis=0).shard("bias", axis=0)
        return walk(lambda: sch["0"].sync("bwd_post", "all_reduce"))


def build() -> tuple[int, int]:
    sch = schedule()
    return walk(lambda: slapo.build(sch))


def build_for_torch() -> tuple[int, int]:
    sch, mesh = schedule(), slapo.init_mesh()
    return walk(lambda: engine(sch, mesh))


def apply_schedule() -> tuple[int, int]:
    from slapo.model_schedule import apply_schedule
    from tests.mistakes import llama

    model = llama(layers=2, kv_heads=2)
    return walk(lambda: apply_schedule(model, "llama"))


def train_step() -> tuple[int, int]:
    made, batch = engine(schedule(), slapo.init_mesh()), (torch.ones(2, 4), torch.ones(2, 4))
    made.train_batch(iter([batch]))
    return walk(lambda: made.train_batch(iter([batch])))


WALKS: dict[str, Callable[[], tuple[int, int]]] = {
    name: globals()[name.replace(" ", "_")] for name in BUDGETS
}


@pytest.fixture(scope="module")
def walks() -> dict[str, tuple[int, int]]:
    """Of a process of its own: other tests leave hooks and caches behind."""
    code = (
        "import json\n"
        "from tests.test_walks import WALKS\n"
        # Without imports, and what is kept after the first call.
        "print(json.dumps({name: (run(), run())[1] for name, run in WALKS.items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(ROOT).parent,
    )
    found: dict[str, tuple[int, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", BUDGETS)
def test_a_walk_is_no_longer_than_it_was(name: str, walks: dict[str, tuple[int, int]]) -> None:
    files, functions = walks[name]
    assert files <= BUDGETS[name][0]
    assert functions <= BUDGETS[name][1]
