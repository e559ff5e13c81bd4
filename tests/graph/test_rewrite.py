"""Rewrites of one graph: which modules stay, what misfits, what is walked."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo.graph.fuse.fusion import extract
from slapo.graph.match.pattern import call_module
from slapo.graph.match.search import find_by_name, find_subgraphs
from slapo.graph.trace.views import park_unused
from tests.graph.rewrites import leaves_of, replace_horizontal, replace_node, replace_vertical
from tests.graph.served import make

BATCH, SEQ, SIZE = 3, 5, 8


class Block(nn.Module):
    """Attention without softmax, and an MLP with its bias apart."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.fc1, self.fc2 = nn.Linear(SIZE, 16, bias=False), nn.Linear(16, SIZE)
        self.bias = nn.Parameter(torch.randn(16))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        a = (q @ k.transpose(-1, -2)) * self.scale @ v
        return self.drop(self.fc2(F.gelu(self.fc1(a) + self.bias))) + x


def bias_gelu(x, bias):
    return F.gelu(x + bias)


@pytest.fixture
def gm() -> fx.GraphModule:
    torch.manual_seed(0)
    return fx.symbolic_trace(Block().eval())


def find(gm: fx.GraphModule, pattern: Callable[..., Any]) -> list[list[fx.Node]]:
    return find_subgraphs(gm.graph, gm.get_submodule, pattern)


# --- vertical ---


def test_shared_module_stays_until_its_last_call():
    model = make(lambda self, x: self.fc(self.fc(x)) + self.fc.bias, fc=nn.Linear(2, 2))
    gm = fx.symbolic_trace(model)
    first, second = find_by_name(gm.graph, "fc")
    replace_vertical(gm, first, nn.Identity())
    assert hasattr(gm, "fc")
    replace_vertical(gm, second, nn.Identity())
    assert hasattr(gm, "fc")  # its bias is still read
    (match,) = find(gm, lambda a, b: a + b)
    reads = [n for n in gm.graph.nodes if n.op == "get_attr"]
    replace_vertical(gm, [*reads, *match], nn.Identity())
    assert park_unused(gm, ["fc"]) == ["fc"]
    assert not hasattr(gm, "fc")


def test_modules_within_called_modules_stay():
    block = nn.Sequential(nn.Linear(2, 2))
    gm = leaves_of(make(lambda self, x: self.block(self.block[0](x)), block=block))
    replace_vertical(gm, find_by_name(gm.graph, r"block\.0")[0], nn.Identity())
    assert gm.get_submodule("block.0")
    gm(torch.ones(1, 2))


def test_use_counts_survive_other_edits_and_copies(gm):
    replace_vertical(gm, find_by_name(gm.graph, "query")[0], nn.Identity())
    (key,) = find_by_name(gm.graph, "key")[0]
    with gm.graph.inserting_after(key):
        again = gm.graph.call_module("value", (key,))
    key.replace_all_uses_with(again, lambda user: user is not again)
    other = copy.deepcopy(gm)
    for module in (gm, other):
        first, second = find_by_name(module.graph, "value")
        replace_vertical(module, first, nn.Identity())
        assert hasattr(module, "value")
        replace_vertical(module, second, nn.Identity())
        assert not hasattr(module, "value")
    gm.graph = fx.symbolic_trace(lambda x: x.exp()).graph
    (match,) = find(gm, lambda a: a.exp())
    replace_vertical(gm, match, nn.Identity())
    assert gm(torch.ones(1)) == 1


def test_vertical_with_concrete_args(gm):
    def general(approximate, x, bias, scale=1.0, *, flag):
        assert flag
        return F.gelu((x + bias) * scale, approximate=approximate)

    x = torch.randn(BATCH, SEQ, SIZE)
    expected = gm(x)
    (match,) = find(gm, lambda a, b: F.gelu(a + b))
    call = replace_vertical(gm, match, general, concrete_args={"approximate": "none", "flag": True})
    assert call.args == ()
    assert torch.equal(gm(x), expected)


def test_vertical_by_a_function_of_any_number_of_arguments(gm):
    x = torch.randn(BATCH, SEQ, SIZE)
    expected = gm(x)
    (match,) = find(gm, lambda a, b: F.gelu(a + b))
    call = replace_vertical(gm, match, lambda *args: bias_gelu(*args))
    assert [str(v) for v in call.args] == ["fc1", "bias"]
    assert torch.equal(gm(x), expected)


def split_heads(x, fc, heads):
    return fc(x).view(x.size(0), x.shape[1], heads, -1).transpose(1, 2)


class Heads(Block):
    def forward(self, x):
        parts = (self.query, self.key, self.value)
        return torch.stack([split_heads(x, part, 2) for part in parts])


class QkvHeads(nn.Module):
    """Splits into heads itself, and knows the sizes itself."""

    def __init__(self, *parts: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return tuple(split_heads(x, part, 2) for part in self.parts)


def test_sizes_are_given_only_where_they_are_taken():
    def pattern(x):
        return call_module("query|key|value", x).view(1).transpose(1, 2)

    model = Heads()
    x = torch.randn(BATCH, SEQ, SIZE)
    expected = model(x)
    gm = fx.symbolic_trace(model)
    matches = find(gm, pattern)
    replace_horizontal(gm, matches, QkvHeads(gm.query, gm.key, gm.value))
    gm.graph.lint()
    assert torch.equal(gm(x), expected)
    assert not [n for n in gm.graph.nodes if n.target == "size"]

    # A size that others share is an input, which a replacement may take or not.
    shared = fx.symbolic_trace(_sizes_shared)
    matches = find(shared, lambda x: x.exp().view(1))
    taking = replace_vertical(shared, matches[0], lambda x, n: x.exp().view(n, -1))
    leaving = replace_vertical(shared, matches[1], lambda x: x.exp().view(x.size(0), -1))
    assert [len(call.args) for call in (taking, leaving)] == [2, 1]
    shared.graph.lint()
    assert torch.equal(shared(x), _sizes_shared(x))


def _sizes_shared(x):
    n = x.size(0)
    return x.exp().view(n, -1) - x.exp().view(n, -1) * 3


@pytest.mark.parametrize(
    ("new", "concrete", "message"),
    [
        (lambda x: x, {}, r"takes 1 required arguments \(x\).*2 inputs \(fc1, bias\)"),
        (lambda x, b, c: x, {}, r"takes 3 required arguments \(x, b, c\).*2 inputs"),
        (lambda x, b, *, k: x, {}, "keyword argument 'k'"),
        (lambda x, b: x, {"z": 1}, "no parameter 'z'"),
        (nn.GELU(), {}, r"module GELU takes 1 required arguments \(input\)"),
    ],
)
def test_misfits_change_nothing(gm, new, concrete, message):
    (match,) = find(gm, lambda a, b: F.gelu(a + b))
    before = (str(gm.graph), list(gm.state_dict()))
    with pytest.raises(ValueError, match=message):
        replace_vertical(gm, match, new, concrete_args=concrete)
    assert (str(gm.graph), list(gm.state_dict())) == before


# --- horizontal ---


def test_horizontal_stands_after_its_inputs_and_before_its_uses():
    def ok(x, y):
        a = x.exp()
        z = y.sin()
        b = x * z
        return a * 2, (x + z), b

    gm = fx.symbolic_trace(ok)
    nodes = {n.name: n for n in gm.graph.nodes}
    replace_horizontal(gm, [[nodes["add"]], [nodes["mul"]]], lambda x, z: (x + z, x * z))
    gm.graph.lint()
    assert [float(v) for v in gm(torch.zeros(()), torch.zeros(()))] == [2, 0, 0]


def test_horizontal_refusals():
    gm = fx.symbolic_trace(lambda x, y: x.exp() + y.exp() + x.exp().relu())
    first, second, third = find(gm, lambda a: a.exp())
    relu = find(gm, lambda a: a.relu())
    new = lambda *args: args  # noqa: E731
    with pytest.raises(ValueError, match=r"different inputs: \[x\] and \[y\]"):
        replace_horizontal(gm, [first, second], new)
    with pytest.raises(ValueError, match="subgraph 0 feeds subgraph 1"):
        replace_horizontal(gm, [third, *relu], new)
    with pytest.raises(ValueError, match="is in several of the subgraphs"):
        replace_horizontal(gm, [first, first], new)
    with pytest.raises(ValueError, match="no subgraph"):
        replace_horizontal(gm, [], new)
    with pytest.raises(ValueError, match="takes 2 required"):
        replace_horizontal(gm, [first, third], lambda a, b: a)


# --- one node ---


def test_node_by_function_keeps_arguments_and_drops_the_module(gm):
    def linear(x, factor=1):
        return torch.zeros(BATCH, SEQ, SIZE) * factor

    new = replace_node(gm, find_by_name(gm.graph, "query")[0][0], linear, {"factor": 2})
    assert dict(new.kwargs) == {"factor": 2}
    assert not hasattr(gm, "query")
    with pytest.raises(ValueError, match="does not take the arguments of the node"):
        replace_node(gm, new, lambda: 0)
    with pytest.raises(ValueError, match="placeholder"):
        replace_node(gm, next(iter(gm.graph.nodes)), linear)


# --- extraction ---


# --- extraction ---


def test_extract_nested_paths():
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, (nn.Linear, nn.Dropout))

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), nn.Linear(2, 2))
    gm = fx.GraphModule(model, Tracer().trace(model))
    chain = find_by_name(gm.graph, r"0\.0")[0] + find_by_name(gm.graph, r"0\.1")[0]
    part, paths = extract(gm, chain, "P")
    assert list(part.state_dict()) == ["0.0.weight", "0.0.bias"]
    assert part.get_submodule("0.0") is model[0][0]
    assert paths == {"0.0": "0.0", "0.1": "1"}


# --- cost ---


def chain(number: int) -> fx.GraphModule:
    def code(x, b):
        for _ in range(number):
            x = F.gelu(x + b) * 2
        return x

    return fx.symbolic_trace(code)


class FcGelu(nn.Module):
    def __init__(self, fc: nn.Linear) -> None:
        super().__init__()
        self.fc = fc

    def forward(self, x, bias):
        return F.gelu(self.fc(x) + bias)


def test_a_rewrite_never_walks_the_graph(monkeypatch):
    gm = chain(50)
    matches = find(gm, lambda a, b: F.gelu(a + b))
    monkeypatch.setattr(gm, "recompile", lambda: None)
    replace_vertical(gm, matches[0], bias_gelu)  # counts the uses once

    def walk(self):
        raise AssertionError("walked the graph")

    monkeypatch.setattr(type(gm.graph.nodes), "__iter__", walk)
    for match in matches[1:25]:
        replace_vertical(gm, match, bias_gelu)
    for match in matches[25:]:
        replace_vertical(gm, match, FcGelu(nn.Linear(1, 1)))
    monkeypatch.undo()
    gm.graph.lint()
    assert [str(n.target) for n in gm.graph.nodes if n.op == "call_module"][-1] == "FcGelu_24"
