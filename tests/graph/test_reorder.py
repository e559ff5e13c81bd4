"""Operations that become one call move to its place: only where the numbers stay."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from slapo.graph.rewrite.effects import Effects
from slapo.graph.rewrite.rules import carry_out
from slapo.primitives.checkpoint import Checkpoint
from tests.entries import Entries
from tests.graph.rewrites import (
    SideBySide,
    fuse,
    fusion_of,
    outcome,
    replace_horizontal,
    replace_node,
    replace_vertical,
)
from tests.graph.served import make

SIZE = 8
enter_inference = torch.autograd.grad_mode._enter_inference_mode
exit_inference = torch.autograd.grad_mode._exit_inference_mode
enter_raw = torch.amp.autocast_mode._enter_autocast
exit_raw = torch.amp.autocast_mode._exit_autocast
set_raw = torch._C._set_grad_enabled


class Recorder(fx.Tracer):
    """Every child is a leaf, and buffers are looked up as parameters are."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


TRACERS: list[fx.Tracer] = []
#: Code, the operations that become one call, and what is said of that.
ENTRIES = Entries("moves.txt", globals())


def record(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, as a node of its own while there is a trace."""
    if TRACERS:
        return TRACERS[-1].create_proxy("call_function", function, args, {})
    return function(*args)


def own_dropout() -> Any:
    """Draws without a child that does."""
    module: Any = make(lambda self, x: F.dropout(x, self.attention_dropout, self.training))
    module.attention_dropout = 0.5
    return module


class Model(nn.Module):
    """Children for all cases; its forward is the case."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.code = code
        self.fc, self.other = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.tied = nn.Linear(SIZE, SIZE, bias=False)
        self.tied.weight = self.frozen.weight
        self.norm = nn.BatchNorm1d(SIZE)
        self.second_norm = nn.BatchNorm1d(SIZE)
        self.drop, self.other_drop = nn.Dropout(0.5), nn.Dropout(0.5)
        self.zero_drop = nn.Dropout(0.0)
        self.random = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5))
        self.own_dropout = own_dropout()
        self.relu_ = nn.ReLU(inplace=True)
        self.flat_relu_ = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
        self.identity = nn.Identity()
        self.table = nn.Embedding(4, SIZE, max_norm=0.1)
        self.register_buffer("scale", torch.full((SIZE,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.code(self, x, y)


def traced(code: Callable[..., Any]) -> fx.GraphModule:
    torch.manual_seed(0)
    model = Model(code)
    TRACERS.append(Recorder())
    try:
        graph = TRACERS[-1].trace(model)
    finally:
        TRACERS.pop()
    return fx.GraphModule(model, graph)


def kept(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Tensors of a module, and their values."""
    return [(t, t.detach().clone()) for t in (*module.parameters(), *module.buffers())]


def numbers(module: nn.Module, before: list[tuple[Tensor, Tensor]]) -> list[Any]:
    """One training step from the values of `before`."""
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)
    return outcome(module, *torch.randn(2, 3, SIZE, generator=torch.Generator().manual_seed(1)))


def pick(gm: fx.GraphModule, names: str) -> list[fx.Node]:
    nodes = {node.name: node for node in gm.graph.nodes}
    return [nodes[name] for name in names.split()]


def by_fusion(gm: fx.GraphModule, *chains: str) -> None:
    (chain,) = (pick(gm, names) for names in chains)
    fuse(gm, chain, compiler=None, name="Fused")


def by_one_call(gm: fx.GraphModule, *chains: str) -> None:
    picked = [pick(gm, names) for names in chains]
    parts = [fusion_of(gm, chain, compiler=None) for chain in picked]
    replace_horizontal(gm, picked, SideBySide(*parts), name="Both")


def rewrite(gm: fx.GraphModule, chains: Sequence[str]) -> None:
    (by_fusion if len(chains) == 1 else by_one_call)(gm, *chains)


def in_no_grad(code: Callable[..., Any], *args: Any) -> Any:
    record(set_raw, False)
    out = code(*args)
    record(set_raw, True)
    return out


def in_autocast(code: Callable[..., Any], *args: Any) -> Any:
    region = record(enter_raw, "cpu", torch.bfloat16, True, True)
    out = code(*args)
    record(exit_raw, region)
    return out


def in_inference(code: Callable[..., Any], *args: Any) -> Any:
    region = record(enter_inference, True)
    out = code(*args)
    record(exit_inference, region)
    return out


def no_grad_ahead(m, x, y):
    return in_no_grad(torch.relu, m.fc(x)) + y


def around(first: Callable[..., Any], between: Callable[..., Any]) -> Callable[..., Any]:
    """An operation, one in between, and a ReLU to fuse the first with; a tuple's last counts."""

    def code(m, x, y):
        h = first(m, x)
        z = between(m, x, y)
        return h.relu() + (z[-1] if isinstance(z, tuple) else z)

    return code


two_dropouts = around(lambda m, x: m.drop(x), lambda m, x, y: m.other_drop(y))


def a_region_of_its_own(m, x, y):
    h = m.fc(x)
    z = in_no_grad(torch.exp, h)
    return (h * z).relu() + y


@pytest.mark.parametrize("title", ENTRIES.titles)
def test_what_would_change_the_numbers_is_refused_and_else_it_is_done(
    title: str, update_golden: bool
) -> None:
    def tell(code: Any, chains: Any) -> str:
        gm, chains = traced(code), [chains] if isinstance(chains, str) else chains
        before = str(gm.graph), list(gm.state_dict())
        try:
            rewrite(gm, chains)
        except ValueError as error:
            assert (str(gm.graph), list(gm.state_dict())) == before
            return str(error)
        gm = traced(code)
        state = kept(gm)
        expected = numbers(gm, state)
        rewrite(gm, chains)
        gm.graph.lint()
        name = "Fused_0" if len(chains) == 1 else "Both_0"
        assert gm.graph.find_nodes(op="call_module", target=name)
        torch.testing.assert_close(numbers(gm, state), expected, rtol=0, atol=0)
        return "done"

    ENTRIES.check(title, tell, update_golden)


past_a_checkpoint, past_a_checkpoint_of_the_same = (
    around(first, lambda m, x, y: m.norm(y * m.scale).relu())
    for first in (lambda m, x: m.second_norm(x), lambda m, x: m.norm(x))
)


@pytest.mark.parametrize("same", [False, True])
def test_a_checkpoint_has_the_effects_of_its_operations(same):
    gm = traced(past_a_checkpoint_of_the_same if same else past_a_checkpoint)
    state = kept(gm)
    chain = pick(gm, "norm_1 relu" if same else "norm relu")
    carry_out(gm, Checkpoint(gm, chain, None, False, None), keep_modules=True)
    expected = numbers(gm, state)
    if same:
        with pytest.raises(ValueError, match=r"'norm' .*'check_point_wrapper_0'.*in place"):
            rewrite(gm, ["norm relu_1"])
    else:
        rewrite(gm, ["second_norm relu_1"])
        torch.testing.assert_close(numbers(gm, state), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "names",
    [
        "fc _set_grad_enabled exp mul",  # entered and not left
        "exp _set_grad_enabled_1 mul",  # left and not entered
        "fc _set_grad_enabled _set_grad_enabled_1 mul",  # what it encloses stays outside
        "_set_grad_enabled",
    ],
)
def test_parts_of_regions_are_refused(names):
    gm = traced(a_region_of_its_own)
    before = str(gm.graph)
    for act in (
        lambda nodes: fusion_of(gm, nodes, compiler=None),
        lambda n: replace_vertical(gm, n, lambda *x: x),
    ):
        with pytest.raises(ValueError, match=r"_set_grad_enabled(_1)?'.*region|used outside"):
            act(pick(gm, names))
    assert str(gm.graph) == before


@pytest.mark.parametrize("cast", ["bool", "byte", "cdouble", "float", "to", "type"])
def test_a_cast_may_be_the_tensor_itself(cast):
    gm = fx.symbolic_trace(lambda x: getattr(x, cast)())
    x, same, _ = gm.graph.nodes
    assert Effects(gm).roots([same]) == {x}


def test_one_node_is_not_moved():
    gm = traced(two_dropouts)
    fusion_of(gm, pick(gm, "drop"), compiler=None)
    (node,) = pick(traced(no_grad_ahead), "_set_grad_enabled")
    with pytest.raises(ValueError, match="whole region"):
        replace_node(node.graph.owning_module, node, lambda enabled: None)


def hidden_draw(m, x, y):
    h = m.drop(x).relu()
    z = m.other_drop(y)
    return h.exp() + z


@pytest.mark.parametrize("new", ["fuse", lambda x: x * 1])
def test_what_a_rewrite_has_put_in_keeps_its_effects(new):
    gm = traced(hidden_draw)
    chain = pick(gm, "drop relu")
    call = replace_vertical(
        gm, chain, fusion_of(gm, chain, compiler=None) if new == "fuse" else new
    )
    with pytest.raises(ValueError, match=r"'other_drop'.*random"):
        replace_vertical(gm, [call, *pick(gm, "exp")], torch.exp)
    gm = traced(hidden_write)
    chain = pick(gm, "add_ relu")
    replace_vertical(gm, chain, fusion_of(gm, chain, compiler=None) if new == "fuse" else new)
    with pytest.raises(ValueError, match=r"'exp' would move past.*in place"):
        replace_vertical(gm, pick(gm, "exp cos"), torch.exp)


def hidden_write(m, x, y):
    h = x.exp()
    z = x.add_(1).relu()
    return h.cos() + z


def test_the_way_between_is_walked_once(monkeypatch):
    def steps(length: int) -> int:
        def code(m, x, y):
            h = x.exp()
            for _ in range(length):
                y = y.view(-1).mul_(1).view(3, SIZE)
            return h.relu() + y

        gm = traced(code)
        asked: list[fx.Node] = []
        viewed = Effects.viewed
        with monkeypatch.context() as patch:
            patch.setattr(Effects, "viewed", lambda s, n: asked.append(n) or viewed(s, n))
            replace_vertical(gm, pick(gm, "exp relu"), torch.exp)
        return len(asked)

    assert steps(200) < 10.5 * steps(20)


def fifty_times(x, b):
    for _ in range(50):
        x = F.gelu(x + b) * 2
    return x


def test_a_rewrite_never_walks_the_graph(monkeypatch):
    gm = fx.symbolic_trace(fifty_times)
    sums = [node for node in gm.graph.nodes if node.target is operator.add]

    def walk(self):
        raise AssertionError("walked the graph")

    with monkeypatch.context() as patch:
        patch.setattr(gm, "recompile", lambda: None)
        patch.setattr(type(gm.graph.nodes), "__iter__", walk)
        for number, node in enumerate(sums):
            (gelu,) = node.users
            new = torch.add if number < 25 else nn.Bilinear(1, 1, 1)
            replace_vertical(gm, [node, gelu], new)
    gm.graph.lint()
    assert [str(n.target) for n in gm.graph.nodes if n.op == "call_module"][-1] == "Bilinear_24"
