"""A match tells what each argument of the pattern stands for."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo.graph.match.canonical import ModuleState
from slapo.graph.match.pattern import Pattern, call_module
from slapo.graph.match.search import find_subgraphs
from tests.graph.rewrites import Calls, replace_vertical
from tests.graph.served import make


def bindings(code: Any, pattern: Any) -> list[dict[str, Any]]:
    """What the arguments stand for in each match, nodes by name."""
    gm = fx.symbolic_trace(code)
    matches = find_subgraphs(gm.graph, gm.get_submodule, pattern)
    return [fx.map_arg(match.bindings, lambda node: node.name) for match in matches]


def scaled(x, factor=1):
    return x * factor


fx.wrap("scaled")


def scaled_by(constant):
    return lambda x: scaled(x, constant)


RESIDUAL = make(lambda self, x, y: y + self.fc(x), fc=nn.Linear(2, 2))


class ResidualInPattern(Pattern):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def forward(self, x, input):
        return self.fc(x) + input


def variadic(a, *shape, scale=1.0):
    return a.unflatten(-1, shape) * scale


#: Code, a pattern, and what its arguments stand for in each match.
BOUND = {
    "by name, not by order of use": (
        lambda x, y: F.gelu(y - x.exp()),
        lambda a, b: F.gelu(b - a.exp()),
        [{"a": "x", "b": "y"}],
    ),
    "operands that swap": (
        lambda x, y: y + x.exp(),
        lambda a, b: a.exp() + b,
        [{"a": "x", "b": "y"}],
    ),
    "a constant of an operator": (
        lambda x: F.gelu(x * 3.0),
        lambda x, s: F.gelu(x * s),
        [{"x": "x", "s": 3.0}],
    ),
    "operands are first taken as they are written": (
        lambda x: F.gelu(3.0 * x),
        lambda x, s: F.gelu(x * s),
        [{"x": 3.0, "s": "x"}],
    ),
    "containers and slices": (
        lambda x, y, n: torch.cat([x, y], 1)[:, :n],
        lambda a, d, k: torch.cat(a, d)[:, :k],
        [{"a": ["x", "y"], "d": 1, "k": "n"}],
    ),
    "weights of modules": (
        Calls(nn.Linear(2, 3)),
        lambda x, w, b: F.linear(x, w, b),
        [{"x": "x", "w": ModuleState("mod", "weight"), "b": ModuleState("mod", "bias")}],
    ),
    **{
        f"the constant {constant}": (
            scaled_by(constant),
            lambda x, s: scaled(x, s),
            [{"x": "x", "s": constant}],
        )
        for constant in (2, True, "none")
    },
    **{
        f"training={training}": (
            Calls(nn.Dropout(0.1)).train(training),
            lambda x, p, t: F.dropout(x, p, t),
            [{"x": "x", "p": 0.1, "t": training}],
        )
        for training in (True, False)
    },
    "several matches": (
        lambda x, y: x.exp().relu() + y.exp().relu(),
        lambda a: a.exp().relu(),
        [{"a": "x"}, {"a": "y"}],
    ),
    "an argument that the pattern does not use": (
        lambda x: x.exp(),
        lambda a, unused: a.exp(),
        [{"a": "x"}],
    ),
    "variadic and default": (
        lambda x: x.unflatten(-1, (2, -1)) * 0.5,
        variadic,
        [{"a": "x", "shape": (2, -1), "scale": 0.5}],
    ),
    "a module as the pattern": (RESIDUAL, ResidualInPattern, [{"x": "x", "input": "y"}]),
    "a module by name": (
        RESIDUAL,
        lambda bias, hidden: bias + call_module("fc", hidden),
        [{"bias": "y", "hidden": "x"}],
    ),
    "a size": (
        lambda x, n: x.exp().view(n, -1, 4),
        lambda a, k: a.exp().view(k, -1, 4),
        [{"a": "x", "k": "n"}],
    ),
    "the last size": (
        lambda x, n: x.exp().view(n, -1, 4),
        lambda a, k: a.exp().view(1, 1, k),
        [{"a": "x", "k": 4}],
    ),
    "all sizes": (
        lambda x, n: x.exp().view(n, -1, 4),
        lambda a, shape: a.exp().view(shape),
        [{"a": "x", "shape": ("n", -1, 4)}],
    ),
    "a size that is asked for": (
        lambda x: x.exp().expand(x.size(0), 4),
        lambda a, k: a.exp().expand(k, 4),
        [{"a": "x", "k": "size"}],
    ),
}


@pytest.mark.parametrize("name", BOUND)
def test_arguments_are_bound(name):
    code, pattern, expected = BOUND[name]
    assert bindings(code, pattern) == expected


def test_arguments_are_in_the_order_of_the_pattern():
    (bound,) = bindings(lambda x, y: y.exp() - x, lambda q, k: k.exp() - q)
    assert list(bound.items()) == [("q", "x"), ("k", "y")]


def test_sizes_of_the_match_itself_are_no_arguments():
    def code(x):
        h = x.exp()
        return h.view(h.size(0) * 2, -1)

    gm = fx.symbolic_trace(code)
    (match,) = find_subgraphs(gm.graph, gm.get_submodule, lambda a, k: a.exp().view(k, -1))
    assert [node.name for node in match] == ["exp", "size", "mul", "view"]
    assert list(match.bindings) == ["a"]


def test_bindings_follow_rewrites_beside_the_match():
    gm = fx.symbolic_trace(lambda x, y: F.gelu(F.gelu(x - y) - y))
    first, second = find_subgraphs(gm.graph, gm.get_submodule, lambda a, b: F.gelu(a - b))
    old = second.bindings["a"]
    new = replace_vertical(gm, first, lambda a, b: F.gelu(a - b))
    assert old._erased
    assert second.bindings == {"a": new, "b": new.args[1]}
