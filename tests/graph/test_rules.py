"""Rewrites are repeated in the graphs of later kinds of calls, or refused there."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from slapo.errors import TraceError
from slapo.graph.fuse.fusion import Fuse
from slapo.graph.match.canonical import called_path
from slapo.graph.match.find import find_subgraphs_in, read_pattern
from slapo.graph.match.pattern import call_module
from slapo.graph.rewrite.rules import Replace, carry_out
from slapo.graph.trace.module import Trace, attach, code_of, rules_of
from slapo.graph.trace.views import View
from tests.graph.rewrites import Leaves

SIZE = 4
X = torch.randn(3, SIZE)


class Layer(nn.Module):
    """With a mask, or in another mode, it computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.masked = False
        self.p = 0.5

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k = self.query(x), self.key(x)
        if self.masked:  # uses the key before the query
            k = k * mask
        h = F.dropout(F.gelu(k - 2 * q), 0.5, self.training)
        return self.out(torch.sin(h)) + x


def traced(model: nn.Module) -> Any:
    """The module, traced; it shows the graph of its present form."""
    shown = Leaves().trace(model)
    attach(model, Trace(type(model), lambda module, path: True, shown))
    ORIGINALS[model] = dict(model.named_children())
    return model


#: Traced module -> the children that it had, whose values rewrites may take out of it.
ORIGINALS: WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = WeakKeyDictionary()


def find(gm: Any, pattern: Any) -> Any:
    return find_subgraphs_in(gm, read_pattern(pattern))


def where(*found: Any) -> dict[str, Any]:
    """The arguments of a rule about matches."""
    return {
        "chains": [[node for _, node in match] for match in found],
        "bindings": [match.bindings for match in found],
        "picks": [(match.search, match.position) for match in found],
    }


def replace(gm: Any, found: list[Any], new: Any, **how: Any) -> fx.Node:
    return carry_out(gm, Replace(gm, new=new, **where(*found), **how))


def fuse(gm: Any, match: Any, **how: Any) -> fx.Node:
    pick = (match.search, match.position)
    return carry_out(gm, Fuse(gm, [node for _, node in match], pick=pick, **how))


def later(gm: Any, form: nn.Module) -> tuple[fx.Graph, Callable[..., Any]]:
    """The graph of another kind of call with the rewrites done, and what runs it."""
    graph = Leaves().trace(form)
    gm.train(form.training)
    for rule in rules_of(gm):
        rule.apply(View(gm, graph, is_shown=False))
    graph.lint()
    return graph, functools.partial(code_of(graph), gm)


def other(gm: Any, **changed: Any) -> Layer:
    """Another form of the layer, over the children that it had."""
    form = Layer()
    for name, child in ORIGINALS[gm].items():
        setattr(form, name, child)
    form.train(changed.pop("training", True))
    vars(form).update(changed)
    return form


def targets(graph: fx.Graph) -> list[str]:
    """Paths of called modules, with a mark at those that stand for the one in the shown graph."""
    paths = ((called_path(n), n.op == "call_function") for n in graph.nodes)
    return [f"another {path}" if other else path for path, other in paths if path is not None]


def scores(q: Any, k: Any, p: Any, t: Any) -> Any:
    return F.dropout(F.gelu(k - 2 * q), p, t)


def attention(query: Tensor, key: Tensor, p: float, t: bool) -> Tensor:
    return scores(query, key, p, t)


# --- replacement ---------------------------------------------------------------------------------
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_arguments_bind_by_the_pattern_in_each_graph(masked: bool, training: bool) -> None:
    """Names agree for constants that differ by kind; the others are in the pattern's order."""
    gm = traced(Layer())
    replace(gm, find(gm, scores), attention)
    (call,) = gm.graph.find_nodes(op="call_function", target=attention)
    assert call.args[2:] == (0.5, True)
    form = other(gm, masked=masked, training=training)
    graph, run = later(gm, form)
    (call,) = graph.find_nodes(op="call_function", target=attention)
    assert call.args[2:] == (0.5, training)
    assert [str(v) for v in call.args[:2]] == ["query", "mul" if masked else "key"]
    torch.manual_seed(0)
    expected = form(X, X)
    torch.manual_seed(0)
    torch.testing.assert_close(run(X, X), expected)


def test_matches_of_one_search_are_replaced_one_by_one() -> None:
    class Deep(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for _ in range(4):
                x = F.gelu(x + 1)
            return x

    gm = traced(Deep())
    gelus, sums = find(gm, lambda x: F.gelu(x)), find(gm, lambda x: x + 1)
    replace(gm, [gelus[2]], torch.tanh)
    replace(gm, [sums[2]], torch.sin)
    replace(gm, [gelus[0]], torch.tanh)
    replace(gm, [find(gm, lambda x: F.gelu(x))[1]], torch.cos)
    graph, run = later(gm, Deep())
    assert [str(n.target.__name__) for n in graph.nodes if n.op == "call_function"] == [
        *("add", "tanh", "add", "gelu", "sin", "tanh", "add", "cos")
    ]
    torch.testing.assert_close(run(X, X), gm(X, X))


def test_a_rule_that_may_not_be_done_is_refused() -> None:
    class Writes(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.writes = writes

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = x * y
            if self.writes:
                y.add_(1)
            return h.relu()

    gm = traced(Writes(False))
    replace(gm, find(gm, lambda a, b: (a * b).relu()), lambda a, b: (a * b).relu())
    with pytest.raises(TraceError, match=r"cannot be applied.*'mul' would move past 'add_'"):
        later(gm, Writes(True))


# --- nodes picked by hand ------------------------------------------------------------------------
@pytest.mark.parametrize("training", [False, True])
def test_nodes_picked_by_hand_are_found_again(training: bool) -> None:
    gm = traced(Layer())
    chain = [n for n in gm.graph.nodes if n.name in ("gelu", "dropout")]
    carry_out(gm, Replace(gm, [chain], torch.tanh))
    (out,) = (n for n in gm.graph.nodes if n.name == "out")
    carry_out(gm, Replace(gm, [[out]], torch.cos, same_call=True))
    graph, _ = later(gm, other(gm, masked=True, training=training))
    names = [n.target.__name__ for n in graph.nodes if n.op == "call_function"]
    assert names == ["mul", "mul", "sub", "tanh", "sin", "cos", "add"]


class Sines(nn.Module):
    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.number):
            x = torch.sin(x)
        return x


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nodes_that_other_matches_would_overlap(place: int) -> None:
    gm = traced(Sines())
    chain = list(gm.graph.nodes)[1 + place : 3 + place]
    carry_out(gm, Replace(gm, [chain], torch.cos))
    graph, _ = later(gm, Sines())
    assert str(graph) == str(gm.graph)
    with pytest.raises(TraceError, match="2 matches there, and 3 in the graph that is shown"):
        later(gm, Sines(3))


def test_nodes_that_share_no_value() -> None:
    class Apart(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y.add_(1)
            return x.relu()

    gm = traced(Apart())
    chain = [n for n in gm.graph.nodes if n.op == "call_method"]
    before = str(gm.graph)
    with pytest.raises(ValueError, match="parts that share no value: relu and add_"):
        Replace(gm, [chain], torch.sub)
    assert (str(gm.graph), rules_of(gm)) == (before, [])


# --- fusions and checkpoints ----------------------------------------------------------------------
def gelu_dropout(x: Any, y: Any) -> Any:
    return F.dropout(F.gelu(x - y))


@pytest.mark.parametrize("compiler", ["TorchScript", None, "inductor"])
def test_a_fusion_that_has_taken_modules_in_shares_them_with_other_texts(
    compiler: str | None,
) -> None:
    gm = traced(Layer())
    (match,) = find(gm, lambda q, k: F.dropout(F.gelu(call_module("key", k) - 2 * q)))
    fuse(gm, match, compiler=compiler)
    fused = gm.get_submodule("FusedModule_0")
    with torch.no_grad():
        next(fused.parameters()).mul_(3.0)
    form = other(gm, training=False)
    graph, run = later(gm, form)
    assert targets(graph) == ["query", "another FusedModule_0", "out"]
    torch.testing.assert_close(run(X, X), form(X, X))


@pytest.mark.parametrize("compiler", ["TorchScript", None])
def test_modules_in_fusions_of_other_texts_follow_the_mode(compiler: str | None) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.scale = nn.Dropout(0.5), 2.0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.drop(x) * self.scale

    gm, form = traced(Drops()), Drops()
    (match,) = find(gm, lambda x, s: call_module("drop", x) * s)
    fuse(gm, match, compiler=compiler)
    form.scale = 3.0
    graph, run = later(gm, form)
    assert targets(graph) == ["another FusedModule_0"]
    assert not torch.equal(run(X, X), 3 * X)
    gm.eval()
    assert torch.equal(run(X, X), 3 * X)


def test_nothing_of_a_capture_is_kept_alive() -> None:
    gm = traced(Layer())
    for match in find(gm, "query|key"):
        replace(gm, [match], nn.Identity())
    graph, _ = later(gm, other(gm))
    assert "_slapo_found" not in vars(graph)
    kept = weakref.ref(graph)
    del graph, _
    gc.collect()
    assert kept() is None


# --- rules are data ------------------------------------------------------------------------------
