"""``.trace`` and ``.trace_until``: same names, same state, same values, or nothing at all."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import fx, nn

import slapo
from tests.fingerprint import fingerprint
from tests.primitives.models import Block, DataDependent, Stack

X = torch.randn(3, 4)


def targets(sch: slapo.Schedule) -> list[str]:
    return [str(n.target) for n in sch.mod.graph.nodes if n.op == "call_module"]


@pytest.mark.parametrize("recursive", [True, False])
def test_children_stay_calls_under_their_names(recursive: bool) -> None:
    model = Stack(2)
    reference, names = copy.deepcopy(model), list(model.state_dict())
    sch = slapo.create_schedule(model)
    paths = [path for path, _ in sch.named_schedules()]
    assert sch.trace(recursive=recursive) is True
    assert targets(sch) == ["layers.0", "layers.1", "head"]
    assert isinstance(sch["layers.0"].mod, fx.GraphModule) is recursive
    assert list(sch.mod.state_dict()) == names
    assert [path for path, _ in sch.named_schedules()] == paths
    assert type(sch.mod).__name__ == "Stack"
    torch.testing.assert_close(sch.mod(X), reference(X))


# --- trace_until -----------------------------------------------------------------------------
def outer() -> Any:
    return nn.Sequential(OrderedDict(body=Stack(3), tail=Block()))


@pytest.mark.parametrize("paths", ["body", ["body"]])
def test_containers_down_to_a_path(paths: Any) -> None:
    model = outer()
    reference = copy.deepcopy(model)
    blocks = list(model.body.layers)
    sch = slapo.create_schedule(model)
    assert sch.trace_until(paths) is True
    assert targets(sch) == ["body", "tail"]
    assert targets(sch["body"]) == ["layers.0", "layers.1", "layers.2", "head"]
    assert [sch[f"body.layers.{k}"].mod for k in range(3)] == blocks
    assert not isinstance(sch["tail"].mod, fx.GraphModule)
    torch.testing.assert_close(sch.mod(X), reference(X))
    sch["body.layers.1"].cut_pipeline_stage()


@pytest.mark.parametrize("compiler", ["TorchScript", None])
def test_a_capture_of_what_was_fused(compiler: str | None) -> None:
    """A graph whose code is not generated yet, with a child that no capture sees as a module."""
    model = Stack()
    sch, x = slapo.create_schedule(model), torch.randn(3, 4)
    expected = model(x)
    layer = sch["layers.0"]
    assert layer.trace(recursive=False)
    found = layer.find_node(lambda node: node.op == "call_module")[:1]
    layer.fuse([found], compiler=compiler)
    assert sch.trace_until("", tracer="huggingface", example_inputs=x)
    torch.testing.assert_close(sch.mod(x), expected)


def test_a_trace_until_that_fails_changes_nothing() -> None:
    sch = slapo.create_schedule(nn.Sequential(DataDependent(), nn.ReLU()))
    before = fingerprint(sch)
    with pytest.warns(UserWarning, match="could not be traced") as caught:
        assert sch.trace_until("0") is False
    assert caught[0].filename == __file__
    assert fingerprint(sch) == before


def test_a_selection_is_traced_as_a_whole_or_not_at_all() -> None:
    sch = slapo.create_schedule(nn.ModuleList([nn.Sequential(nn.ReLU()), DataDependent()]))
    before = fingerprint(sch)
    with (
        pytest.warns(UserWarning, match="DataDependent"),
        pytest.raises(slapo.SlapoError, match="failed for '1'"),
    ):
        sch.select("*").trace()
    assert fingerprint(sch) == before


def test_modules_that_stay_opaque_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    sch = slapo.create_schedule(nn.Sequential(DataDependent(), DataDependent()))
    assert sch.trace()
    told = [record for record in caplog.records if "stay opaque" in record.getMessage()]
    assert [r.getMessage()[:60] for r in told] == [
        "2 modules stay opaque in the trace of the root, the first is"
    ]
