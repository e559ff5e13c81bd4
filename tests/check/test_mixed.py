"""Schedules of many primitives: what is accepted trains as one process does.

More of them by ``python -m tests.check.fuzz mixed 500``. Below those, what they have found.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import slapo
from slapo.check import check
from tests.check.mixed import compared
from tests.check.mixed_models import HIDDEN, Layer
from tests.check.verdicts import fake_world, is_crash, is_false_alarm, is_miss


@pytest.mark.slow
@pytest.mark.distributed
def test_what_is_accepted_trains_alike() -> None:
    pairs = compared(list(range(36)))
    assert [pair for pair in pairs if is_crash(*pair)] == []
    assert [pair for pair in pairs if is_miss(*pair)] == []
    assert [pair for pair in pairs if is_false_alarm(*pair)] == []
    counts = Counter((said.said, true.said) for said, true in pairs)
    assert counts["accepted", "equal"] >= 12, counts
    assert sum(counts["refused", true] for true in ("wrong", "error")) >= 4, counts


# --- found by them -------------------------------------------------------------------------------
def scheduled_attention() -> slapo.Schedule:
    """Heads are split."""
    sch = slapo.create_schedule(Layer())
    attention = sch["attn"].sync("bwd_post", "all_reduce")
    for name in "qkv":
        attention[name].shard("weight", axis=0).shard("bias", axis=0)
    attention["out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    attention.set("heads", whole=attention.mod.heads)
    return sch


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("path", ["", "attn"])
def test_numbers_that_a_trace_has_built_in(path: str, flatten: bool) -> None:
    """In one process they would be others, which the graph cannot run with."""
    with fake_world():
        sch = scheduled_attention()
        assert sch[path].trace(flatten=flatten)
        check(sch, torch.randn(3, 7, HIDDEN))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, ids: Any) -> Any:
        return self.out(self.table(ids))


def test_reentrant_checkpoint_of_what_has_no_gradient_to_send_back() -> None:
    """Torch would warn, and leave the table as it is for ever."""
    sch = slapo.create_schedule(Positions())
    sch["table"].checkpoint(use_reentrant=True)
    ids = torch.arange(5)
    message = r"\['weight'\] would get none either; pass use_reentrant=False"
    with pytest.raises(slapo.SlapoError, match=message):
        check(sch, ids)
    with pytest.raises(slapo.SlapoError, match=message):
        slapo.build(sch)[0](ids)
    with torch.no_grad():
        slapo.build(sch)[0](ids)
