"""Times of kernels and collectives; machines of one's own; the calibration; the meter."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.cost import MACHINES, Meter, calibrate
from slapo.cost.calibrate import _Clock
from slapo.cost.machine import SLOW
from slapo.cost.memory import order
from slapo.cost.meter import Kernel
from slapo.sharding.collectives import all_gather, reduce_from_group, reduce_scatter
from slapo.verify.placement.offline import fake_world

H100 = MACHINES["h100-80gb"]


def kernel(flops: float = 0, moved: int = 0, name: str = "mm") -> Kernel:
    return Kernel(name, int(flops), moved, moved // 4, torch.bfloat16)


def test_a_kernel_takes_the_larger_of_work_and_traffic() -> None:
    assert H100.seconds(kernel(1e15)) == pytest.approx(1e15 / (0.6 * 989e12), rel=0.01)
    assert H100.seconds(kernel(0, 10**10)) == pytest.approx(1e10 / (0.8 * 3350e9))
    assert H100.seconds(kernel(1e12, 10**10)) == H100.seconds(kernel(0, 10**10))
    # An accelerator's host runs ahead; a processor's own work comes on top.
    assert H100.seconds(kernel(0, 100)) == H100.overhead
    cpu = MACHINES["cpu"]
    assert cpu.seconds(kernel(0, 10**8)) > cpu.overhead + 10**8 / cpu.bandwidth


def test_small_matrices_are_slower() -> None:
    measured = replace(H100, curve=((1e6, 1e9), (1e9, 1e12)), is_asynchronous=False, overhead=0.0)
    many = Kernel("bmm", 10**9, 0, 0, torch.float32, products=1000)
    one = Kernel("mm", 10**9, 0, 0, torch.float32)
    assert measured.seconds(many) == pytest.approx(1.0)
    assert measured.seconds(one) == pytest.approx(1e-3)


def test_a_ring_moves_each_byte_nearly_twice() -> None:
    gigabyte = 2**30
    inside = H100.collective("all_reduce", gigabyte, 8)
    assert inside == pytest.approx(2 * gigabyte * 7 / 8 / 360e9, rel=0.1)
    assert H100.collective("all_gather", gigabyte, 8) == pytest.approx(inside / 2, rel=0.1)
    # One device of each node has a node's link alone; eight of them have eight.
    alone = H100.collective("all_reduce", gigabyte, 8, stride=8)
    assert alone == pytest.approx(2 * gigabyte * 7 / 8 / 45e9, rel=0.1)
    assert H100.collective("all_reduce", gigabyte, 64) < alone
    assert H100.collective("all_reduce", gigabyte, 1) == 0
    assert H100.collective("message", gigabyte, 2, stride=8) > gigabyte / 45e9


def test_many_ranks_take_a_tree_for_small_tensors() -> None:
    few, many = (H100.collective("all_reduce", 1024, n) for n in (16, 16384))
    assert many < 4 * few


def test_orders_are_those_of_torch() -> None:
    """The schedules of torch.distributed.pipelining, as far as order goes."""
    first = [kind for kind, _ in order("1f1b", 0, 4, 6)]
    assert "".join(first) == "FFFFBFBFBBBB"
    assert "".join(kind for kind, _ in order("1f1b", 3, 4, 6)) == "FBFBFBFBFBFB"
    assert "".join(kind for kind, _ in order("gpipe", 2, 4, 3)) == "FFFBBB"
    assert "".join(kind for kind, _ in order("1f1b", 0, 1, 3)) == "FBFBFB"


def test_calibration_measures_what_it_says() -> None:
    said: list[str] = []
    here = calibrate(said.append, seconds=2.0)
    assert here.is_measured
    assert here.memory > 2**30
    assert [text.partition(":")[0] for text in said] == [
        "products",
        "attention",
        "memory",
        "functions",
        "overhead",
    ]
    # The dispatcher alone takes a microsecond, and Python no millisecond.
    assert 1e-6 < here.overhead < 1e-3
    assert set(here.slow) == SLOW
    assert min(here.slow.values()) > 0
    assert [size for size, _ in here.curve] == sorted(size for size, _ in here.curve)


def test_several_threads_are_timed_by_what_passes() -> None:
    """Their processor time is the sum of all of them, which is no time of a step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert _Clock(0.2)(lambda: time.sleep(0.002)) >= 0.002
    finally:
        torch.set_num_threads(threads)


# --- bytes alive, operations and collectives, on real tensors and on fakes -----------------------
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
