"""What ``print(sch)`` shows, kept as golden files; ``--update-golden`` writes them again."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

import slapo
from slapo import Schedule, printing
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


class Pairs(nn.Module):
    """Layers as pairs in lists of lists."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        pairs = (nn.ModuleList([Attention(), Block()]) for _ in range(depth))
        self.layers = nn.ModuleList(pairs)
        self.grid = nn.ModuleList(
            nn.ModuleList(nn.ModuleList(nn.ReLU() for _ in range(3)) for _ in range(2))
            for _ in range(2)
        )


def lists_of_lists() -> Schedule:
    sch = slapo.create_schedule(Pairs())
    sch.select("layers.*.1").checkpoint()
    sch["layers.3.1.fc1"].shard("weight", axis=0)
    return sch


def many_notes() -> Schedule:
    sch = slapo.create_schedule(Stack(6))
    sch.trace(flatten=True)
    for match in sch.find(lambda x: F.gelu(x)):
        sch.fuse(match, compiler=None)
    return sch


def missing_numbers() -> Schedule:
    sch = slapo.create_schedule(nn.Sequential(*(nn.ReLU() for _ in range(4))))
    del sch.mod._modules["1"]  # as a rewrite of a graph takes modules out
    return sch


def moved_within_another() -> Schedule:
    sch = slapo.create_schedule(nn.Sequential(Block(), nn.ReLU()))
    sch["0.fc1"].shard("weight", axis=0)
    sch["0"].replace(nn.Sequential(nn.Identity(), sch["0"].mod))
    return sch


def at_two_places() -> Schedule:
    block = Block()
    sch = slapo.create_schedule(nn.Sequential(block, nn.ReLU(), block))
    sch["0"].checkpoint()
    sch["2.fc1"].shard("weight", axis=0)
    return sch


class Config:
    def __repr__(self) -> str:
        return "Config {\n" + "".join(f"  'n{k}': {k},\n" for k in range(99)) + "}"


def describes_itself() -> Schedule:
    sch = slapo.create_schedule(nn.Sequential(Conv1D(4, 8), Conv1D(4, 8)))
    sch["0"].checkpoint().annotate("weight", "config", Config())
    return sch


CASES: dict[str, Callable[[], Schedule]] = {
    f.__name__: f
    for f in (
        untouched,
        one_of_a_stack,
        every_layer,
        fused,
        lists_of_lists,
        long_text,
        replaced,
        staged,
        many_notes,
        missing_numbers,
        moved_within_another,
        at_two_places,
        describes_itself,
    )
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
    assert repr(describes_itself()["0"]).startswith("<Schedule of Conv1D at '0'")


def test_notebooks_get_an_outline_in_color() -> None:
    html = one_of_a_stack()._repr_html_()
    assert html.count("<details") == html.count("</details>") > 0
    assert html.count("<details open>") == 1  # the layers that were left alone are closed
    assert '<i class=recompute title="sch[&quot;layers.2&quot;].checkpoint()' in html
    shares = [float(share) for share in re.findall(r"([0-9.]+)% of the parameters", html)]
    assert max(shares) < 100.0
    assert "<Linear" not in html


def test_shards_syncs_and_cuts_have_colors_of_their_own() -> None:
    html = printing.page(every_layer())
    assert re.search(r"<i class=shard [^>]*>weight: Shard\(0\)</i>", html)
    assert re.search(r"<i class=sync [^>]*>bwd_post: all_reduce</i>", html)
    html = printing.page(staged())
    assert html.index("cut_pipeline_stage()") < html.index("<hr>")


def notes(sch: Schedule, name: str) -> str:
    """What the tree shows as applied to the one module of that name."""
    (line,) = [line for line in str(sch).splitlines() if f"-- {name}: " in line]
    return line.partition("  <- ")[2]


def test_what_a_replaced_parent_has_taken_along_is_not_shown() -> None:
    sch = slapo.create_schedule(nn.Sequential(Block(), nn.ReLU()))
    sch["0.fc1"].shard("weight", axis=0)
    sch["0"].replace(Block())
    assert (notes(sch, "0"), notes(sch, "fc1")) == ("replace(Block)", "")
    sch["0.fc1"].sync("bwd_post", "all_reduce")
    assert notes(sch, "fc1") == "sync('bwd_post', 'all_reduce')"
    sch.mod[0] = Block()  # by the user, around the schedule
    assert (notes(sch, "0"), notes(sch, "fc1")) == ("", "")
    assert len(sch.history) == 3


@pytest.mark.parametrize("flatten", [False, True])
def test_notes_outlast_a_trace_of_the_parent(flatten: bool) -> None:
    sch = slapo.create_schedule(nn.Sequential(Block(), nn.ReLU()))
    sch["0.fc1"].shard("weight", axis=0)
    sch["0"].checkpoint()
    sch.trace(flatten=flatten, leaf_modules=["Block"])
    if not flatten:  # else what is in a leaf is none of the schedule's
        assert notes(sch, "fc1") == "shard('weight', axis=0)"
    assert notes(copy.deepcopy(sch), "0") == "checkpoint()"
