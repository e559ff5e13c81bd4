"""Fused modules compute the same, under every compiler."""

import copy
import pickle
import shutil
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo.errors import SlapoError
from slapo.graph.fuse import torchscript
from slapo.graph.match.pattern import call_module
from slapo.graph.match.search import find_subgraphs
from slapo.graph.trace.module import Trace, Traced, attach
from tests.graph.rewrites import fuse, fusion_of, outcome
from tests.graph.served import make

BATCH, SEQ, SIZE = 3, 5, 8


class Mlp(nn.Module):
    """An MLP with its bias apart, dropout and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(SIZE, 16, bias=False)
        self.bias = nn.Parameter(torch.randn(16))
        self.fc2 = nn.Linear(16, SIZE)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = F.gelu(self.fc1(x) + self.bias)
        return self.drop(self.fc2(h)) + x


PATTERNS = {
    "bias_gelu": lambda x, b: F.gelu(x + b),
    "fc_bias_gelu": lambda x, b: F.gelu(call_module("fc1", x) + b),
    "dropout_add": lambda x, r: F.dropout(x) + r,
    "all": lambda x, b: F.dropout(call_module("fc2", F.gelu(call_module("fc1", x) + b))) + x,
}


def find_one(gm: fx.GraphModule, pattern: Any) -> list[fx.Node]:
    (match,) = find_subgraphs(gm.graph, gm.get_submodule, pattern)
    return match


def fuse_in(gm: fx.GraphModule, pattern: Any, **kwargs: Any) -> nn.Module:
    return fuse(gm, find_one(gm, pattern), **kwargs)


def numbers(module: nn.Module) -> list[Any]:
    return outcome(
        module, torch.randn(BATCH, SEQ, SIZE, generator=torch.Generator().manual_seed(1))
    )


def assert_same(module: nn.Module, expected: list[Any], **tolerance: float) -> None:
    # The second and third call run what TorchScript has made of the profile of the first.
    for _ in range(3):
        torch.testing.assert_close(numbers(module), expected, **tolerance)


@pytest.fixture
def gm() -> fx.GraphModule:
    torch.manual_seed(0)
    return fx.symbolic_trace(Mlp())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("compiler", ["TorchScript", None])
def test_numbers_stay(gm, compiler, pattern, training):
    expected = numbers(gm.train(training))
    fused = fuse_in(gm, pattern, compiler=compiler)
    assert hasattr(gm, "FusedModule_0")
    if compiler is None:
        assert_same(gm, expected, rtol=0, atol=0)
    else:
        assert isinstance(fused, torch.jit.ScriptModule)
        assert_same(gm, expected)  # other kernels may round differently
    assert fused.training is training


def test_plain_sequential(gm):
    fused = fuse_in(gm, PATTERNS["fc_bias_gelu"], compiler=None, name="FcGelu")
    assert isinstance(fused, nn.Sequential)
    x = torch.randn(BATCH, SIZE)
    for other in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert type(other).__name__ == "FcGelu"
        assert torch.equal(other(x, gm.bias), fused(x, gm.bias))
    assert repr(fused).splitlines() == [
        "FcGelu(",
        "  (0): Linear(in_features=8, out_features=16, bias=False)",
        "  (1): Call(add)",
        "  (2): Call(gelu)",
        ")",
    ]


@pytest.mark.parametrize("compiler", ["TorchScript", None])
def test_weights_that_a_chain_looks_up_become_arguments(compiler):
    def forward(self, x, n):
        y = torch.cat([x, self.table], dim=0)
        return y[: n.size(0)].clamp(min=0).reshape((-1,)) * self.scale

    model: Any = make(forward)
    model.register_buffer("table", torch.arange(4.0), persistent=False)
    model.scale = nn.Parameter(torch.full((9, 1), 2.0))
    gm = fx.symbolic_trace(model)
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    args = torch.randn(3), torch.zeros(5)
    expected = gm(*args)
    names = list(gm.state_dict())
    chain = (
        nodes if compiler is None else [n for n in nodes if n.name in ("mul", "clamp", "reshape")]
    )
    fused = fuse(gm, chain, compiler=compiler)
    assert torch.equal(gm(*args), expected)
    assert list(fused.state_dict()) == []
    assert list(gm.state_dict()) == names
    (call,) = gm.graph.find_nodes(op="call_module", target="FusedModule_0")
    assert "scale" in [str(v) for v in call.args]


@pytest.fixture
def scripts(monkeypatch):
    """What TorchScript compiles, from an empty cache."""
    compiler, compiled = torchscript._compile, []
    monkeypatch.setattr(torchscript, "_scripts", OrderedDict())
    monkeypatch.setattr(
        torchscript, "_compile", lambda *a: compiled.append(compiler(*a)) or compiled[-1]
    )
    return compiled


def scaled(factor: float) -> Any:
    """Two functions of one name, as the text of each is read by TorchScript."""
    if factor == 2:

        def activation(x: torch.Tensor) -> torch.Tensor:
            return x * 2
    else:

        def activation(x: torch.Tensor) -> torch.Tensor:
            return x * 3

    return activation


@pytest.mark.filterwarnings("ignore")  # of TorchScript, about functions in functions
def test_functions_of_one_name_are_compiled_apart():
    x = torch.randn(3)
    for factor in (2, 3):
        graph = fx.Graph()
        value = graph.placeholder("x")
        last = graph.call_method("relu", (graph.call_function(scaled(factor), (value,)),))
        graph.output(last)
        gm = fx.GraphModule(nn.Module(), graph)
        expected = gm(x)
        nodes = [n for n in gm.graph.nodes if n.op.startswith("call")]
        assert torch.equal(fusion_of(gm, nodes)(x), expected)


@pytest.mark.parametrize("compiler", ["TorchScript", None])
def test_modes_of_children_survive_the_cache(gm, compiler):
    gm.train()
    gm.drop.eval()
    expected = numbers(gm)
    fuse_in(gm, PATTERNS["dropout_add"], compiler=compiler)
    assert_same(gm, expected)


@pytest.mark.parametrize(
    ("modules", "n_scripts"),
    [
        ([nn.Softmax(dim=1), nn.Softmax(dim=1)], 1),
        ([nn.Softmax(dim=1), nn.Softmax(dim=-1)], 2),
        ([nn.Hardtanh(0.0, 1.0), nn.Hardtanh(-0.0, 1.0)], 2),
        ([nn.GELU().eval(), nn.GELU()], 2),
        ([nn.Hardtanh(-1.0, 1.0), nn.Hardtanh(-0.1, 0.1)], 2),
    ],
)
def test_what_counts_as_equal(scripts, modules, n_scripts):
    graphs = [fx.symbolic_trace(nn.Sequential(module)) for module in modules]
    first, second = [fusion_of(gm, list(gm.graph.find_nodes(op="call_module"))) for gm in graphs]
    assert len(scripts) == n_scripts
    first.eval()
    assert second.training, "equal ones are copies"


@pytest.mark.usefixtures("scripts")
def test_what_cannot_be_compared_is_compiled_each_time():
    for value in (object(), torch.ones(1), {1, 2}):
        gm = fx.symbolic_trace(nn.Sequential(nn.GELU()))
        gm.get_submodule("0").note = value
        fusion_of(gm, list(gm.graph.find_nodes(op="call_module")))
    gm.get_submodule("0").register_full_backward_hook(lambda *args: None)
    assert torchscript._scripts == {}


def test_torchscript_with_sizes():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    rows = graph.call_method("size", (y, 0))
    whole = graph.call_function(getattr, (y, "shape"))
    total = graph.call_function(torch.add, (x, y))
    view = graph.call_method("view", (total, rows, -1))
    last = graph.call_method("reshape", (view, whole))
    graph.output(last)
    gm = fx.GraphModule(nn.Module(), graph).eval()
    fuse(gm, [total, view, last])
    (call,) = gm.graph.find_nodes(op="call_module", target="FusedModule_0")
    assert [str(v) for v in call.args] == ["x", "y", "size", "getattr_1"]
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(gm(x, y), x + y)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.idle = nn.Linear(SIZE, SIZE), nn.Linear(1, 1)

    def forward(self, x):
        return self.fc(x)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.bias = inner, nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        return F.gelu(self.inner(x) + self.bias)


class InnerIsLeaf(fx.Tracer):
    def is_leaf_module(self, m, name):
        return name == "inner" or super().is_leaf_module(m, name)


def traced(module: nn.Module) -> nn.Module:
    attach(module, Trace(type(module), InnerIsLeaf().is_leaf_module, InnerIsLeaf().trace(module)))
    return module


@pytest.mark.parametrize("compiler", ["TorchScript", None])
def test_traced_modules_within_traced_modules(compiler):
    inner = traced(Inner())
    gm = traced(Outer(inner))
    expected = numbers(gm)
    fused = fuse_in(gm, lambda x, b: F.gelu(call_module("inner", x) + b), compiler=compiler)
    assert_same(gm, expected)
    assert len(fused.state_dict()) == 4
    assert type(inner).__name__ == "Inner"
    assert isinstance(inner, Traced)
    other = copy.deepcopy(gm)
    assert torch.equal(other(torch.ones(2, SIZE)), gm(torch.ones(2, SIZE)))


def test_torchscript_compiles_the_forward_of_the_class_not_what_a_trace_shows():
    shown = traced(Outer(traced(Inner())))
    inner = shown.get_submodule("inner")
    for node in inner.graph.find_nodes(op="call_module"):
        node.args = (node.args[0], "what proxies have shown need not run")
    reference = Outer(Inner())
    reference.load_state_dict(shown.state_dict())
    fuse_in(shown, lambda x, b: F.gelu(call_module("inner", x) + b))
    x = torch.randn(2, SIZE)
    torch.testing.assert_close(shown(x), reference(x))


def untyped(x: Any) -> Any:
    return next(iter({id(x): x}.values()))


fx.wrap("untyped")


def test_what_torchscript_cannot_compile():
    gm = fx.symbolic_trace(lambda x: untyped(x).relu())
    nodes = [n for n in gm.graph.nodes if n.op.startswith("call")]
    with pytest.raises(SlapoError, match=r"cannot compile 'FusedModule'.*compiler=None") as info:
        fusion_of(gm, nodes)
    assert len(str(info.value)) < 400


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the compiler says of its own insides
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_numbers(gm):
    expected = numbers(gm)
    fused = fuse_in(gm, PATTERNS["fc_bias_gelu"], compiler="inductor")
    assert_same(gm, expected)
    x = torch.randn(BATCH, SEQ, SIZE)
    for clone in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert list(clone.state_dict()) == ["fc1.weight"]
        torch.testing.assert_close(clone(x, gm.bias), fused(x, gm.bias))
