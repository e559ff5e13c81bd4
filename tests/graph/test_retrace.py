"""Traces of what is traced already, and tensors that several graphs of one module have built in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.graph.trace.module import TracedModule

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
MASK = torch.zeros(2, 5, 5)


class HasTensors(nn.Module):
    """Plain tensors beside a layer: neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.two, self.three = torch.full((8,), 2.0), torch.full((8,), 3.0)


class Attends(HasTensors):
    """Without a mask it attends to the past."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.fc(x)
        if mask is not None:
            return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)
        return F.scaled_dot_product_attention(y, y, y, is_causal=True)


class ByMode(HasTensors):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.fc(x)
        return y.relu() if self.training else y.sigmoid()


class Above(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.child(x, mask) + 1


def example(tracer: str) -> Any:
    return {"x": X, "mask": MASK} if tracer != "pytorch" else None


def assert_alike(module: nn.Module, reference: nn.Module) -> None:
    for training in (True, False):
        module.train(training), reference.train(training)
        for call in ((X[:1, :3], MASK[:1, :3, :3]), (X[:1, :3],)):
            torch.testing.assert_close(module(*call), reference(*call))


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("kind", [Attends, ByMode])
def test_a_second_trace_loses_no_graph(kind: Any, flatten: bool, tracer: str) -> None:
    module = kind()
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer=tracer, flatten=flatten, example_inputs=example(tracer))
    traced = sch.mod
    with pytest.warns(UserWarning, match="graph already.*trace it once"):
        assert not sch.trace(tracer=tracer, flatten=flatten, example_inputs=example(tracer))
    assert sch.mod is traced
    assert_alike(sch.mod, reference)


@pytest.mark.parametrize("first", ["pytorch", "huggingface"])
@pytest.mark.parametrize("second", ["pytorch", "huggingface"])
@pytest.mark.parametrize("kind", [Attends, ByMode])
def test_a_traced_child_keeps_its_graphs_in_a_flat_trace(
    kind: Any, first: str, second: str
) -> None:
    module = Above(kind())
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch["child"].trace(tracer=first, example_inputs=example(first))
    assert sch.trace(tracer=second, flatten=True, example_inputs=example(second))
    assert isinstance(sch["child"].mod, TracedModule)
    assert_alike(sch.mod, reference)


@pytest.mark.parametrize("flatten", [False, True])
def test_a_traced_module_may_be_traced_again(flatten: bool) -> None:
    module = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.ReLU())
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch["0"].trace()
    assert sch["0"].trace(flatten=flatten)
    assert sch.trace(flatten=flatten)
    x = torch.randn(2, 4)
    torch.testing.assert_close(sch.mod(x), reference(x))
    targets = [str(node.target) for node in sch["0"].mod.graph.find_nodes(op="call_module")]
    assert flatten == ("0.0" in targets)


class ByMask(HasTensors):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.fc(x)
        return y * self.two if mask is None else (y * self.three).relu()


class ByModeAlike(HasTensors):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.fc(x) * (self.two if self.training else self.three)


class InOneMode(HasTensors):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.fc(x)
        return y.relu() if self.training else y * self.three


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
@pytest.mark.parametrize("kind", [ByMask, ByModeAlike, InOneMode])
def test_each_graph_has_its_own_tensors(kind: Any, tracer: str, training: bool) -> None:
    module = kind().train(training)
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer=tracer, example_inputs=example(tracer))
    assert_alike(sch.mod, reference)
    assert_alike(copy.deepcopy(sch.mod), reference)
    assert sch.mod.state_dict().keys() == reference.state_dict().keys()
