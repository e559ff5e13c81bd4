"""Random schedules: the check says what processes compute, and what is accepted trains alike.

More of them by ``python -m tests.check.fuzz``. Below those, what they have found.
"""

from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import slapo
from slapo.verify.placement import check
from tests.check import fuzz, mixed
from tests.check.mixed_models import HIDDEN, Layer
from tests.check.verdicts import fake_world, is_crash, is_false_alarm, is_miss


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["tensor", "sequence", "shared"])
@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 200), marks=pytest.mark.wide)], ids=len
)
def test_no_miss_and_no_false_alarm(kind: str, seeds: range) -> None:
    pairs = fuzz.compared(kind, list(seeds))
    assert [said for said, true in pairs if is_miss(said, true)] == []
    assert [said for said, true in pairs if is_false_alarm(said, true)] == []
    counts = Counter((said.said, true.said) for said, true in pairs)
    assert counts["accepted", "equal"] >= len(seeds) // 8, counts  # neither always yes
    assert counts["refused", "wrong"] >= len(seeds) // 12, counts  # nor always no


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 60), marks=pytest.mark.wide)], ids=len
)
def test_what_is_accepted_trains_alike(seeds: range) -> None:
    pairs = fuzz.compared("mixed", list(seeds))
    assert [pair for pair in pairs if is_crash(*pair)] == []
    assert [pair for pair in pairs if is_miss(*pair)] == []
    assert [pair for pair in pairs if is_false_alarm(*pair)] == []
    counts = Counter((said.said, true.said) for said, true in pairs)
    assert counts["accepted", "equal"] >= len(seeds) // 3, counts
    assert sum(counts["refused", true] for true in ("wrong", "error")) >= len(seeds) // 9, counts


# --- found by them -------------------------------------------------------------------------------
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("path", ["", "attn"])
def test_numbers_that_a_trace_has_built_in(path: str, flatten: bool) -> None:
    """In one process they would be others, which the graph cannot run with."""
    with fake_world():
        sch = slapo.create_schedule(Layer())
        attention = sch["attn"].sync("bwd_post", "all_reduce")
        for name in "qkv":
            attention[name].shard("weight", axis=0).shard("bias", axis=0)
        attention["out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        attention.set("heads", whole=attention.mod.heads)
        assert sch[path].trace(flatten=flatten)
        check(sch, torch.randn(3, 7, HIDDEN))


def test_a_vocabulary_in_a_job_of_more_ranks() -> None:
    with fake_world(4, rank=3):
        group = slapo.init_mesh(pp=2, tp=2, device="cpu")["tp"]
        layers = OrderedDict(table=nn.Embedding(8, 4), out=nn.Linear(4, 4))
        sch = slapo.create_schedule(nn.Sequential(layers), group=group)
        sch["table"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
        check(sch, torch.arange(5))


def test_numbers_that_are_set_after_a_trace_are_those_of_its_captures() -> None:
    """Layers with rewrites, in which heads are set to this rank's share afterwards."""
    plan = mixed.Plan.of(365)
    with fake_world():
        sch = slapo.create_schedule(plan.model.family.build(0.0))
        plan.apply(sch, is_cut=False)
        assert plan.refused == []
        inputs, targets = plan.example()
        check(sch, inputs, lambda output: mixed.loss_of(output, targets))
