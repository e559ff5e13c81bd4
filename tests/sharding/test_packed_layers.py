"""Column-parallel layers packed into one in a traced module, in front of a row-parallel layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo
from slapo.op import FusedQKV
from tests.distributed import run_distributed
from tests.sharding.packed import MLP, Attention, Packed, heads_of


def attention(sch: slapo.Schedule) -> None:
    sch.replace(FusedQKV(16, 4), sch.find(heads_of))
    packed = sch["FusedQKV_0.fused_linear"]
    packed.shard("weight", axis=0, blocks=3).shard("bias", axis=0, blocks=3)
    packed.sync("bwd_post", "all_reduce")
    sch["out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def mlp(sch: slapo.Schedule) -> None:
    sch.replace(Packed(), sch.find(lambda x: slapo.call_module("gate|up", x)))
    packed = sch["Packed_0.both"]
    packed.shard("weight", axis=0, blocks=2).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[slapo.Schedule], None]]] = {
    "attention": (Attention, attention),
    "mlp": (MLP, mlp),
}


def compare_all(rank: int, world: int) -> None:
    """In one job: the first trace and check of a process take longer than those of a case."""
    for name in CASES:
        for is_recorded in (False, True):
            compare(name, is_recorded)


def compare(name: str, is_recorded: bool) -> None:
    make, schedule = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    reference = copy.deepcopy(model)
    inputs: Any = torch.randn(2, 5, 16, dtype=torch.float64)
    sch = slapo.create_schedule(model, group=dist.group.WORLD)
    assert sch.trace(example_inputs=inputs) if is_recorded else sch.trace()
    schedule(sch)
    slapo.check(sch, inputs)
    with slapo.Verify(sch, inputs):
        pass
    built, _ = slapo.build(sch)
    x, y = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    expected, actual = reference(x), built(y)
    torch.testing.assert_close(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    with torch.no_grad():  # another kind of call, and another number of samples
        more = torch.randn(3, 7, 16, dtype=torch.float64)
        for version in (built.eval(), copy.deepcopy(built)):
            torch.testing.assert_close(version(more), reference(more))


@pytest.mark.distributed
def test_they_compute_what_the_model_does() -> None:
    run_distributed(compare_all, 2, timeout=250)
