"""Patterns are found along the data flow, in every spelling, and nothing else is found."""

import operator  # noqa: F401 - of the golden file, as the others
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo.graph.match import search
from slapo.graph.match.find import find_subgraphs_in, read_pattern
from slapo.graph.match.pattern import ModulePattern, Pattern, call_module, trace_pattern  # noqa: F401
from slapo.graph.match.search import find_subgraphs
from tests.entries import Entries
from tests.graph.rewrites import Calls, layers, leaves_of, replace_vertical
from tests.graph.served import make
from tests.primitives.models import Block  # noqa: F401

#: Code, a pattern, and what is found.
ENTRIES = Entries("matches.txt", globals())


def found(code: Any, pattern: Any) -> list[list[str]]:
    """Names of the matched nodes."""
    gm = code if isinstance(code, fx.GraphModule) else fx.symbolic_trace(code)
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
    "matmul": [lambda x: torch.matmul(x, x), lambda x: x @ x, lambda x: x.matmul(x)],
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


class Function(nn.Module):
    """A module whose setting is a function, or another module."""

    def __init__(self, act: Any, p: float = 0.0) -> None:
        super().__init__()
        self.act, self.p = act, p

    def forward(self, x):
        return self.act(x) ** self.p


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


def test_a_pattern_is_left_as_it_was():
    class Captures(Pattern):
        def forward(self, x):
            return x * SCALES

    pattern = Captures()
    before = dict(vars(pattern))
    for again in (pattern, pattern, graph := trace_pattern(pattern), graph):
        assert len(found(Holds(SCALES), again)) == 1
    assert vars(pattern) == before


SCALES_AGAIN, WEIGHT = SCALES.clone(), nn.Parameter(torch.ones(2))
ON_META, LINEAR = torch.empty(2, device="meta"), nn.Linear(2, 2, bias=False)
LINEAR_WEIGHT = LINEAR.weight.detach().clone()


class Split(Pattern):
    """A linear layer in two operations."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def forward(self, x):
        return F.linear(x, self.fc.weight) + self.fc.bias


def tied(is_tied: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    if is_tied:
        model[1].weight = model[0].weight
    return model


# --- data flow, sizes and modules ---


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def split(self, t):
        return t.view(t.size(0), -1, 2, 4).permute(0, 2, 1, 3)

    def forward(self, x):
        return self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))


class Chain(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.last = nn.Linear(1, 1), nn.GELU(), ModulePattern("fc2")

    def forward(self, x):
        return self.last(self.act(self.fc(x)))


def scaled(x, factor=1, shift=0):
    return x * factor + shift


fx.wrap("scaled")


def unpacks(x):
    q, k = x.chunk(2, dim=-1)
    return q * k.relu()


def unpacks_as_well(a):
    q, k = torch.chunk(a, 2, -1)
    return k.relu() * q


class Odd(nn.Module):
    def forward(self, x, scale=1.0, flag=None):
        return x if flag else x * scale


ODD = leaves_of(make(lambda s, x, y: s.odd(x, scale=y, flag=False).relu(), odd=Odd()))


@pytest.mark.parametrize("title", ENTRIES.titles)
def test_what_is_found(title: str, update_golden: bool) -> None:
    """The nodes of each match, and what the arguments of the pattern stand for."""

    def tell(code: Any, pattern: Any) -> str:
        gm = code if isinstance(code, fx.GraphModule) else fx.symbolic_trace(code)
        matches = find_subgraphs(gm.graph, gm.get_submodule, pattern)
        return "; ".join(f"{[*match]} {match.bindings}" for match in matches) or "nothing"

    ENTRIES.check(title, tell, update_golden)


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


# --- what arguments stand for ---


class ResidualInPattern(Pattern):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def forward(self, x, input):
        return self.fc(x) + input


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
