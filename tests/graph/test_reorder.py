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
from tests.graph.rewrites import (
    fuse,
    fusion_of,
    replace_horizontal,
    replace_node,
    replace_vertical,
)

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


def record(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, as a node of its own while there is a trace."""
    if TRACERS:
        return TRACERS[-1].create_proxy("call_function", function, args, {})
    return function(*args)


class OwnDropout(nn.Module):
    """Draws without a child that does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.attention_dropout, self.training)


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
        self.own_dropout = OwnDropout()
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


def numbers(module: nn.Module, state: dict[str, Tensor]) -> list[Any]:
    """Values, gradients and buffers of one training step from `state`."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for key, tensor in tensors.items():
            tensor.copy_(state[key.rsplit(".", 1)[-1] + str(tuple(tensor.shape))])
    module.zero_grad()
    torch.manual_seed(1)
    x, y = (torch.randn(3, SIZE, requires_grad=True) for _ in range(2))
    out = module(x * 1, y * 1)
    total = sum(o.float().square().sum() for o in (out if isinstance(out, tuple) else [out]))
    if total.requires_grad:
        total.backward()
    grads = sorted(
        (float(p.grad.sum()), float(p.grad.norm()))
        for p in module.parameters()
        if p.grad is not None
    )
    buffers = sorted((float(b.double().sum()), b.shape) for b in module.buffers())
    return [total, x.grad, y.grad, grads, buffers]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A value for each shape and name, whatever the module that holds it is called."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        found.setdefault(key.rsplit(".", 1)[-1] + str(tuple(tensor.shape)), tensor.detach().clone())
    return found


def pick(gm: fx.GraphModule, names: str) -> list[fx.Node]:
    nodes = {node.name: node for node in gm.graph.nodes}
    return [nodes[name] for name in names.split()]


def by_fusion(gm: fx.GraphModule, *chains: str) -> None:
    (chain,) = (pick(gm, names) for names in chains)
    fuse(gm, chain, compiler=None, name="Fused")


class SideBySide(nn.Module):
    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        return tuple(part(*inputs) for part in self.parts)


def by_one_call(gm: fx.GraphModule, *chains: str) -> None:
    picked = [pick(gm, names) for names in chains]
    parts = [fusion_of(gm, chain, compiler=None) for chain in picked]
    replace_horizontal(gm, picked, SideBySide(parts), name="Both")


def rewrite(gm: fx.GraphModule, chains: Sequence[str]) -> None:
    (by_fusion if len(chains) == 1 else by_one_call)(gm, *chains)


def no_grad_behind(m, x, y):
    record(set_raw, False)
    h = m.fc(x)
    record(set_raw, True)
    return h.relu() + y


def no_grad_ahead(m, x, y):
    h = m.fc(x)
    record(set_raw, False)
    h = h.relu()
    record(set_raw, True)
    return h + y


def raw_switch(m, x, y):
    record(set_raw, False)
    h = m.fc(x)
    record(set_raw, True)
    return h.relu() + y


def autocast_behind(m, x, y):
    region = record(enter_raw, "cpu", torch.bfloat16, True, True)
    h = m.fc(x)
    record(exit_raw, region)
    return h.float().cos() + y


def autocast_ahead(m, x, y):
    h = m.fc(x)
    region = record(enter_raw, "cpu", torch.bfloat16, True, True)
    h = h.cos()
    record(exit_raw, region)
    return h + y


def inference_behind(m, x, y):
    region = record(enter_inference, True)
    h = m.fc(x)
    record(exit_inference, region)
    return h.relu() + y


def write_of_an_item(m, x, y):
    h = x.exp()
    x[0].add_(1)
    return h.relu() * x, m.fc(x)


def write_through_a_view(m, x, y):
    h = x.exp()
    x.view(-1).mul_(2)
    return h.relu() * x


def write_through_a_chain_of_views(m, x, y):
    h = x.exp()
    x.t().unsqueeze(0).narrow(1, 0, 2).mul_(2)
    return h.relu() * x


def write_of_what_was_viewed(m, x, y):
    v = x.view(-1)
    h = v.exp()
    x.add_(1)
    return h.relu() * v


def write_by_setitem(m, x, y):
    h = x.exp()
    record(operator.setitem, x, (slice(None), 0), 1.0)
    return h.relu() * x


def write_by_out(m, x, y):
    h = m.scale.exp()
    torch.add(m.scale, 1, out=m.scale)
    return h.relu() + x


def write_by_a_function(m, x, y):
    h = x.exp()
    z = F.relu(x, inplace=True)
    return h.relu() + z


def write_by_a_module(m, x, y):
    h = x.exp()
    z = m.relu_(x)
    return h.relu() + z


def write_by_a_module_through_a_view(m, x, y):
    h = x.exp()
    z = m.relu_(m.identity(x)[1:])
    return h.relu(), z, x


def write_by_a_sequence(m, x, y):
    h = x.exp()
    z = m.flat_relu_(x)
    return h.relu() + z


def write_in_the_chain(m, x, y):
    z = m.relu_(x)
    early = x * 3
    return z.exp() + early * 0, early


def write_in_the_chain_behind_a_reader(m, x, y):
    h = y.exp()
    early = m.fc(x)
    return early, x.add_(h) * 2


def write_of_a_weight(m, x, y):
    h = m.frozen(x.detach())
    m.frozen.weight.mul_(2)
    return h.relu() + y


def write_of_a_tied_weight(m, x, y):
    h = m.frozen(x.detach())
    m.tied.weight.mul_(2)
    return h.relu() + y


def write_of_a_buffer(m, x, y):
    h = x.detach() * m.scale
    m.scale.add_(1)
    return h.relu() + y


def statistics(m, x, y):
    h = m.norm(x)
    z = m.norm(y * 3)
    return h.relu() + z


def statistics_by_a_function(m, x, y):
    norm = m.norm
    h = m.norm(x)
    z = F.batch_norm(y, norm.running_mean, norm.running_var, training=True)
    return h.relu() + z


def rows_made_shorter(m, x, y):
    rows = m.table.weight * 2
    z = m.table((y > 0).long())
    return rows.relu().sum(0) + z.sum(1)


def two_dropouts(m, x, y):
    h = m.drop(x)
    z = m.other_drop(y)
    return h.relu() + z


def dropout_and_function(m, x, y):
    h = m.drop(x)
    z = F.dropout(y, 0.5, True)
    return h.relu() + z


def dropout_and_noise(m, x, y):
    h = F.dropout(x)
    z = y + torch.rand_like(y)
    return h.relu() + z


def dropout_and_method(m, x, y):
    h = F.dropout1d(x)
    z = y * y.new_empty(3, SIZE).bernoulli_(0.5)
    return h.relu() + z


def dropout_and_a_module_with_dropout(m, x, y):
    h = m.random(x)
    z = m.drop(y)
    return h.relu() + z


def dropout_and_a_module_of_its_own(m, x, y):
    h = m.drop(x)
    z = m.own_dropout(y)
    return h.relu() + z


def dropout_and_attention(m, x, y):
    h = m.drop(x)
    z = F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)
    return h.relu() + z


def seeded(m, x, y):
    h = m.drop(x)
    record(torch.manual_seed, 7)
    return h.relu() + y


def side_by_side_with_dropout(m, x, y):
    a = m.fc(x)
    z = m.other_drop(y)
    b = m.drop(x)
    return a * b + z


def side_by_side_with_a_write(m, x, y):
    a = m.frozen(x)
    record(operator.setitem, x, 0, 0.0)
    b = m.tied(x)
    return a * b


def side_by_side_in_regions(m, x, y):
    a = m.fc(x)
    record(set_raw, False)
    b = m.other(x)
    record(set_raw, True)
    return a * b


MOVED = [
    (no_grad_behind, ["fc relu"], r"'fc' .*'relu'.*'_set_grad_enabled_1'.*no_grad"),
    (no_grad_ahead, ["fc relu"], r"'fc' .*'relu'.*'_set_grad_enabled'"),
    (raw_switch, ["fc relu"], r"'fc' .*'relu'.*'_set_grad_enabled"),
    (autocast_behind, ["fc float_1 cos"], r"'fc' .*'cos'.*'_exit_autocast'"),
    (autocast_ahead, ["fc cos"], r"'fc' .*'cos'.*'_enter_autocast'"),
    (inference_behind, ["fc relu"], r"'fc' .*'relu'.*'_exit_inference_mode'"),
    (write_of_an_item, ["exp relu"], r"'exp' .*'add_'.*in place"),
    (write_through_a_view, ["exp relu"], r"'exp' .*'mul_'.*in place"),
    (write_through_a_chain_of_views, ["exp relu"], r"'exp' .*'mul_'.*in place"),
    (write_of_what_was_viewed, ["exp relu"], r"'exp' .*'add_'.*in place"),
    (write_by_setitem, ["exp relu"], r"'exp' .*'setitem'.*in place"),
    (write_by_out, ["exp relu"], r"'exp' .*'add'.*in place"),
    (write_by_a_function, ["exp relu_1"], r"'exp' .*'relu'.*in place"),
    (write_by_a_module, ["exp relu"], r"'exp' .*'relu_'.*in place"),
    (write_by_a_module_through_a_view, ["exp relu"], r"'exp' .*'relu_'.*in place"),
    (write_by_a_sequence, ["exp relu"], r"'exp' .*'flat_relu_'.*in place"),
    (write_in_the_chain, ["relu_ exp"], r"'relu_' .*in place.*'mul'"),
    (write_of_a_weight, ["frozen relu"], r"'frozen' .*'mul_'.*in place"),
    (write_of_a_tied_weight, ["frozen relu"], r"'frozen' .*'mul_'.*in place"),
    (write_of_a_buffer, ["mul relu"], r"'mul' .*'add_'.*in place"),
    (statistics, ["norm relu"], r"'norm' .*'norm_1'.*in place"),
    (statistics_by_a_function, ["norm relu"], r"'norm' .*'batch_norm'.*in place"),
    (rows_made_shorter, ["mul relu"], r"'mul' .*'table'.*in place"),
    (two_dropouts, ["drop relu"], r"'drop' .*'other_drop'.*random"),
    (dropout_and_function, ["drop relu"], r"'drop' .*'dropout'.*random"),
    (dropout_and_noise, ["dropout relu"], r"'dropout' .*'rand_like'.*random"),
    (dropout_and_method, ["dropout1d relu"], r"'dropout1d' .*'bernoulli_'.*random"),
    (dropout_and_a_module_with_dropout, ["random relu"], r"'random' .*'drop'.*random"),
    (dropout_and_a_module_of_its_own, ["drop relu"], r"'drop' .*'own_dropout'.*random"),
    (dropout_and_attention, ["drop relu"], r"'drop' .*'scaled_dot_product_attention'.*random"),
    (seeded, ["drop relu"], r"'drop' .*'manual_seed'.*random"),
    (side_by_side_with_dropout, ["fc", "drop"], r"'drop' .*'other_drop'.*random"),
    (side_by_side_with_a_write, ["frozen", "tied"], r"'tied' .*'setitem'.*in place"),
    (side_by_side_in_regions, ["fc", "other"], r"'other' .*'fc'.*'_set_grad_enabled'"),
]


@pytest.mark.parametrize(
    ("code", "chains", "message"), MOVED, ids=[code.__name__ for code, *_ in MOVED]
)
def test_what_would_change_the_numbers_is_refused(code, chains, message):
    gm = traced(code)
    state = state_of(gm)
    expected = numbers(gm, state)
    before = str(gm.graph), list(gm.state_dict())
    with pytest.raises(ValueError, match=message):
        rewrite(gm, chains)
        torch.testing.assert_close(numbers(gm, state), expected)  # else it says what went wrong
    assert (str(gm.graph), list(gm.state_dict())) == before


def past_a_whole_region(m, x, y):
    h = m.fc(x)
    record(set_raw, False)
    z = y.exp()
    region = record(enter_raw, "cpu", torch.bfloat16, True, True)
    z = m.other(z)
    record(exit_raw, region)
    record(set_raw, True)
    return h.relu() + z


def within_a_region(m, x, y):
    record(set_raw, False)
    h = m.frozen(x)
    z = y.exp()
    h = h.relu()
    record(set_raw, True)
    return h + y * z


def a_region_of_its_own(m, x, y):
    h = m.fc(x)
    record(set_raw, False)
    z = h.exp()
    record(set_raw, True)
    return (h * z).relu() + y


def past_writes_to_others(m, x, y):
    h = m.fc(x)
    y[0].add_(1)
    record(operator.setitem, y, 1, 1.0)
    m.relu_(y)
    return h.relu() + y


def past_a_private_write(m, x, y):
    h = x.exp()
    z = (x * 2).relu_()
    return h.relu() + z


def past_the_norm_of_another_layer(m, x, y):
    h = m.norm(x)
    z = m.second_norm(y)
    return h.relu() + z


def past_dropout_that_is_off(m, x, y):
    h = m.drop(x)
    z = m.zero_drop(y) + F.dropout(y, 0.5, False) + F.dropout(y, p=0.0)
    z = z + F.scaled_dot_product_attention(y, y, y, dropout_p=0.0)
    return h.relu() + z


def sizes_past_a_write(m, x, y):
    rows = x.size(0)
    x.add_(1)
    return m.fc(x).view(rows, -1) + y


def side_by_side(m, x, y):
    a = m.fc(x)
    z = m.drop(y)
    b = m.other(x)
    return a * b + z


UNMOVED = [
    (past_a_whole_region, ["fc relu"]),
    (within_a_region, ["frozen relu"]),
    (a_region_of_its_own, ["fc _set_grad_enabled exp _set_grad_enabled_1 mul relu"]),
    (past_writes_to_others, ["fc relu"]),
    (past_a_private_write, ["exp relu"]),
    (past_the_norm_of_another_layer, ["norm relu"]),
    (past_dropout_that_is_off, ["drop relu"]),
    (sizes_past_a_write, ["size fc view"]),
    (side_by_side, ["fc", "other"]),
]


@pytest.mark.parametrize(("code", "chains"), UNMOVED, ids=[code.__name__ for code, _ in UNMOVED])
def test_what_leaves_the_numbers_is_done(code, chains):
    gm = traced(code)
    state = state_of(gm)
    expected = numbers(gm, state)
    rewrite(gm, chains)
    gm.graph.lint()
    assert gm.graph.find_nodes(op="call_module", target="Fused_0" if len(chains) == 1 else "Both_0")
    torch.testing.assert_close(numbers(gm, state), expected, rtol=0, atol=0)


def past_a_checkpoint(m, x, y):
    h = m.second_norm(x)
    z = m.norm(y * m.scale).relu()
    return h.relu() + z


def past_a_checkpoint_of_the_same(m, x, y):
    h = m.norm(x)
    z = m.norm(y * m.scale).relu()
    return h.relu() + z


@pytest.mark.parametrize(
    ("code", "names"),
    [(past_a_checkpoint, "norm relu"), (past_a_checkpoint_of_the_same, "norm_1 relu")],
)
def test_a_checkpoint_has_the_effects_of_its_operations(code, names):
    gm = traced(code)
    state = state_of(gm)
    chain = pick(gm, names)
    carry_out(gm, Checkpoint(gm, chain, None, False, None), keep_modules=True)
    expected = numbers(gm, state)
    if code is past_a_checkpoint:
        rewrite(gm, ["second_norm relu_1"])
        torch.testing.assert_close(numbers(gm, state), expected, rtol=0, atol=0)
        return
    with pytest.raises(ValueError, match=r"'norm' .*'check_point_wrapper_0'.*in place"):
        rewrite(gm, ["norm relu_1"])
        torch.testing.assert_close(numbers(gm, state), expected)


def sizes_past_a_change_of_shape(m, x, y):
    columns = x.size(1)
    x.t_()
    return (m.scale.sum() * y).view(columns, -1) + x.sum()


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


def test_sizes_change_with_the_shape():
    gm = traced(sizes_past_a_change_of_shape)
    with pytest.raises(ValueError, match="'size' would move past 't_'"):
        rewrite(gm, ["size view"])


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
