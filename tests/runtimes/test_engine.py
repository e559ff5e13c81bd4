"""One engine for all targets: what it offers, and what it compares, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.runtimes import engine_jobs
from tests.runtimes.test_contract import RUNTIMES, run, target

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
    losses, norms, state = engine_jobs.train_uneven_alone(engine_jobs.CLIP)
    assert min(norms) > engine_jobs.CLIP
    for found in run(engine_jobs.train_uneven, 2, name, layout, options):
        assert found["losses"] == pytest.approx(losses, abs=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-4)
        assert found["steps"] == engine_jobs.STEPS
        for key, value in found["state"].items():
            if value.shape == state[key].shape:
                torch.testing.assert_close(value, state[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "layout", "options"), CASES)
def test_the_whole_surface(name: str, layout: Any, options: dict[str, Any]) -> None:
    pytest.importorskip(RUNTIMES[name][1])
    state = engine_jobs.train_groups_alone()
    ranks = run(engine_jobs.use_all, 2, name, layout, options)
    for found in ranks:
        assert found["training"]
        assert found["steps"] == 2
        assert found["norms"] == ranks[0]["norms"]
        assert min(found["norms"]) > 0
        assert found["loaded"] == 0
        assert found["after loading"] < 1e-5
        for key, value in found["state"].items():
            if value.shape == state[key].shape:
                torch.testing.assert_close(value, state[key], atol=1e-5, rtol=0)
        for loss, output, _ in found["evaluated"]:
            assert loss < 1e-5
            assert output < 1e-5
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
def test_replicas_of_shards() -> None:
    """HSDP: two replicas of parameters that two ranks share out."""
    options = {"data_parallel": "fsdp", "shard_size": 2, "micro_batches": 2}
    losses, norms, state = engine_jobs.train_uneven_alone(engine_jobs.CLIP)
    for found in run(engine_jobs.train_uneven, 4, "torch", (1, 4, 1), options):
        assert found["losses"] == pytest.approx(losses, abs=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-4)
        for key, value in found["state"].items():
            torch.testing.assert_close(value, state[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1)], ids=["dp", "pp"])
def test_compiled_parts(layout: Any) -> None:
    # That it is dynamo's graphs that run is seen; which compiler works on them is the user's.
    options = {"compile": {"backend": "aot_eager"}}
    losses, _, state = engine_jobs.train_uneven_alone(engine_jobs.CLIP)
    for found in run(engine_jobs.train_uneven, 2, "torch", layout, options):
        assert found["losses"] == pytest.approx(losses, abs=1e-5)
        for key, value in found["state"].items():
            torch.testing.assert_close(value, state[key], atol=1e-5, rtol=0)


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
