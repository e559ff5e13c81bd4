"""One engine for all targets: what it offers, and what it compares, on real processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from tests.runtimes import engine_jobs
from tests.runtimes.test_contract import RUNTIMES, TOLERANCE, run, target

__all__ = ["target"]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

#: Layouts, and what else is chosen, for each target.
WAYS: dict[str, list[tuple[tuple[int, int, int], dict[str, Any]]]] = {
    "torch": [
        ((2, 1, 1), {}),
        ((1, 2, 1), {}),
        ((1, 2, 1), {"data_parallel": "fsdp"}),
        ((2, 1, 1), {"data_parallel": "fsdp"}),
        ((1, 1, 2), {}),
    ],
    "deepspeed": [
        ((2, 1, 1), {"zero": 0}),
        ((2, 1, 1), {"zero": 1}),
        ((1, 2, 1), {"zero": 0}),
        ((1, 2, 1), {"zero": 2}),
        ((1, 2, 1), {"zero": 3}),
        ((1, 1, 2), {"zero": 1}),
    ],
    "megatron": [((2, 1, 1), {}), ((1, 2, 1), {}), ((1, 1, 2), {})],
}
CASES = [
    pytest.param(
        name, layout, options, id=f"{name}-{'x'.join(map(str, layout))}-{list(options.values())}"
    )
    for name, ways in WAYS.items()
    for layout, options in ways
]


def test_every_runtime_has_its_ways() -> None:
    assert WAYS.keys() == RUNTIMES.keys()


@pytest.mark.parametrize(("name", "layout", "options"), CASES)
def test_losses_that_count_are_exact(name: str, layout: Any, options: dict[str, Any]) -> None:
    pytest.importorskip(RUNTIMES[name][1])
    check_uneven(name, layout, options)


def check_uneven(name: str, layout: Any, options: dict[str, Any]) -> None:
    for found in run(engine_jobs.train_uneven, math.prod(layout), name, layout, options):
        assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize(("name", "layout", "options"), CASES)
def test_the_whole_surface(name: str, layout: Any, options: dict[str, Any]) -> None:
    pytest.importorskip(RUNTIMES[name][1])
    ranks = run(engine_jobs.use_all, 2, name, layout, options)
    for found in ranks:
        assert found["training"]
        assert found["steps"] == 3
        assert max(found["apart"].values()) < TOLERANCE
        assert found["loaded"] == 0
        assert max(found["after loading"].values()) < TOLERANCE
        for loss, output, _ in found["evaluated"]:
            assert loss < TOLERANCE
            assert output < TOLERANCE
        assert "has ['nothing'], which the model does not" in found["names"]
    has_outputs = [all(shown for *_, shown in found["evaluated"]) for found in ranks]
    assert has_outputs == [layout[0] == 1, True]


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2), (2, 1, 1)], ids=["dp", "tp", "pp"])
def test_what_must_be_alike_is_compared(target: str, layout: Any) -> None:
    ranks = run(engine_jobs.differ, 2, target, layout)
    for found in ranks:
        assert "clip_grad_norm differs between ranks: 1.0 on rank 0, 2.0 on rank 1" in found["clip"]
        assert "optimizer differs between ranks" in found["rate"]
        assert found["synced"] == "no error"
        if layout != (2, 1, 1):  # stages hold other parameters, but for the tied one
            assert found["whole"] == ranks[0]["whole"]
        assert "that must hold the same; seed alike before" in found["seed"]


def test_partial_sums_that_nobody_adds_are_an_error(target: str) -> None:
    for text in run(engine_jobs.forget_a_collective, 2, target):
        assert "tensor-parallel ranks computed different losses of the same batch" in text


def test_a_backward_without_its_step_is_an_error(target: str) -> None:
    (text,) = run(engine_jobs.forget_a_step, 1, target)
    assert "1 backward() before were not followed by step()" in text


# --- target "torch" ------------------------------------------------------------------------------
@pytest.mark.parametrize(("layout", "size"), [((1, 4, 1), 2), ((2, 2, 1), 1)], ids=str)
def test_replicas_of_shards(layout: Any, size: int) -> None:
    """HSDP: replicas of parameters that neighbours share out, in a pipeline too."""
    options = {"data_parallel": "fsdp", "shard_size": size, "micro_batches": 2}
    check_uneven("torch", layout, options)


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1)], ids=["dp", "pp"])
def test_compiled_parts(layout: Any) -> None:
    # That it is dynamo's graphs that run is seen; which compiler works on them is the user's.
    check_uneven("torch", layout, {"compile": {"backend": "aot_eager"}})


def test_what_fsdp_gathers_at_a_time() -> None:
    from slapo.framework_dialect.pytorch.data_parallel import fsdp_units

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    class Named(nn.Module):
        """Blocks by name, as vision models have them, and layers of one class beside them."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
            self.block1, self.block2 = Inner(), Inner()

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    class Stacks(nn.Module):
        """Two stacks of one class: their layers, and not they, are gathered."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Stack(), Stack()

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(block() for _ in range(2))

    named, stacks = Named(), Stacks()
    assert list(fsdp_units(named)) == [named.block1, named.block2]
    assert list(fsdp_units(stacks)) == [*stacks.encoder.layers, *stacks.decoder.layers]
    by_key = nn.ModuleDict({"a": block(), "b": block()})
    assert list(fsdp_units(nn.ModuleList([by_key]))) == [by_key]
    assert list(fsdp_units(by_key)) == list(by_key.values())
