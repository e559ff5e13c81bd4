"""Patterns are found along the data flow, in every spelling, and nothing else is found."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo.graph.match import search
from slapo.graph.match.pattern import ModulePattern, Pattern, call_module, trace_pattern
from slapo.graph.match.search import find_by_name, find_subgraphs
from tests.graph.rewrites import Calls, layers
from tests.graph.served import make


def graph_module(code: Any) -> fx.GraphModule:
    return fx.symbolic_trace(code)


def found(code: Any, pattern: Any) -> list[list[str]]:
    """Names of the matched nodes."""
    gm = graph_module(code)
    matches = find_subgraphs(gm.graph, gm.get_submodule, pattern)
    return [[node.name for node in nodes] for nodes in matches]


# --- equivalent spellings ---

SPELLINGS = {
    "gelu": [F.gelu, torch.nn.functional.gelu, nn.GELU()],
    "gelu_tanh": [lambda x: F.gelu(x, approximate="tanh"), nn.GELU("tanh")],
    "relu": [F.relu, torch.relu, lambda x: x.relu(), nn.ReLU()],
    "tanh": [F.tanh, torch.tanh, lambda x: x.tanh(), nn.Tanh()],
    "sigmoid": [F.sigmoid, torch.sigmoid, lambda x: x.sigmoid(), nn.Sigmoid()],
    "silu": [F.silu, nn.SiLU()],
    "leaky_relu": [lambda x: F.leaky_relu(x, 0.2), nn.LeakyReLU(0.2)],
    "softmax": [
        lambda x: F.softmax(x, dim=-1),
        lambda x: torch.softmax(x, -1),
        lambda x: x.softmax(-1),
        nn.Softmax(dim=-1),
    ],
    "expand": [lambda x: x.expand(2, -1), lambda x: x.expand((2, -1))],
    "dropout": [F.dropout, nn.Dropout(0.1), nn.Dropout(0.3)],
    "layer_norm": [
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.layer_norm(x, [4]),
        nn.LayerNorm(4, elementwise_affine=False),
    ],
    "reshape": [
        lambda x: x.view(-1, 4),
        lambda x: x.view(size=(-1, 4)),
        lambda x: x.reshape((-1, 4)),
        lambda x: torch.reshape(x, [-1, 4]),
    ],
    "permute": [
        lambda x: x.permute(1, 0),
        lambda x: x.permute((1, 0)),
        lambda x: torch.permute(x, (1, 0)),
    ],
    "transpose": [lambda x: x.transpose(0, 1), lambda x: torch.transpose(x, dim0=1, dim1=0)],
    "mean": [lambda x: x.mean(-1, keepdim=True), lambda x: torch.mean(x, dim=-1, keepdim=True)],
    "flatten": [lambda x: x.flatten(1), lambda x: torch.flatten(x, 1), nn.Flatten()],
    "generic": [lambda x: torch.cumsum(x, 0), lambda x: x.cumsum(0)],
}
PAIRS = [
    pytest.param(one, other, id=f"{name}-{i}{j}")
    for name, spellings in SPELLINGS.items()
    for i, one in enumerate(spellings)
    for j, other in enumerate(spellings)
]


def as_pattern(code: Any) -> Any:
    return Calls(code) if isinstance(code, nn.Module) else lambda x: code(x)


@pytest.mark.parametrize(("written", "wanted"), PAIRS)
def test_all_spellings_match(written, wanted):
    assert len(found(as_pattern(written), as_pattern(wanted))) == 1


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (nn.GELU("tanh"), lambda x: F.gelu(x, approximate="none")),
        (nn.GELU("tanh"), nn.GELU()),
        (F.gelu, nn.GELU("tanh")),
        (lambda x: F.gelu(x, approximate="tanh"), F.gelu),
        (nn.Softmax(dim=1), lambda x: F.softmax(x, dim=-1)),
        (nn.LayerNorm(4, eps=1e-12), lambda x: F.layer_norm(x, (4,), eps=1e-6)),
        (nn.LayerNorm(4), nn.LayerNorm(4, elementwise_affine=False)),
        (lambda x: F.layer_norm(x, (4,)), lambda x: F.layer_norm(x, (8,))),
        (lambda x: F.layer_norm(x, (4,), eps=1e-3), lambda x: F.layer_norm(x, (4,))),
        (lambda x: x.view(torch.int32), lambda x: x.view(-1)),
        (lambda x: x.view(-1), lambda x: x.view(2, -1)),
        (lambda x: x.view(2, -1), lambda x: x.reshape((2, 4))),
        (lambda x: torch.reshape(x, (4,)), lambda x: x.view(2, 2)),
        (lambda x: x.expand(2, -1), lambda x: x.expand(3, -1)),
        (lambda x: x.permute(1, 0), lambda x: x.permute(0, 1)),
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x + 1, lambda x: x + True),
        (nn.ReLU(), nn.ReLU6()),
        (nn.MaxPool1d(2), nn.MaxPool1d(3)),
        (nn.LeakyReLU(0.2), lambda x: F.leaky_relu(x, 0.3)),
        (nn.Dropout(0.1), lambda x: F.dropout(x, training=False)),
        (nn.Dropout(0.1), lambda x: F.dropout(x, 0.2)),
        (lambda x: F.dropout(x, 0.1), lambda x: F.dropout(x, 0.2)),
        (lambda x: F.dropout(x), lambda x: F.dropout(x, training=False)),
        (lambda x: torch.add(x, x, alpha=2), lambda x: x + x),
        (lambda x: x.sum(-1), lambda x: x.sum(-1, keepdim=True)),
    ],
)
def test_other_settings_do_not_match(written, wanted):
    assert found(as_pattern(written), as_pattern(wanted)) == []


@pytest.mark.parametrize(
    "written",
    [
        lambda x, y: x + y,
        lambda x, y: torch.add(x, y),
        lambda x, y: torch.add(input=x, other=y),
        lambda x, y: x.add(y),
        lambda x, y: operator.iadd(x.exp(), y),
        lambda x, y: x.exp().add_(y),
    ],
)
def test_sums_match_a_sum(written):
    assert len(found(written, lambda a, b: a + b)) == 1


def test_matmul_spellings_but_not_bmm():
    def as_function(x, y):
        return torch.matmul(x, y)

    for written in (as_function, lambda x, y: x @ y, lambda x, y: x.matmul(y)):
        assert len(found(written, lambda a, b: a @ b)) == 1
    assert found(lambda x, y: torch.bmm(x, y), lambda a, b: a @ b) == []


def test_in_place_sum_seen_by_others_does_not_match():
    # After `x.add_(y)` the other reader of x would see another value than after `x + y`.
    def parameter(x, y):
        return x.add_(y)

    def other_reader(x, y):
        h = x.exp()
        return h.add_(y) * h

    def other_reader_of_base(x, y):
        h = x.exp()
        return h.view(-1).add_(y).sum() + h

    def other_reader_of_what_may_be_the_same(x, y):
        h = x.exp()
        return h.contiguous().float().add_(y).sum() + h

    def after_another_write(x, y):
        return x.mul_(2).add_(y)

    cases = (
        *(parameter, other_reader, other_reader_of_base, other_reader_of_what_may_be_the_same),
        *(after_another_write, then(lambda x: x.add_(1.0))),
    )
    for written in cases:
        assert [m for m in found(written, lambda a, b: a + b) if m[0].startswith("add_")] == []
    assert len(found(parameter, lambda a, b: a.add_(b))) == 1


def test_subtraction_does_not_commute():
    assert found(lambda x: x - 1, lambda a: 1 - a) == []
    assert len(found(lambda x: 1 - x, lambda a: 1 - a)) == 1


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (nn.LayerNorm(8), lambda x: F.layer_norm(x, 1024)),
        (nn.LayerNorm(4), lambda x: F.layer_norm(x, (4,))),
        (nn.LayerNorm((2, 4), eps=1e-12), lambda x: F.layer_norm(x, (4,))),
        (nn.LayerNorm(4, bias=False), lambda x, shape, w: F.layer_norm(x, shape, w)),
        (nn.RMSNorm(4, eps=1e-6), lambda x: F.rms_norm(x, (4,))),
        (nn.GELU("tanh"), lambda x: F.gelu(x)),
        (nn.LeakyReLU(0.2), lambda x: F.leaky_relu(x)),
        (nn.Softplus(beta=2), lambda x: F.softplus(x)),
        (nn.Dropout(0.3), lambda x: F.dropout(x)),
        (nn.Linear(2, 3), lambda x, w: F.linear(x, w)),
    ],
)
def test_what_a_function_leaves_out_a_module_may_have_as_it_likes(written, wanted):
    assert found(as_pattern(written), wanted) == [["mod"]]


def then(code: Callable[[Any], Any]) -> nn.Module:
    """A function of what a module returns."""
    return make(lambda self, x: code(self.mod(x)), mod=nn.Identity())


class Function(nn.Module):
    """A module whose setting is a function, or another module."""

    def __init__(self, act: Any, p: float = 0.0) -> None:
        super().__init__()
        self.act, self.p = act, p

    def forward(self, x):
        return self.act(x) ** self.p


def test_settings_of_modules_outside_of_the_table():
    class Whole(fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, Function)

    def number(written, wanted):
        model = Calls(written)
        gm = fx.GraphModule(model, Whole().trace(model))
        return len(find_subgraphs(gm.graph, gm.get_submodule, Calls(wanted)))

    assert number(Function(F.relu), Function(F.relu)) == 1
    assert number(Function(F.relu), Function(F.gelu)) == 0
    assert number(Function(nn.GELU()), Function(nn.GELU())) == 1
    assert number(Function(nn.GELU()), Function(nn.GELU("tanh"))) == 0
    assert number(Function(nn.GELU()), Function(nn.ReLU())) == 0
    assert number(Function(F.relu, p=2.0), Function(F.relu, p=3.0)) == 0


# --- tensors that a pattern holds ---


class Holds(nn.Module):
    """Multiplies by a tensor, which may be of any kind, and adds it."""

    def __init__(self, tensor: torch.Tensor, kind: str = "buffer") -> None:
        super().__init__()
        if kind == "parameter":
            self.t = nn.Parameter(tensor)
        elif kind == "buffer":
            self.register_buffer("t", tensor)
        else:
            self.t = tensor

    def forward(self, x):
        return x * self.t


class HoldsInPattern(Holds, Pattern):
    """The same as a pattern."""


SCALES = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
@pytest.mark.parametrize("wanted", ["captured", "parameter", "buffer", "attribute"])
@pytest.mark.parametrize(
    ("tensor", "number"),
    [
        (torch.tensor([1.0, 2.0]), 1),
        (torch.tensor([1.0, 3.0]), 0),
        (torch.tensor([1.0, 2.0], dtype=torch.float64), 0),
        (torch.tensor([[1.0, 2.0]]), 0),
        (torch.tensor(1.0), 0),
        (torch.empty(2, device="meta"), 0),
    ],
)
def test_tensors_of_a_pattern_are_constants(kind, wanted, tensor, number):
    pattern = HoldsInPattern(SCALES, wanted) if wanted != "captured" else lambda x: x * SCALES
    assert len(found(Holds(tensor, kind), pattern)) == number


def test_a_captured_tensor_is_no_wildcard():
    weight = nn.Parameter(torch.ones(2))
    assert found(lambda x, y: x * y, lambda x: x * SCALES) == []
    assert found(lambda x: x * 2.0, lambda x: x * SCALES) == []
    assert len(found(Holds(torch.ones(2)), lambda x: x * weight)) == 1
    assert found(Holds(torch.zeros(2)), lambda x: x * weight) == []
    assert len(found(Holds(torch.tensor(float("nan"))), lambda x: x * torch.tensor(torch.nan))) == 1
    on_meta = torch.empty(2, device="meta")
    assert len(found(Holds(on_meta), lambda x: x * on_meta)) == 1  # the very same


def test_a_pattern_is_left_as_it_was():
    class Captures(Pattern):
        def forward(self, x):
            return x * SCALES

    pattern = Captures()
    before = dict(vars(pattern))
    assert len(found(Holds(SCALES), pattern)) == len(found(Holds(SCALES), pattern)) == 1
    assert vars(pattern) == before


def test_a_constant_used_twice():
    scales = SCALES.clone()
    assert len(found(lambda x: x * scales + scales, lambda x: x * SCALES + SCALES)) == 1
    assert found(lambda x: x * scales + 1, lambda x: x * SCALES + SCALES) == []


def test_a_constant_may_be_the_weight_of_a_module():
    linear = nn.Linear(2, 2, bias=False)
    equal, other = linear.weight.detach().clone(), torch.zeros(2, 2)
    assert len(found(Calls(linear), lambda x: F.linear(x, equal))) == 1
    assert found(Calls(linear), lambda x: F.linear(x, other)) == []


def test_weights_of_layers_in_a_pattern_are_any():
    class Split(Pattern):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x):
            return F.linear(x, self.fc.weight) + self.fc.bias

    model = make(lambda self, x: F.linear(x, self.fc.weight) + self.fc.bias, fc=nn.Linear(3, 3))
    assert len(found(model, Split)) == 1
    assert len(found(Calls(nn.LayerNorm(4)), nn.LayerNorm(4))) == 1


def test_the_same_argument_may_be_one_weight_looked_up_twice():
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    apart = nn.Sequential(one, two)
    tied = nn.Sequential(one, nn.Linear(2, 2, bias=False))
    tied[1].weight = one.weight

    def twice(x, w):
        return F.linear(F.linear(x, w), w)

    assert len(found(tied, twice)) == 1
    assert found(apart, twice) == []
    scales = SCALES.clone()  # each use of a captured tensor is a look-up of its own
    assert len(found(lambda x: x * scales + scales, lambda x, t: x * t + t)) == 1
    assert found(lambda x: x * scales + SCALES, lambda x, t: x * t + t) == []


# --- data flow ---


def test_commutative_operands_are_tried_both_ways():
    def code(x, y):
        return y + x.exp()

    assert found(code, lambda a, b: a.exp() + b) == [["exp", "add"]]
    assert found(lambda x: 2 * x.exp(), lambda a: a.exp() * 2) == [["exp", "mul"]]
    deep = found(lambda x, y, z: z * (y + x.exp()), lambda a, b, c: (torch.exp(a) + b) * c)
    assert deep == [["exp", "add", "mul"]]


def test_the_sum_must_feed_the_activation():
    def unrelated(x):
        y = x + x
        return F.gelu(x) * y

    assert found(unrelated, lambda a, b: F.gelu(a + b)) == []


def test_independent_operations_in_between_do_not_hide_a_match():
    def code(x, b):
        y = x + b
        other = torch.sin(x) * 3
        z = F.gelu(y)
        return z, other

    assert found(code, lambda a, c: F.gelu(a + c)) == [["add", "gelu"]]


def test_the_same_placeholder_is_the_same_value():
    assert len(found(lambda x: x * torch.sigmoid(x), lambda a: a * torch.sigmoid(a))) == 1
    assert found(lambda x, y: y * torch.sigmoid(x), lambda a: a * torch.sigmoid(a)) == []
    assert len(found(lambda x: (x + 2) * 2, lambda a, k: (a + k) * k)) == 1
    assert found(lambda x: (x + 2) * 3, lambda a, k: (a + k) * k) == []


def test_placeholder_binds_constants_and_containers_but_not_none():
    assert len(found(lambda x: x * 0.5, lambda a, k: a * k)) == 1
    assert len(found(lambda x, y: torch.cat([x, y], 1), lambda a, d: torch.cat(a, d))) == 1
    assert len(found(lambda x, y: torch.cat([x, y], 1), lambda a, b: torch.cat((a, b), dim=1))) == 1
    with_bias = lambda x, w, b: F.linear(x, w, b)  # noqa: E731
    assert found(lambda x, w: F.linear(x, w), with_bias) == []
    assert found(Calls(nn.Linear(2, 2, bias=False)), with_bias) == []


def test_a_placeholder_is_not_computed_by_the_match():
    def code(x):
        h = x.relu()
        return h + h

    assert found(code, lambda a, b: a.relu() + b) == []
    assert len(found(code, lambda a: a.relu() + a.relu())) == 0


def test_weights_of_modules_are_placeholders():
    assert found(Calls(nn.Linear(2, 3)), lambda x, w, b: F.linear(x, w, b)) == [["mod"]]
    assert found(Calls(nn.Linear(2, 3, bias=False)), lambda x, w: F.linear(x, w)) == [["mod"]]
    assert found(Calls(nn.Linear(2, 3)), lambda x, w: F.linear(x, w, w)) == []
    norm = lambda x, shape, w, b: F.layer_norm(x, shape, w, b)  # noqa: E731
    assert found(Calls(nn.LayerNorm(4)), norm) == [["mod"]]


def test_matches_do_not_overlap_and_are_in_graph_order():
    def code(x):
        return x.exp().exp().exp().exp().exp()

    assert found(code, lambda a: a.exp().exp()) == [["exp", "exp_1"], ["exp_2", "exp_3"]]


def test_two_operations_of_a_pattern_are_two_nodes():
    assert found(lambda x: x.exp() * 1, lambda a: (a.exp(), a.exp())) == []
    assert found(lambda x: x.exp() * x.exp(), lambda a: (a.exp(), a.exp())) == [["exp", "exp_1"]]


def test_backtracking_over_users():
    def code(x):
        wrong = x.relu().sin()
        right = x.relu().cos()
        return wrong + right + x.tanh()

    assert found(code, lambda a: (a.tanh(), a.relu().cos())) == [["relu_1", "cos", "tanh"]]


def test_open_matches_are_returned():
    def code(x):
        h = x.exp()
        return h.relu(), h

    assert found(code, lambda a: a.exp().relu()) == [["exp", "relu"]]


def test_slices_and_nested_constants():
    assert len(found(lambda x: x[:, 1:], lambda a: a[:, 1:])) == 1
    assert found(lambda x: x[:, 1:], lambda a: a[:, 2:]) == []
    assert len(found(lambda x, n: x[:, :n], lambda a, k: a[:, :k])) == 1


def test_unpacked_results():
    def code(x):
        q, k = x.chunk(2, dim=-1)
        return q * k.relu()

    def pattern(a):
        q, k = torch.chunk(a, 2, -1)
        return k.relu() * q

    assert found(code, pattern) == [["chunk", "getitem", "getitem_1", "relu", "mul"]]


def test_python_functions_by_signature():
    def code(x):
        return scaled(x, factor=2)

    gm = fx.symbolic_trace(code)
    assert gm.graph.find_nodes(op="call_function", target=scaled)
    for pattern, number in [
        (lambda a: scaled(a, 2), 1),
        (lambda a: scaled(a, 2, 0), 1),
        (lambda a: scaled(a), 0),
    ]:
        assert len(find_subgraphs(gm.graph, gm.get_submodule, pattern)) == number


def scaled(x, factor=1, shift=0):
    return x * factor + shift


fx.wrap("scaled")


# --- sizes ---


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def split(self, t):
        return t.view(t.size(0), -1, 2, 4).permute(0, 2, 1, 3)

    def forward(self, x):
        return self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))


def test_shape_arguments_are_wildcards_and_their_sizes_belong_to_the_match():
    def pattern(x):
        return call_module("query|key|value", x).view(0, 0, 0, 0).permute(0, 2, 1, 3)

    matches = found(Heads(), pattern)
    assert matches[0] == ["query", "size", "view", "permute"]
    assert [m[0] for m in matches] == ["query", "key", "value"]


def test_sizes_in_the_pattern_are_not_required():
    def pattern(x):
        y = call_module("query", x)
        return y.view(y.shape[0], y.size(1), -1, 4)

    assert found(Heads(), pattern) == [["query", "size", "view"]]


def test_sizes_used_elsewhere_stay_outside():
    def code(x):
        n = x.size(0)
        return x.exp().view(n, -1) * n

    assert found(code, lambda a: a.exp().view(-1)) == [["exp", "view"]]


def test_sizes_are_compared_only_where_both_sides_spell_them_out():
    def computed(x):
        return x.view(x.size(0), -1)

    assert len(found(computed, lambda a: a.view(2, -1))) == 1
    assert len(found(computed, lambda a: a.view(a.size(0), 3, 4))) == 1
    assert len(found(lambda x: x.view(2, -1), lambda a, n: a.view(n, n))) == 0
    assert len(found(lambda x: x.view(2, 2), lambda a, n: a.view(n, n))) == 1
    assert len(found(lambda x, y: x.view(y.shape), lambda a: a.view(2, -1))) == 1


def test_the_same_argument_among_sizes_is_the_same_value():
    def pattern(a, n):
        return a.view(n, -1) + n

    assert len(found(lambda x, m: x.view(m, -1) + m, pattern)) == 1
    assert found(lambda x, m, n: x.view(m, -1) + n, pattern) == []
    assert found(lambda x: x.view(2, -1) + 3, pattern) == []
    # Two ways to ask for a size may give the same.
    assert len(found(lambda x: x.view(x.shape[0], -1) + x.size(0), pattern)) == 1


# --- modules ---


def test_several_outputs_share_an_input():
    two = make(lambda self, x, y: (self.a(x), self.b(y)), a=Heads(), b=Heads())

    def pattern(x):
        return (
            call_module(r"\w\.query", x),
            call_module(r"\w\.key", x),
            call_module(r"\w\.value", x),
        )

    assert found(two, pattern) == [
        ["a_query", "a_key", "a_value"],
        ["b_query", "b_key", "b_value"],
    ]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask=None):
        return self.drop(self.fc2(self.act(self.fc1(x)))) + x


def test_pattern_class_instance_and_submodules():
    class Chain(Pattern):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)
            self.act = nn.GELU()
            self.last = ModulePattern("fc2")

        def forward(self, x):
            return self.last(self.act(self.fc(x)))

    assert found(Mlp(), Chain) == [["fc1", "act", "fc2"]]
    assert found(Mlp(), Chain()) == [["fc1", "act", "fc2"]]
    assert found(Mlp(), Calls(nn.Linear(1, 1))) == [["fc1"], ["fc2"]]
    assert found(Mlp(), Calls(nn.Conv1d(1, 1, 1))) == []


def test_traced_pattern_can_be_used_again():
    pattern = trace_pattern(lambda x: F.gelu(call_module("fc", x)))
    assert found(Mlp(), pattern) == found(Mlp(), pattern) == [["fc1", "act"]]


def test_user_modules_match_by_name():
    class Odd(nn.Module):
        def forward(self, x, scale=1.0, flag=None):
            return x if flag else x * scale

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, Odd)

    model = make(lambda self, x, y: self.odd(x, scale=y, flag=False).relu(), odd=Odd())
    gm = fx.GraphModule(model, Tracer().trace(model))

    def number(pattern):
        return len(find_subgraphs(gm.graph, gm.get_submodule, pattern))

    assert number(lambda x: call_module("odd", x).relu()) == 1
    assert number(lambda x: call_module("o", x).relu()) == 1
    assert number(lambda x: call_module("dd", x).relu()) == 0
    assert number(lambda x, s: call_module("odd", x, s)) == 1
    assert number(lambda x, s: call_module("odd", x=x, scale=s)) == 1
    assert number(lambda x: call_module("odd", x, flag=False)) == 1
    assert number(lambda x: call_module("odd", x, flag=True)) == 0
    assert number(lambda x: call_module("odd", x, x)) == 0
    assert number(Calls(Odd())) == 0  # the pattern leaves scale at 1.0


def test_find_by_name():
    gm = graph_module(Mlp())
    assert [[n.name for n in m] for m in find_by_name(gm.graph, r"fc\d")] == [["fc1"], ["fc2"]]
    assert find_by_name(gm.graph, "c1") == []
    for wrong, error in (("(", ValueError), (3, TypeError)):
        with pytest.raises(error, match="regular expression"):
            find_by_name(gm.graph, wrong)


def test_training_flags_of_the_graph_are_values_like_others():
    graph = fx.Graph()
    x = graph.placeholder("x")
    flag = graph.create_node("get_attr", "training")
    graph.output(graph.call_function(F.dropout, (x,), {"p": 0.1, "training": flag}))

    def number(pattern):
        return len(find_subgraphs(graph, nn.Module().get_submodule, pattern))

    assert number(lambda x: F.dropout(x)) == 1
    assert number(lambda x, t: F.dropout(x, training=t)) == 1
    assert number(lambda x: F.dropout(x, training=False)) == 0


# --- wrong patterns ---


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        (lambda x: x, ValueError, "no operation"),
        (lambda x: None, ValueError, "no operation"),
        (lambda x: x if x.sum() > 0 else -x, ValueError, "cannot be traced"),
        (lambda x: call_module("(", x), ValueError, "not a regular expression"),
        (lambda x: call_module(3, x), (TypeError, ValueError), "regular expression"),
        (lambda x: ModulePattern(3)(x), (TypeError, ValueError), "regular expression"),
        (lambda x, y: (x.exp(), y.sin()), ValueError, "share no value"),
        (lambda x: F.gelu(x, x, x, x), ValueError, "cannot be traced|does not take"),
        (3, TypeError, "the pattern is 3"),
        (int, TypeError, "must derive from Pattern"),
        (Pattern, ValueError, "defines no forward"),
        (ModulePattern, ValueError, "pass an instance"),
    ],
)
def test_wrong_patterns(pattern, error, message):
    with pytest.raises(error, match=message):
        found(Mlp(), pattern)


def test_very_long_patterns():
    def chain(number):
        def code(x):
            for _ in range(number):
                x = torch.relu(x) + 1
            return x

        return code

    assert len(found(chain(60), chain(60))) == 1
    with pytest.raises(ValueError, match="too long"):
        found(chain(2000), chain(2000))


def test_call_module_outside_of_a_pattern():
    with pytest.raises(ValueError, match="outside of a pattern"):
        call_module("fc", torch.ones(1))


# --- cost ---


def steps(number: int, pattern: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many values a search compares, and how many matches it finds."""
    counts = []
    unify = search._Unification._unify

    def counted(self, pending):
        counts.append(1)
        return unify(self, pending)

    gm = layers(number)
    with monkeypatch.context() as patch:
        patch.setattr(search._Unification, "_unify", counted)
        found = find_subgraphs(gm.graph, gm.get_submodule, pattern)
    return len(counts), len(found)


@pytest.mark.parametrize(
    "pattern",
    [
        lambda x, m: F.gelu(torch.matmul(x, m) + 1.0),
        lambda x, m, r: torch.softmax(x * 2 + m, -1) @ m + r,
        lambda x, m: (torch.matmul(x, m) + 1.0, m * 3.0),
    ],
)
def test_work_is_linear_in_the_graph(pattern, monkeypatch):
    (few, _), (many, number) = (steps(n, pattern, monkeypatch) for n in (20, 80))
    assert many <= 4.2 * few
    assert number in (0, 80)


def test_an_absent_operation_costs_no_search(monkeypatch):
    def pattern(x, m):
        return torch.erfinv(F.gelu(torch.matmul(x, m) + 1.0))

    assert steps(40, pattern, monkeypatch) == (0, 0)
