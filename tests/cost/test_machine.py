"""Times of kernels and collectives; machines of one's own; the calibration."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from slapo.cost import MACHINES, calibrate
from slapo.cost.calibrate import _Clock
from slapo.cost.machine import SLOW
from slapo.cost.memory import order
from slapo.cost.meter import Kernel

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
