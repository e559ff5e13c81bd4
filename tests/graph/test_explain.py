"""An empty result says how far the search came, what hides the rest, and what to try."""

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo.graph.match.diagnose import TracedGraph, nearest_match
from slapo.graph.match.find import find_nodes, find_subgraphs_in, read_pattern, read_question
from slapo.graph.match.pattern import Pattern, call_module, trace_pattern
from slapo.graph.match.pattern_ops import pattern_steps
from tests.graph.rewrites import layers
from tests.graph.rewrites import leaves_of as graph_of
from tests.graph.served import make


class NewGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x, approximate="tanh")


class Sealed(NewGelu):
    traceable = False


class Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 8), act, nn.Linear(8, 4)

    def forward(self, x, y):
        return self.fc2(self.act(self.fc1(x))) + y


def why(root: nn.Module, pattern: Any) -> str:
    found = find_subgraphs_in(root, read_pattern(pattern))
    assert found == []
    assert found.why
    return found.why


def test_the_longest_part_that_is_there():
    def pattern(x, y):
        return torch.tanh(call_module("fc2", F.relu(call_module("fc1", x))) + y)

    steps = pattern_steps(trace_pattern(pattern))
    gm = graph_of(Mlp(nn.ReLU()))
    nearest = nearest_match([TracedGraph("", gm, gm.graph)], steps)
    assert [node.name for node in nearest.found.values()] == ["fc1", "act", "fc2", "add"]
    assert nearest.missing is not None
    assert nearest.missing.node.name == "tanh"
    text = why(gm, pattern)
    assert text.startswith("4 of 5 operations of the pattern were found together, ")
    assert "call_module('fc1') at fc1, relu at act, call_module('fc2') at fc2, add at add" in text
    assert "tanh was not" in text
    assert "no graph here has tanh" in text


def test_opaque_calls_on_the_way():
    text = why(graph_of(Mlp(NewGelu())), lambda x: F.gelu(call_module("fc1", x)))
    assert text.startswith("1 of 2 operations")
    assert "gelu was not: in its place is act (NewGelu)" in text
    assert "the operations inside act (NewGelu) are hidden; call .trace(flatten=True)" in text
    text = why(graph_of(Mlp(Sealed())), lambda x: F.gelu(call_module("fc1", x)))
    assert "act (Sealed) stay opaque" in text
    assert "flatten" not in text


def test_other_constants():
    def code(x):
        return F.gelu(x * 2.0, approximate="tanh").view(2, -1)

    gm = fx.symbolic_trace(code)
    assert "gelu has approximate='tanh', the pattern 'none'" in why(gm, lambda x: F.gelu(x))
    assert "mul has other=2.0, the pattern 3.0" in why(gm, lambda x: x * 3.0)
    assert "view has shape=(2, -1), the pattern (4, -1)" in why(gm, lambda x: x.view(4, -1))
    text = why(graph_of(Mlp(nn.LeakyReLU(0.2))), lambda x: F.leaky_relu(x, 0.3))
    assert "act has negative_slope=0.2, the pattern 0.3" in text


def test_an_operation_that_is_elsewhere():
    gm = fx.symbolic_trace(lambda x: torch.sin(x).relu() + torch.cos(x))
    text = why(gm, lambda x: torch.relu(torch.cos(x)))
    assert "1 of 2" in text
    assert "cos occurs elsewhere, at cos" in text or "relu occurs elsewhere, at relu" in text


def test_an_operation_in_another_graph():
    root = Mlp(NewGelu())
    root.act = graph_of(root.act)
    gm = graph_of(root)
    text = why(gm, lambda x: F.gelu(call_module("fc1", x), approximate="tanh"))
    assert "gelu is in the graph of 'act', but a match cannot span graphs" in text
    assert ".trace(flatten=True)" in text


def test_another_spelling():
    text = why(graph_of(Mlp(nn.ReLU())), lambda x: F.relu6(x))
    assert text.startswith("none of the pattern's operations (1 in all) was found")
    assert "no graph here has relu6" in text
    assert "similar names are relu" in text


def test_an_argument_for_two_values():
    text = why(
        fx.symbolic_trace(lambda x: x.relu() + x.relu()), lambda a, b: a.relu() + b.relu() * b
    )
    assert "mul was not" in text
    text = why(fx.symbolic_trace(lambda x: (h := x.relu()) + h), lambda a, b: a.relu() + b)
    assert "all 2 operations of the pattern were found" in text
    assert "one of its arguments would bind to two different values" in text


def test_names():
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), Mlp(nn.ReLU()))
    root[1] = graph_of(root[1])

    gm = graph_of(make(lambda s, x: s.mlp(s.encoder(x), x), encoder=root[0], mlp=root[1]))
    text = why(gm, "fcc1")
    assert text.startswith("'fcc1' matches none of the 5 module calls")
    assert "the graph calls 'fc1'" in text
    assert "'c1' occurs in 'fc1', but names are matched from their start: write '.*c1'" in why(
        gm, "c1"
    )
    text = why(gm, r"encoder\.0")
    assert "the operations inside encoder (Sequential) are hidden" in text
    assert "the graph calls 'fc1'" in why(gm, lambda x: call_module("fcc1", x))
    assert "no graph here calls a module" in why(fx.symbolic_trace(lambda x: -x), "fc")


def test_nodes():
    gm = graph_of(Mlp(NewGelu()))
    assert (
        find_nodes(gm, read_question("fcc")).why == find_subgraphs_in(gm, read_pattern("fcc")).why
    )
    found = find_nodes(gm, read_question(lambda node: node.op == "call_method"))
    assert found == []
    assert found.why.startswith("the predicate is false for all 7 nodes")
    assert find_nodes(gm, read_question("fc")).why == ""


def test_pattern_modules():
    class Chain(Pattern):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(1, 1), nn.LayerNorm(1)

        def forward(self, x):
            return self.norm(self.fc(x))

    text = why(graph_of(Mlp(nn.ReLU())), Chain)
    assert "1 of 2 operations of the pattern were found together, Linear at fc1" in text
    assert "LayerNorm was not: in its place is act (ReLU)" in text


@pytest.mark.parametrize(
    "pattern",
    [
        lambda x, m: torch.erfinv(F.gelu(torch.matmul(x, m) + 1.0)),
        lambda x, m: F.gelu(torch.matmul(x, m) + 2.0),
        lambda x, m: torch.softmax(F.gelu(x @ m + 1.0) * 2 + m, -1) @ m * x,
    ],
)
def test_an_explanation_costs_little(pattern):
    gm = layers(96)
    wanted = read_pattern(pattern)
    start = time.perf_counter()
    found = find_subgraphs_in(gm, wanted)
    assert found == []
    assert time.perf_counter() - start < 0.2
    assert found.why
    assert time.perf_counter() - start < 1.0
