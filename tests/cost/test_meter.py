"""Bytes alive, operations and collectives, on real tensors and on fakes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.cost import Meter
from slapo.sharding.collectives import all_gather, reduce_from_group, reduce_scatter
from slapo.verify.placement.offline import fake_world


@pytest.mark.parametrize("fake", [False, True])
def test_operations_of_a_step(fake: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.enable_grad():
        layer, x = nn.Linear(8, 16), torch.ones(4, 8)
        with Meter(layer, fakes=True) as meter:
            layer(x).sum().backward()
    # Forward, and the gradient of the weight; the input needs none.
    assert [k.flops for k in meter.kernels if k.flops] == [2 * 4 * 8 * 16] * 2
    assert meter.peak >= 2 * 4 * (8 * 16 + 16)


def test_attention_counts_both_ways() -> None:
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with Meter() as meter:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    forward, backward = (kernel.flops for kernel in meter.kernels if kernel.flops)
    assert forward == 2 * 2 * (2 * 3 * 16 * 16 * 8)
    # Scores again, and four gradients' products.
    assert backward == 5 * (2 * 2 * 3 * 16 * 16 * 8)


@pytest.mark.parametrize(("approximate", "name"), [("none", "gelu"), ("tanh", "gelu_tanh")])
def test_both_formulas_of_gelu_have_a_name(approximate: str, name: str) -> None:
    """A CPU takes about three times as long for the one with tanh."""
    x = torch.randn(4, 8, requires_grad=True)
    with Meter() as meter:
        F.gelu(x, approximate=approximate).sum().backward()
    names = [kernel.name for kernel in meter.kernels]
    assert [found for found in names if "gelu" in found] == [name, f"{name}_backward"]


def test_products_in_groups_count_each_row_once() -> None:
    """Groups are of any size, and a fake tensor cannot tell: their sum is all rows."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = torch.empty(10, 4, requires_grad=True)
        weights = torch.empty(3, 4, 6, requires_grad=True)
        ends = torch.empty(3, dtype=torch.int32)
        with Meter(fakes=True) as meter:
            made = torch._grouped_mm(rows, weights, offs=ends)
            made.sum().backward()
    assert made.shape == (10, 6)
    assert rows.grad is not None
    assert weights.grad is not None
    assert weights.grad.shape == (3, 4, 6)
    assert [k.flops for k in meter.kernels if k.flops] == [2 * 10 * 4 * 6] * 3


def test_a_view_and_a_broadcast_are_no_bytes() -> None:
    x = torch.ones(4, 1)
    with Meter() as meter:
        meter.hold([x])
        y = x.expand(4, 100)
        z = y.t().unsqueeze(0)
        assert meter.alive == 16
        _ = z + 1
    (kernel,) = meter.kernels
    assert kernel.moved == 4 * 4 + 4 * 400


def test_storages_are_rounded() -> None:
    with Meter(rounding=512) as meter:
        kept = torch.ones(3)
        assert meter.alive == 512
    del kept
    assert meter.alive == 0


def test_fakes_beside_real_tensors_take_no_memory() -> None:
    with Meter() as meter:
        with FakeTensorMode():
            fake = torch.empty(1000)
        meta = torch.empty(1000, device="meta")
        assert meter.alive == 0
    assert fake.shape == meta.shape


def test_collectives_have_sizes_and_ranks() -> None:
    with fake_world(8):
        group = dist.new_group([4, 5, 6, 7])
        tensor = torch.ones(100)
        with Meter() as meter:
            dist.all_reduce(tensor, group=group)
            dist.broadcast(torch.empty(200), 0)
        dist.destroy_process_group(group)
    found = [(c.name, c.size, c.ranks) for c in meter.collectives]
    assert [(size, ranks) for _, size, ranks in found] == [(400, 4), (800, 8)]
    assert "reduce" in found[0][0]
    assert "broadcast" in found[1][0]


def test_collectives_have_the_names_of_measured_links() -> None:
    x = torch.ones(4, 4)
    with fake_world(2), Meter() as meter:
        reduce_from_group(x)
        all_gather(x, None, axis=0)
        reduce_scatter(x, None, axis=0)
    names = [each.name for each in meter.collectives]
    assert names == ["all_reduce", "all_gather", "reduce_scatter"]


def test_tensors_that_are_watched_are_named_when_touched() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with Meter() as meter:
        meter.watch([("a", layer.weight), ("b", other.weight)])
        layer(torch.ones(1, 2))
    assert meter.touched == {"a"}
