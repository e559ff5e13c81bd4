"""A match tells what each argument of the pattern stands for."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo.graph.match.canonical import ModuleState
from slapo.graph.match.pattern import Pattern, call_module
from slapo.graph.match.search import find_by_name, find_subgraphs
from tests.graph.rewrites import replace_vertical


def bindings(code: Any, pattern: Any) -> list[dict[str, Any]]:
    """What the arguments stand for in each match, nodes by name."""
    gm = fx.symbolic_trace(code)
    matches = find_subgraphs(gm.graph, gm.get_submodule, pattern)
    return [fx.map_arg(match.bindings, lambda node: node.name) for match in matches]


class Calls(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.mod = module

    def forward(self, x):
        return self.mod(x)


def test_arguments_are_bound_by_name_not_by_order_of_use():
    def code(x, y):
        return F.gelu(y - x.exp())

    assert bindings(code, lambda a, b: F.gelu(b - a.exp())) == [{"a": "x", "b": "y"}]


def test_operands_that_swap():
    assert bindings(lambda x, y: y + x.exp(), lambda a, b: a.exp() + b) == [{"a": "x", "b": "y"}]


@pytest.mark.parametrize("constant", [3.0, 2, True, "none"])
def test_constants(constant):
    def code(x):
        return scaled(x, constant)

    assert bindings(code, lambda x, s: scaled(x, s)) == [{"x": "x", "s": constant}]


def scaled(x, factor=1):
    return x * factor


fx.wrap("scaled")


def test_constants_among_operators():
    assert bindings(lambda x: F.gelu(x * 3.0), lambda x, s: F.gelu(x * s)) == [{"x": "x", "s": 3.0}]
    # Operands are first taken in the order that they are written in.
    assert bindings(lambda x: F.gelu(3.0 * x), lambda x, s: F.gelu(x * s)) == [{"x": 3.0, "s": "x"}]


def test_containers_and_slices():
    def code(x, y, n):
        return torch.cat([x, y], 1)[:, :n]

    assert bindings(code, lambda a, d, k: torch.cat(a, d)[:, :k]) == [
        {"a": ["x", "y"], "d": 1, "k": "n"}
    ]


def test_weights_of_modules():
    (bound,) = bindings(Calls(nn.Linear(2, 3)), lambda x, w, b: F.linear(x, w, b))
    weight, bias = ModuleState("mod", "weight"), ModuleState("mod", "bias")
    assert bound == {"x": "x", "w": weight, "b": bias}


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_a_module_is_what_it_is_in_the_graph(training):
    model = Calls(nn.Dropout(0.1)).train(training)
    (bound,) = bindings(model, lambda x, p, t: F.dropout(x, p, t))
    assert bound == {"x": "x", "p": 0.1, "t": training}


def test_arguments_are_in_the_order_of_the_pattern():
    (bound,) = bindings(lambda x, y: y.exp() - x, lambda q, k: k.exp() - q)
    assert list(bound.items()) == [("q", "x"), ("k", "y")]


def test_several_matches_have_their_own():
    def code(x, y):
        return x.exp().relu() + y.exp().relu()

    assert bindings(code, lambda a: a.exp().relu()) == [{"a": "x"}, {"a": "y"}]


def test_arguments_that_the_pattern_does_not_use_are_not_bound():
    assert bindings(lambda x: x.exp(), lambda a, unused: a.exp()) == [{"a": "x"}]


def test_variadic_and_default_arguments():
    def pattern(a, *shape, scale=1.0):
        return a.unflatten(-1, shape) * scale

    def code(x):
        return x.unflatten(-1, (2, -1)) * 0.5

    assert bindings(code, pattern) == [{"a": "x", "shape": (2, -1), "scale": 0.5}]


def test_arguments_of_pattern_modules():
    class Mlp(Pattern):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x, input):
            return self.fc(x) + input

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x, y):
            return y + self.fc(x)

    assert bindings(Model(), Mlp) == [{"x": "x", "input": "y"}]


def test_a_name_has_no_arguments():
    gm = fx.symbolic_trace(Calls(nn.Linear(2, 2)))
    (match,) = find_by_name(gm.graph, "mod")
    assert match.bindings == {}


def test_sizes_are_bound_where_they_can_be():
    def code(x, n):
        return x.exp().view(n, -1, 4)

    assert bindings(code, lambda a, k: a.exp().view(k, -1, 4)) == [{"a": "x", "k": "n"}]
    assert bindings(code, lambda a, k: a.exp().view(1, 1, k)) == [{"a": "x", "k": 4}]
    # As many numbers as the graph pleases: the argument stands for all, or for none.
    assert bindings(code, lambda a, shape: a.exp().view(shape)) == [
        {"a": "x", "shape": ("n", -1, 4)}
    ]
    assert bindings(lambda x: x.exp().expand(x.size(0), 4), lambda a, k: a.exp().expand(k, 4)) == [
        {"a": "x", "k": "size"}
    ]


def test_sizes_of_the_match_itself_are_no_arguments():
    def code(x):
        h = x.exp()
        return h.view(h.size(0) * 2, -1)

    gm = fx.symbolic_trace(code)
    (match,) = find_subgraphs(gm.graph, gm.get_submodule, lambda a, k: a.exp().view(k, -1))
    assert [node.name for node in match] == ["exp", "size", "mul", "view"]
    assert list(match.bindings) == ["a"]


def test_matches_stay_lists_of_nodes():
    gm = fx.symbolic_trace(lambda x: x.exp().relu())
    (match,) = find_subgraphs(gm.graph, gm.get_submodule, lambda a: a.exp().relu())
    _, exp, relu, _ = gm.graph.nodes
    assert match == [exp, relu]
    assert repr(match) == "[exp, relu]"
    assert sorted(match) == [exp, relu]


def test_bindings_follow_rewrites_beside_the_match():
    class Chain(nn.Module):
        def forward(self, x, y):
            for _ in range(2):
                x = F.gelu(x - y)
            return x

    gm = fx.symbolic_trace(Chain())
    first, second = find_subgraphs(gm.graph, gm.get_submodule, lambda a, b: F.gelu(a - b))
    old = second.bindings["a"]
    new = replace_vertical(gm, first, lambda a, b: F.gelu(a - b))
    assert old._erased
    assert second.bindings == {"a": new, "b": new.args[1]}


def test_named_modules_and_their_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x, y):
            return F.gelu(self.fc(x) + y)

    def pattern(bias, hidden):
        return F.gelu(bias + call_module("fc", hidden))

    assert bindings(Model(), pattern) == [{"bias": "y", "hidden": "x"}]
