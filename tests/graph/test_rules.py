"""Rewrites are repeated in the graphs of later kinds of calls, or refused there."""

import copy
import functools
import gc
import pickle
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
from slapo.graph.match.subgraph_view import SubgraphView
from slapo.graph.rewrite.rules import MadePerText, Replace, carry_out, text_of
from slapo.graph.trace.module import Trace, attach, code_of, rules_of
from slapo.graph.trace.nodes import HeldModule
from slapo.graph.trace.views import View
from slapo.op.checkpoint import CheckPointWrapper
from slapo.primitives.checkpoint import Checkpoint
from slapo.wrapper import innermost
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


def checkpoint(gm: Any, match: Any) -> fx.Node:
    chain, pick = [node for _, node in match], (match.search, match.position)
    return carry_out(gm, Checkpoint(gm, chain, None, False, pick), keep_modules=True)


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


def hidden(graph: fx.Graph) -> nn.Module:
    """The module that only a capture calls."""
    (node,) = (n for n in graph.nodes if isinstance(n.target, HeldModule))
    return node.target.module


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


class Both(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def test_a_horizontal_replacement_by_one_child() -> None:
    gm = traced(Layer().eval())
    new = Both(gm.query, gm.key)
    call = replace(gm, list(find(gm, "query|key")), new, name="QK")
    assert (call.name, list(dict(gm.named_children()))) == ("qk_0", ["out", "QK_0"])
    form = other(gm, masked=True, training=False)
    graph, run = later(gm, form)
    assert targets(graph) == ["QK_0", "out"]
    torch.testing.assert_close(run(X, X), form(X, X))
    assert gm.get_submodule("QK_0") is new


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


def test_a_rule_without_a_place_is_refused_and_the_graph_stays() -> None:
    class Sometimes(nn.Module):
        def __init__(self, acts: int) -> None:
            super().__init__()
            self.acts = acts

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.acts):
                x = F.gelu(x) * 2
            return x

    gm = traced(Sometimes(2))
    replace(gm, [find(gm, lambda x: F.gelu(x))[1]], torch.tanh)
    for acts in (0, 1, 3):
        graph = Leaves().trace(Sometimes(acts))
        before = str(graph)
        message = (
            rf"the replacement by function tanh at .*test_rules.py:\d+ cannot be applied .*"
            rf"its search has {acts} matches there, and 2 in the graph that is shown"
        )
        with pytest.raises(TraceError, match=message):
            rules_of(gm)[0].apply(View(gm, graph, is_shown=False))
        assert str(graph) == before


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


@pytest.mark.parametrize("compiler", ["TorchScript", None])
def test_a_fusion_is_compiled_for_each_text(compiler: str | None) -> None:
    gm = traced(Layer())
    (match,) = find(gm, gelu_dropout)
    assert fuse(gm, match, compiler=compiler).target == "FusedModule_0"
    names, children = list(gm.state_dict()), list(gm._modules)
    graph, _ = later(gm, other(gm, masked=True))
    assert targets(graph) == ["query", "key", "FusedModule_0", "out"]
    for _ in range(2):
        form = other(gm, training=False)
        graph, run = later(gm, form)
        assert targets(graph) == ["query", "key", "another FusedModule_0", "out"]
        torch.testing.assert_close(run(X, X), form(X, X))
    assert (list(gm.state_dict()), list(gm._modules)) == (names, children)


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


def test_a_checkpoint_is_made_for_each_text() -> None:
    gm = traced(Layer())
    (match,) = find(gm, lambda q, k: F.dropout(F.gelu(call_module("key", k) - 2 * q)))
    names = list(gm.state_dict())
    assert checkpoint(gm, match).target == "CheckPointWrapper_0"
    form = other(gm, training=False)
    graph, run = later(gm, form)
    assert targets(graph) == ["query", "another CheckPointWrapper_0", "out"]
    wrapper = hidden(graph)
    assert isinstance(wrapper, CheckPointWrapper)
    assert isinstance(innermost(wrapper), SubgraphView)
    assert list(gm.state_dict()) == names
    found = []
    for function in (run, form):
        gm.zero_grad()
        function(X, X).square().sum().backward()
        found.append([p.grad.clone() for p in gm.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("training", [False, True])
def test_a_rewrite_within_a_checkpoint(training: bool) -> None:
    gm = traced(Layer())
    checkpoint(gm, find(gm, lambda q, k: torch.sin(F.dropout(F.gelu(k - 2 * q))))[0])
    (match,) = find(gm, lambda x: torch.sin(x))
    assert match[0][0] == "CheckPointWrapper_0"
    view = innermost(gm.get_submodule("CheckPointWrapper_0"))
    replace(view, [match], torch.cos)
    form = other(gm, training=training)
    graph, run = later(gm, form)
    name = "CheckPointWrapper_0" if training else "another CheckPointWrapper_0"
    assert targets(graph) == ["query", "key", name, "out"]
    part = view if training else innermost(hidden(graph))
    called = [n.target.__name__ for n in part.graph.nodes if n.op == "call_function"]
    assert called == ["mul", "sub", "gelu", "dropout", "cos"]
    if not training:
        h = torch.cos(F.gelu(gm.key(X) - 2 * gm.query(X)))
        torch.testing.assert_close(run(X, X), gm.out(h) + X)


@pytest.mark.parametrize("training", [False, True])
def test_a_rewrite_of_what_was_fused(training: bool) -> None:
    """In evaluation another module stands for the fused one, under the same name."""
    gm = traced(Layer())
    fuse(gm, find(gm, gelu_dropout)[0], compiler=None)
    checkpoint(gm, find(gm, lambda x, y: torch.sin(call_module("FusedModule_0", x, y)))[0])
    replace(gm, find(gm, "CheckPointWrapper_0"), torch.add)
    form = other(gm, training=training)
    _, run = later(gm, form)
    torch.testing.assert_close(run(X, X), gm.out(gm.key(X) + 2 * gm.query(X)) + X)


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
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda rules: pickle.loads(pickle.dumps(rules))])
def test_copies_of_rules_hold_no_nodes_and_no_modules(clone: Any) -> None:
    gm = traced(Layer())
    replace(gm, list(find(gm, "query|key")), Both(gm.query, gm.key), name="QK")
    fuse(gm, find(gm, gelu_dropout)[0], compiler=None)
    checkpoint(gm, find(gm, lambda x: torch.sin(x))[0])
    carry_out(gm, Replace(gm, [[n for n in gm.graph.nodes if n.name == "out"]], nn.Identity()))
    graph, _ = later(gm, other(gm))
    rules = clone(rules_of(gm))
    for rule in rules:
        held = list(vars(rule).values())
        assert not any(isinstance(value, (fx.Node, nn.Module)) for value in held)
    assert rules[0].picks[0][0] is rules[0].picks[1][0]  # one search for both
    rules_of(gm)[:] = rules
    assert str(later(gm, other(gm))[0]) == str(graph)


def test_texts_of_chains() -> None:
    def text(code: Any) -> str:
        graph = fx.symbolic_trace(code).graph
        return text_of([n for n in graph.nodes if n.op.startswith("call")])

    assert text(lambda x, y: (x + y).relu()) == text(lambda b, a: (b + a).relu())
    different = [
        text(lambda x: F.dropout(x, 0.5, True)),
        text(lambda x: F.dropout(x, 0.5, False)),
        text(lambda x: F.dropout(x, 0.25, True)),
        text(lambda x: x.relu().exp()),
        text(lambda x, y: x + y),
        text(lambda x: x + x),
        text(lambda x: x.view(-1, 1)),
        text(lambda x: x.view("-1", 1)),
    ]
    assert len(set(different)) == len(different)
    assert issubclass(Fuse, MadePerText)
