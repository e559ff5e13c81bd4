"""What scripts written for the published Slapo import and rely on."""

from __future__ import annotations

import importlib
import operator
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo
from slapo.op import Print
from slapo.op.print import show
from slapo.utils.common import get_hooks, is_lambda_function, transfer_hooks
from slapo.utils.report import profile_perf, report_memory
from tests.graph.served import make

NAMES = {
    "slapo.sharding.sync_ops": [
        "all_gather_forward_output",
        "reduce_scatter_forward_output",
        "scatter_forward_output",
        "reduce_forward_output",
        "reduce_backward_grad",
    ],
    "slapo.sharding": ["all_gather_forward_output", "reduce_backward_grad"],
    "slapo.random": [
        "CudaRNGStatesTracker",
        "get_cuda_rng_tracker",
        "model_parallel_cuda_manual_seed",
        "_CUDA_RNG_STATE_TRACKER",
    ],
    "slapo.pipeline": ["analyze_tie_weights"],
    "slapo.framework_dialect.deepspeed.pipeline": ["analyze_tie_ranks"],
    "slapo.framework_dialect": ["get_dialect_cls"],
    "slapo": ["Symbol", "Space", "Database"],
    "slapo.autotune": ["Symbol", "Space", "Database"],
    "slapo.autotune.tune": ["Symbol", "Space", "Database"],
    "slapo.op": ["Print"],
    "slapo.env": ["setup", "cleanup", "execute"],
    "slapo.initialization": ["init_empty_weights"],
    "slapo.utils.report": ["report_memory", "profile_perf"],
    "slapo.utils.common": ["get_hooks", "transfer_hooks", "is_lambda_function"],
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES.items() for name in names]
)
def test_names_by_their_import_paths(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


BOUND = (
    "pattern op pipeline random initialization tracer sharding utils env framework_dialect "
    "autotune "
    "utils.report utils.common"
)


def test_a_plain_import_binds_the_modules() -> None:
    """In a process of its own: the tests have imported more than a script does."""
    code = f"import slapo\nfor name in {BOUND.split()}: eval(f'slapo.{{name}}')"
    subprocess.run([sys.executable, "-c", code], check=True)


def shows(self: Any, x: Tensor) -> Tensor:
    self.show(x, "before")  # nothing uses it
    Print()(x.sum(), f"{x.dim()} dims" if isinstance(x.dim(), int) else "dims", "in all")
    x = Print()(x * 2, "shape", x.shape, "mean", x.mean(), "of")
    return x + 1


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface", "dynamo"])
def test_what_is_printed_is_of_the_run(tracer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a module or none, and of any values that the forward makes."""
    sch = slapo.create_schedule(make(shows, show=Print()))
    assert sch.trace(tracer=tracer, example_inputs=(torch.zeros(1, 2),))
    assert len(sch.find_node(lambda n: n.target is show)) in (2, 3)
    sch.replace(torch.sub, sch.find_node(lambda n: n.target is operator.add)[0])
    sch.mod.graph.eliminate_dead_code()
    sch.mod.recompile()
    capsys.readouterr()
    for number in (1, 3):
        found = sch.mod(torch.full((1, 2), float(number)))
        assert torch.equal(found, torch.full((1, 2), 2.0 * number - 1))
        shown = capsys.readouterr().out
        assert shown.count(f"before tensor([[{number}., {number}.]])") == 1
        assert f"in all tensor({2 * number}.)" in shown
        assert f"shape torch.Size([1, 2]) mean tensor({number}.) of tensor([[{2 * number}." in shown


def test_hooks_go_over() -> None:
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    old.register_forward_hook(lambda *_: None)
    transfer_hooks(old, new)
    assert [len(get_hooks(m)["fwd_post"]) for m in (old, new)] == [0, 1]
    assert is_lambda_function(get_hooks(new)["fwd_post"][0])
    assert not is_lambda_function(test_hooks_go_over)


def test_memory_is_a_number(caplog: pytest.LogCaptureFixture) -> None:
    kept = torch.ones(2**18)
    found = report_memory("here", report_gc=True)
    if not torch.accelerator.is_available():
        assert found == 0.0
    assert found + 1.0 > 0
    assert "known to Python: " in caplog.messages[0]
    assert "on cpu" in caplog.messages[0]
    assert kept.sum() == 2**18


@pytest.mark.parametrize(
    "inputs", [torch.ones(64, 512), (torch.ones(64, 512),), {"input": torch.ones(64, 512)}]
)
def test_where_the_time_goes(inputs: Any) -> None:
    model = nn.Linear(512, 512)
    table = profile_perf(model, inputs, backward=True)
    assert "aten::addmm" in table  # one of the ten that take longest, at this size
    assert model.weight.grad is not None


def test_ties_over_stages_and_ranks() -> None:
    from slapo.framework_dialect.deepspeed.pipeline import analyze_tie_ranks
    from slapo.pipeline import analyze_tie_weights

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Embedding(4, 2), nn.ReLU(), nn.Linear(2, 4)
            self.last.weight = self.first.weight

    groups = analyze_tie_weights(Stages(), True)
    assert list(groups.values()) == [{("weight", 0), ("weight", 2)}]

    class Topology:
        def filter_match(self, pipe: int) -> list[int]:
            return [pipe, pipe + 3]

    assert analyze_tie_ranks(groups.values(), Topology()) == ([[[0, 2], [3, 5]]], [[0, 2]])
