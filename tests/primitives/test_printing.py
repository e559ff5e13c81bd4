"""What ``print(sch)`` shows, kept as golden files; ``--update-golden`` writes them anew."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import nn

import slapo
from slapo import Schedule
from tests.primitives.models import Attention, Block, Stack

GOLDEN = Path(__file__).parent.parent / "golden"


def untouched() -> Schedule:
    return slapo.create_schedule(Stack(4))


def one_of_a_stack() -> Schedule:
    sch = slapo.create_schedule(Stack(5))
    sch["layers.2"].checkpoint()
    sch["layers.2.fc1"].annotate("weight", "kind", "expert")
    return sch


def every_layer() -> Schedule:
    sch = slapo.create_schedule(Stack(12))
    sch.select("layers.*.fc1").shard("weight", axis=0).shard("bias", axis=0)
    sch.select("layers.*.fc1").sync("bwd_post", "all_reduce")
    sch.select("layers.*.fc2").shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch.select("layers.*").checkpoint()
    return sch


def fused() -> Schedule:
    sch = slapo.create_schedule(Block())
    sch["fc1"].decompose()
    sch.fuse(sch.find(lambda x, b: F.gelu(x + b)), compiler=None, name="BiasGeLU")
    sch.checkpoint(sch.find(lambda x: F.dropout(slapo.call_module("fc2", x))))
    return sch


def replaced() -> Schedule:
    sch = slapo.create_schedule(nn.Sequential(Attention(), nn.ReLU(), nn.Sequential(nn.ReLU())))
    sch["0"].replace(nn.Linear(4, 4)).fork_rng()
    sch.replace_all(nn.ReLU, lambda path, module: nn.GELU(approximate="tanh"))
    return sch


def long_text() -> Schedule:
    return slapo.create_schedule(
        nn.Sequential(nn.Conv2d(3, 64, (7, 7), stride=(2, 2), padding=(3, 3), dilation=(2, 2)))
    )


def staged() -> Schedule:
    sch = slapo.create_schedule(Stack(4))
    sch.trace_until("")
    sch["layers.1"].cut_pipeline_stage()
    return sch


CASES: dict[str, Callable[[], Schedule]] = {
    f.__name__: f
    for f in (untouched, one_of_a_stack, every_layer, fused, replaced, long_text, staged)
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, update_golden: bool) -> None:
    text = str(CASES[name]()) + "\n"
    file = GOLDEN / f"schedule_{name}.txt"
    if update_golden:
        file.write_text(text)
    assert file.exists(), f"{file} is missing; run pytest with --update-golden"
    assert text == file.read_text()


def test_a_subtree_prints_itself() -> None:
    sch = every_layer()
    assert str(sch["layers.3"]).splitlines()[0] == "Block  <- checkpoint()"


def test_repr_is_one_line() -> None:
    sch = untouched()
    assert repr(sch) == "<Schedule of Stack, rank 0 of 1, 5 children>"
    assert repr(sch["layers.1.fc1"]) == (
        "<Schedule of Linear at 'layers.1.fc1', rank 0 of 1, 0 children>"
    )


def test_notebooks_get_escaped_html() -> None:
    html = one_of_a_stack()._repr_html_()
    assert html.startswith("<pre>Stack\n")
    assert "&lt;- checkpoint()" in html


def test_many_notes_of_one_kind_are_counted() -> None:
    sch = slapo.create_schedule(Stack(6))
    sch.trace(flatten=True)
    for match in sch.find(lambda x: F.gelu(x)):
        sch.fuse(match, compiler=None)
    assert "Stack  <- trace(flatten=True); fuse(...) 6x" in str(sch)
