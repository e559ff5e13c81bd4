"""An empty result says how far the search came; beside ``golden/mistakes/find.txt``."""

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


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

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
    gm = graph_of(Mlp())
    nearest = nearest_match([TracedGraph("", gm, gm.graph)], steps)
    assert [node.name for node in nearest.found.values()] == ["fc1", "act", "fc2", "add"]
    assert nearest.missing is not None
    assert nearest.missing.node.name == "tanh"
    text = why(gm, pattern)
    assert text.startswith("4 of 5 operations of the pattern were found together, ")
    assert "call_module('fc1') at fc1, relu at act, call_module('fc2') at fc2, add at add" in text
    assert "tanh was not" in text
    assert "no graph here has tanh" in text


def test_nodes():
    gm = graph_of(Mlp())
    named = find_nodes(gm, read_question("fcc"))
    assert named.why == find_subgraphs_in(gm, read_pattern("fcc")).why
    assert find_nodes(gm, read_question("fc")).why == ""
    assert "no graph here calls a module" in why(fx.symbolic_trace(lambda x: -x), "fc")


def test_pattern_modules():
    class Chain(Pattern):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(1, 1), nn.LayerNorm(1)

        def forward(self, x):
            return self.norm(self.fc(x))

    text = why(graph_of(Mlp()), Chain)
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
