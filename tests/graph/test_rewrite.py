"""Rewrites keep numbers and gradients, or change nothing and say why."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo.graph.fuse.extract import extract
from slapo.graph.match.pattern import call_module
from slapo.graph.match.search import find_by_name, find_subgraphs
from slapo.graph.rewrite.bookkeeping import drop_unused, first_free_name, graphs_of
from slapo.graph.rewrite.plan import apply
from slapo.graph.rewrite.replace import (
    plan_horizontal,
    plan_vertical,
    replace_horizontal,
    replace_node_by_function,
    replace_vertical,
)
from slapo.graph.rewrite.subgraph import check_closed, subgraph_inputs

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


class Qkv(nn.Module):
    def __init__(self, *parts: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return tuple(part(x) for part in self.parts)


def bias_gelu(x, bias):
    return F.gelu(x + bias)


@pytest.fixture
def gm() -> fx.GraphModule:
    torch.manual_seed(0)
    return fx.symbolic_trace(Block().eval())


def find(gm: fx.GraphModule, pattern: Callable[..., Any]) -> list[list[fx.Node]]:
    return find_subgraphs(gm.graph, gm.get_submodule, pattern)


def numbers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Output and gradients; parameters are told apart by their memory, as names may change."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, SEQ, SIZE, requires_grad=True)
    module.zero_grad()
    out = module(x)
    out.square().sum().backward()
    grads = {f"{p.data_ptr()}": p.grad for p in module.parameters()}
    return {"out": out, "x": x.grad, **grads}


def assert_same(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    actual = numbers(module)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0)


# --- vertical ---


def test_vertical_by_a_function(gm):
    expected = numbers(gm)
    (match,) = find(gm, lambda a, b: F.gelu(a + b))
    call = replace_vertical(gm, match, bias_gelu)
    gm.graph.lint()
    assert call.op == "call_function"
    assert [str(v) for v in call.args] == ["fc1", "bias"]
    assert_same(gm, expected)
    assert bias_gelu in [n.target for n in gm.graph.nodes]


class FcGelu(nn.Module):
    def __init__(self, fc: nn.Linear) -> None:
        super().__init__()
        self.fc = fc

    def forward(self, x, bias):
        return F.gelu(self.fc(x) + bias)


def test_vertical_by_a_module_takes_the_old_modules_away(gm):
    expected, keys = numbers(gm), set(gm.state_dict())
    (match,) = find(gm, lambda a, b: F.gelu(call_module("fc1", a) + b))
    call = replace_vertical(gm, match, FcGelu(gm.fc1))
    assert (call.op, call.target) == ("call_module", "FcGelu_0")
    assert not hasattr(gm, "fc1")
    assert set(gm.state_dict()) == keys - {"fc1.weight"} | {"FcGelu_0.fc.weight"}
    gm.graph.lint()
    assert_same(gm, expected)


def test_vertical_names(gm):
    matches = find_by_name(gm.graph, "query|key|value")
    names = [replace_vertical(gm, m, nn.Identity(), name="New").target for m in matches]
    assert names == ["New_0", "New_1", "New_2"]
    (match,) = find_by_name(gm.graph, "New_1")
    assert replace_vertical(gm, match, nn.Identity(), name="New").target == "New_3"
    assert first_free_name(gm, "New") == "New_1"


def test_shared_module_stays_until_its_last_call():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return self.fc(self.fc(x)) + self.fc.bias

    gm = fx.symbolic_trace(Twice())
    first, second = find_by_name(gm.graph, "fc")
    replace_vertical(gm, first, nn.Identity())
    assert hasattr(gm, "fc")
    replace_vertical(gm, second, nn.Identity())
    assert hasattr(gm, "fc")  # its bias is still read
    (match,) = find(gm, lambda a, b: a + b)
    reads = [n for n in gm.graph.nodes if n.op == "get_attr"]
    replace_vertical(gm, [*reads, *match], nn.Identity())
    assert drop_unused(gm, ["fc"]) == ["fc"]
    assert not hasattr(gm, "fc")


def test_modules_within_called_modules_stay():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(2, 2))

        def forward(self, x):
            return self.block(self.block[0](x))

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, name):
            return True

    model = Model()
    gm = fx.GraphModule(model, Tracer().trace(model))
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

    expected = numbers(gm)
    (match,) = find(gm, lambda a, b: F.gelu(a + b))
    call = replace_vertical(gm, match, general, concrete_args={"approximate": "none", "flag": True})
    assert call.args == ()
    assert_same(gm, expected)


def test_vertical_by_a_callable_that_takes_anything(gm):
    expected = numbers(gm)
    (match,) = find(gm, lambda a, b: F.gelu(a + b))
    replace_vertical(gm, match, lambda *args: bias_gelu(*args))
    assert_same(gm, expected)


def test_vertical_by_a_builtin(gm):
    (match,) = find(gm, lambda a, b: F.gelu(a + b))
    assert replace_vertical(gm, match, torch.add).target is torch.add


def test_training_flag_is_given_only_where_it_is_taken():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    flag = graph.create_node("get_attr", "training")
    total = graph.call_function(torch.add, (x, y))
    graph.output(graph.call_function(F.dropout, (total,), {"p": 0.5, "training": flag}))

    def calls(new):
        gm = fx.GraphModule(nn.Module(), copy.deepcopy(graph))
        (match,) = find(gm, lambda a, b: F.dropout(a + b))
        return [str(v) for v in replace_vertical(gm, match, new).args]

    assert calls(lambda a, b, training: a) == ["x", "y", "training"]
    assert calls(lambda a, b: a) == ["x", "y"]


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


def test_open_subgraphs_are_refused():
    gm = fx.symbolic_trace(_leaky)
    (match,) = find(gm, lambda a: a.exp().relu())
    with pytest.raises(ValueError, match=r"'exp' of the subgraph is also used outside, by 'add'"):
        check_closed(match)
    with pytest.raises(ValueError, match="used outside"):
        replace_vertical(gm, match, torch.relu)


def _leaky(x):
    h = x.exp()
    return h.relu() + h


def test_stale_foreign_and_wrong_nodes(gm):
    (match,) = find(gm, lambda a, b: F.gelu(a + b))
    replace_vertical(gm, match, bias_gelu)
    with pytest.raises(ValueError, match=r"no longer.*find\(\) again"):
        replace_vertical(gm, match, bias_gelu)
    other = find_by_name(fx.symbolic_trace(Block()).graph, "fc1")[0]
    with pytest.raises(ValueError, match="not"):
        replace_vertical(gm, other, nn.Identity())
    with pytest.raises(ValueError, match="empty"):
        replace_vertical(gm, [], nn.Identity())
    with pytest.raises(ValueError, match="placeholder"):
        replace_vertical(gm, [next(iter(gm.graph.nodes))], nn.Identity())
    with pytest.raises(TypeError, match="graph nodes"):
        replace_vertical(gm, ["fc1"], nn.Identity())
    with pytest.raises(ValueError, match="cannot name a submodule"):
        replace_vertical(gm, find_by_name(gm.graph, "fc1")[0], nn.Identity(), name="a.b")
    with pytest.raises(TypeError, match="must be a module or a function"):
        replace_vertical(gm, find_by_name(gm.graph, "fc1")[0], 3)


def test_reading_is_not_moved_across_a_write():
    def code(x, y):
        h = x.exp()
        z = h * y
        y.add_(1)
        return z.relu()

    gm = fx.symbolic_trace(code)
    (match,) = find(gm, lambda a, b: (a * b).relu())
    with pytest.raises(ValueError, match=r"'mul' would move past 'add_'.*'add_' changes in place"):
        replace_vertical(gm, match, lambda a, b: (a * b).relu())


def test_inputs_are_in_order_of_first_use():
    gm = fx.symbolic_trace(lambda a, b, c: c * b + a * c)
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert [n.name for n in subgraph_inputs(reversed(nodes))] == ["c", "b", "a"]


# --- horizontal ---


def test_horizontal(gm):
    expected = numbers(gm)
    matches = find_by_name(gm.graph, "query|key|value")
    qkv = Qkv(gm.query, gm.key, gm.value)
    call = replace_horizontal(gm, matches, qkv, name="FusedQKV")
    gm.graph.lint()
    assert call.target == "FusedQKV_0"
    assert [user.args[1] for user in call.users] == [0, 1, 2]
    assert not hasattr(gm, "query")
    assert_same(gm, expected)


def test_horizontal_of_chains_with_concrete_args():
    def code(x, y):
        a = (x + y).relu()
        unrelated = y.sin()
        b = (y * x).exp()
        return a - b + unrelated

    gm = fx.symbolic_trace(code)
    subgraphs = [*find(gm, lambda a, b: (a + b).relu()), *find(gm, lambda a, b: (a * b).exp())]
    gm_inputs = torch.randn(2, 3)
    expected = gm(*gm_inputs)

    def both(x, y, scale):
        return (x + y).relu() * scale, (y * x).exp()

    replace_horizontal(gm, subgraphs, both, concrete_args={"scale": 1.0})
    gm.graph.lint()
    torch.testing.assert_close(gm(*gm_inputs), expected, rtol=0, atol=0)


def test_horizontal_stands_after_its_inputs_and_before_its_uses():
    def late(x, y):
        a = x.exp()
        z = y.sin()
        b = x.cos() * z
        return a * z + b

    gm = fx.symbolic_trace(late)
    nodes = {n.name: n for n in gm.graph.nodes}
    subgraphs = [[nodes["mul_1"]], [nodes["mul"]]]
    with pytest.raises(ValueError, match="different inputs"):
        replace_horizontal(gm, subgraphs, lambda *a: a)

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
    with pytest.raises(ValueError, match="part of several"):
        replace_horizontal(gm, [first, first], new)
    with pytest.raises(ValueError, match="no subgraph"):
        replace_horizontal(gm, [], new)
    with pytest.raises(ValueError, match="takes 2 required"):
        replace_horizontal(gm, [first, third], lambda a, b: a)


# --- one node ---


def test_node_by_function(gm):
    expected = numbers(gm)
    node = next(n for n in gm.graph.nodes if n.target is F.gelu)
    new = replace_node_by_function(gm, node, lambda x, approximate="none": F.gelu(x))
    assert new.op == "call_function"
    assert_same(gm, expected)


def test_node_by_function_keeps_arguments_and_drops_the_module(gm):
    def linear(x, factor=1):
        return torch.zeros(BATCH, SEQ, SIZE) * factor

    new = replace_node_by_function(gm, find_by_name(gm.graph, "query")[0][0], linear, {"factor": 2})
    assert dict(new.kwargs) == {"factor": 2}
    assert not hasattr(gm, "query")
    with pytest.raises(ValueError, match="does not take the arguments of the node"):
        replace_node_by_function(gm, new, lambda: 0)
    with pytest.raises(ValueError, match="placeholder"):
        replace_node_by_function(gm, next(iter(gm.graph.nodes)), linear)


# --- several graphs of one module ---


class Masked(nn.Module):
    """Attention scores with a mask or without, then an MLP: two graphs over one state."""

    def __init__(self, mask: bool = True) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.fc1, self.fc2 = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.bias = nn.Parameter(torch.randn(SIZE))
        self.mask = mask

    def forward(self, x, mask):
        h = self.query(x) * self.key(x)
        if self.mask:
            h = torch.minimum(h, mask)
        return self.tail(F.gelu(self.fc1(h) + self.bias), x)

    def tail(self, h, x):
        return self.fc2(h) + x


class MaskedLeaky(Masked):
    def tail(self, h, x):
        fc1 = self.fc1(x)
        return self.fc2(h) + x + fc1


STATE = ("_parameters", "_buffers", "_modules")


def variants(*models: nn.Module) -> tuple[fx.GraphModule, ...]:
    """Graphs over the state of the first; operations of one name are twins."""
    graphs = tuple(fx.symbolic_trace(model) for model in models)
    for gm in graphs:
        for slot in STATE:
            gm.__dict__[slot] = graphs[0].__dict__[slot]
        gm.graphs = (gm, *(other for other in graphs if other is not gm))
    numbers_of_names: dict[str, int] = {}
    for gm in graphs:
        for node in gm.graph.nodes:
            if node.op != "placeholder":
                number = numbers_of_names.setdefault(node.name, len(numbers_of_names))
                node.meta["slapo_twin"] = number
    return graphs


def texts(graphs: tuple[fx.GraphModule, ...]) -> list[str]:
    return [str(gm.graph) for gm in graphs]


def outputs(graphs: tuple[fx.GraphModule, ...]) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x, mask = torch.randn(BATCH, SIZE), torch.randn(BATCH, SIZE)
    for gm in graphs:
        gm.graph.lint()
    return [gm(x, mask) for gm in graphs]


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.find_nodes(op="call_module")]


def named(gm: fx.GraphModule, names: str) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.name in names.split()]


def add_gelu(gm: fx.GraphModule) -> list[fx.Node]:
    (match,) = find(gm, lambda a, b: F.gelu(call_module("fc1", a) + b))
    return match


def test_a_vertical_rewrite_is_made_in_all_graphs():
    graphs = variants(Masked(), Masked(False))
    expected, keys = outputs(graphs), set(graphs[0].state_dict())
    new = FcGelu(graphs[0].fc1)
    call = replace_vertical(graphs[0], add_gelu(graphs[0]), new)
    assert [targets(gm)[2:] for gm in graphs] == [["FcGelu_0", "fc2"]] * 2
    assert graphs[1].get_submodule("FcGelu_0") is new
    assert set(graphs[1].state_dict()) == keys - {"fc1.weight", "fc1.bias"} | {
        "FcGelu_0.fc.weight",
        "FcGelu_0.fc.bias",
    }
    torch.testing.assert_close(outputs(graphs), expected, rtol=0, atol=0)
    # The new calls are twins, and may be part of the next rewrite.
    (fc2,) = find_by_name(graphs[0].graph, "fc2")[0]
    whole = fx.symbolic_trace(nn.Sequential(graphs[0].fc2))
    replace_vertical(graphs[0], [call, fc2], OnTop(new, whole))
    assert [targets(gm) for gm in graphs] == [["query", "key", "OnTop_0"]] * 2
    torch.testing.assert_close(outputs(graphs), expected, rtol=0, atol=0)


class OnTop(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, *inputs):
        return self.second(self.first(*inputs))


def test_a_plan_changes_nothing():
    graphs = variants(Masked(), Masked(False))
    before, keys = texts(graphs), list(graphs[0].state_dict())
    plans = plan_vertical(graphs[0], add_gelu(graphs[0]), FcGelu(graphs[0].fc1))
    assert [plan.gm for plan in plans] == list(graphs)
    assert (texts(graphs), list(graphs[0].state_dict())) == (before, keys)
    plans = plan_horizontal(graphs[0], find_by_name(graphs[0].graph, "query|key"), Qkv())
    assert [len(plan.chains) for plan in plans] == [2, 2]
    assert (texts(graphs), list(graphs[0].state_dict())) == (before, keys)
    apply(plans)
    assert [targets(gm)[0] for gm in graphs] == ["Qkv_0", "Qkv_0"]


def test_a_horizontal_rewrite_is_made_in_all_graphs():
    graphs = variants(Masked(), Masked(False))
    expected = outputs(graphs)
    matches = find_by_name(graphs[0].graph, "query|key")
    call = replace_horizontal(graphs[0], matches, Qkv(graphs[0].query, graphs[0].key), name="QK")
    assert [targets(gm)[0] for gm in graphs] == ["QK_0", "QK_0"]
    assert not hasattr(graphs[1], "query")
    torch.testing.assert_close(outputs(graphs), expected, rtol=0, atol=0)
    numbers_of = [[n.meta.get("slapo_twin") for n in gm.graph.nodes] for gm in graphs]
    assert all(
        len(set(row) - {None}) == len([n for n in row if n is not None]) for row in numbers_of
    )
    chain = [call, *named(graphs[0], "result_at result_at_1 mul")]
    product = Product(graphs[0].get_submodule("QK_0"))
    replace_vertical(graphs[0], chain, product)
    assert [targets(gm)[0] for gm in graphs] == ["Product_0", "Product_0"]
    torch.testing.assert_close(outputs(graphs), expected, rtol=0, atol=0)


class Product(nn.Module):
    def __init__(self, parts: nn.Module) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x):
        query, key = self.parts(x)
        return query * key


def test_a_node_is_replaced_in_all_graphs():
    graphs = variants(Masked(), Masked(False))
    (node,) = named(graphs[0], "gelu")
    replace_node_by_function(graphs[0], node, torch.tanh)
    assert all(gm.graph.find_nodes(op="call_function", target=torch.tanh) for gm in graphs)


class Constant(Masked):
    def tail(self, h, x):
        return F.gelu(self.fc2(h) + x, approximate="none" if self.mask else "tanh")


class Swapped(Masked):
    def tail(self, h, x):
        return torch.sub(h, x) if self.mask else torch.sub(x, h)


class Merged(Masked):
    def tail(self, h, x):
        return torch.maximum(h * 2, x if self.mask else h) + h


class Opened(Masked):
    def tail(self, h, x):
        y = torch.sin(h)
        return torch.cos(y) if self.mask else torch.cos(y) + y


class Drawn(Masked):
    def tail(self, h, x):
        y = F.dropout(h)
        if not self.mask:
            x = F.dropout(x)
        return torch.cos(y) + x


class Fewer(Masked):
    def tail(self, h, x):
        return torch.cos(torch.sin(h)) if self.mask else torch.cos(h)


DIFFERING = [
    (Constant, "gelu_1", r"gelu_1 has the arguments.*'none'.*'tanh'"),
    (Merged, "mul_1 maximum", r"maximum has the arguments"),
    (Opened, "sin cos", r"'sin' of the subgraph is also used outside, by 'add_1'"),
    (Drawn, "dropout cos", r"'dropout' would move past 'dropout_1'"),
    (Fewer, "sin cos", r"it has no sin"),
]


@pytest.mark.parametrize(
    ("kind", "names", "reason"), DIFFERING, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_graph_that_differs_keeps_its_own_operations(kind, names, reason, caplog):
    graphs = variants(kind(), kind(False))
    other = str(graphs[1].graph)
    with caplog.at_level("INFO", "slapo"):
        replace_vertical(graphs[0], named(graphs[0], names), lambda *args: args[0])
    assert re.search(f"keeps its own {', '.join(names.split())}: .*{reason}", caplog.messages[-1])
    assert str(graphs[1].graph) == other
    assert "lambda" in str(graphs[0].graph)


def test_operations_with_other_inputs_in_the_same_places_are_twins():
    graphs = variants(Swapped(), Swapped(False))
    replace_vertical(graphs[0], named(graphs[0], "sub"), lambda a, b: a - b)
    assert [
        [str(v) for v in next(reversed(list(gm.graph.nodes))).args[0].args] for gm in graphs
    ] == [
        ["gelu", "x"],
        ["x", "gelu"],
    ]


def test_a_graph_without_the_operations_is_left_alone(caplog):
    graphs = variants(Masked(), Masked(False))
    with caplog.at_level("INFO", "slapo"):
        replace_vertical(graphs[0], named(graphs[0], "minimum"), torch.sub)
    assert caplog.messages == []
    assert "sub" not in graphs[1].code


def test_a_module_stays_while_any_graph_needs_it(caplog):
    graphs = variants(Masked(), MaskedLeaky(False))
    expected = outputs(graphs)
    replace_vertical(graphs[0], add_gelu(graphs[0]), FcGelu(graphs[0].fc1))
    assert [targets(gm)[2:] for gm in graphs] == [["FcGelu_0", "fc2"], ["FcGelu_0", "fc1", "fc2"]]
    assert drop_unused(graphs[0], ["fc1", "fc2", "FcGelu_0"]) == []
    torch.testing.assert_close(outputs(graphs), expected, rtol=0, atol=0)
    (fc1,) = named(graphs[1], "fc1_1")
    replace_vertical(graphs[1], [fc1], nn.Identity())
    assert not hasattr(graphs[0], "fc1")


def test_different_modules_under_one_path_are_no_twins(caplog):
    graphs = variants(Masked(), Masked(False))
    graphs[1].__dict__["_modules"] = {**graphs[0]._modules, "fc2": nn.Linear(SIZE, SIZE)}
    with caplog.at_level("INFO", "slapo"):
        replace_vertical(graphs[0], named(graphs[0], "fc2"), nn.Identity())
    assert "fc2 calls fc2, and fc2 there" in caplog.messages[-1]
    assert targets(graphs[1])[-1] == "fc2"


def test_what_users_call_graphs_is_no_business_of_ours():
    gm = fx.symbolic_trace(Masked())
    for value in ("text", (), (nn.Identity(), gm), [gm]):
        gm.graphs = value
        assert graphs_of(gm) == (gm,)


# --- extraction ---


def test_extract_shares_state_under_the_same_names(gm):
    match = [n for n in gm.graph.nodes if n.name in ("fc1", "bias", "add", "gelu", "fc2", "drop")]
    part = extract(gm, match, "Part")
    assert set(part.state_dict()) == {"fc1.weight", "bias", "fc2.weight", "fc2.bias"}
    assert part.bias is gm.bias
    assert part.fc1 is gm.fc1
    assert type(part).__name__ == "Part"
    x = torch.randn(BATCH, SEQ, SIZE)
    expected = gm.fc2(F.gelu(gm.fc1(x) + gm.bias))
    torch.testing.assert_close(part(x), expected, rtol=0, atol=0)
    pickle.loads(pickle.dumps(part))


def test_extract_keeps_buffers_unsaved(gm):
    gm._non_persistent_buffers_set.add("scale")  # as it was before fx copied it
    match = [n for n in gm.graph.nodes if n.name in ("scale", "mul")]
    part = extract(gm, match, "Part")
    assert list(part.state_dict()) == []
    assert part.scale is gm.scale


def test_extract_of_an_open_subgraph_returns_all_it_must():
    gm = fx.symbolic_trace(_leaky)
    part = extract(gm, find(gm, lambda a: a.exp().relu())[0], "Part")
    assert len(part(torch.ones(1))) == 2


def test_extract_nested_paths():
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, (nn.Linear, nn.Dropout))

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), nn.Linear(2, 2))
    gm = fx.GraphModule(model, Tracer().trace(model))
    part = extract(gm, find_by_name(gm.graph, r"0\.")[0] + find_by_name(gm.graph, r"0\.1")[0], "P")
    assert list(part.state_dict()) == ["0.0.weight", "0.0.bias"]
    assert part.get_submodule("0.0") is model[0][0]


# --- cost ---


def chain(number: int) -> fx.GraphModule:
    def code(x, b):
        for _ in range(number):
            x = F.gelu(x + b) * 2
        return x

    return fx.symbolic_trace(code)


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
