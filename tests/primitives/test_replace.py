"""``.replace`` and ``.replace_all``: whole modules, and matched operations."""

import copy
import functools
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.graph.match.canonical import ModuleState
from slapo.hooks import get_hooks
from slapo.op.linear import LinearWithSyncFunc
from slapo.weights.provenance import Source
from tests.fingerprint import refused
from tests.graph.served import make
from tests.primitives.models import Attention, Block, Stack, Tied

X = torch.randn(3, 4)


# --- whole modules ---------------------------------------------------------------------------
def test_the_root() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)))
    new = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert sch.replace(new) is sch
    assert sch.mod is new
    assert list(sch.child) == ["0", "1"]
    assert slapo.build(sch)[0] is new


def test_the_subtree_is_rebuilt_and_old_nodes_leave() -> None:
    sch = slapo.create_schedule(Stack())
    sch["layers.0"].replace(nn.Sequential(nn.Linear(4, 4)))
    assert list(sch["layers.0"].child) == ["0"]
    assert "layers.0.fc1" not in sch
    live = {id(node) for _, node in sch.named_schedules()}
    assert {id(n) for nodes in sch.state.nodes_of.values() for n in nodes} == live


def test_the_mode_of_the_old_module_is_kept() -> None:
    sch = slapo.create_schedule(Stack().eval())
    assert not sch["layers.0"].replace(Block()).mod.drop.training


def test_a_reduction_within_a_module_moves_along(pair: None) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)))
    sch["0"].shard("weight", 1).sync("fwd_post", "all_reduce")
    (reduction,) = get_hooks(sch["0"].mod)["fwd_post"]
    new = nn.Linear(2, 4, bias=False)
    sch["0"].replace(new)
    assert get_hooks(new)["fwd_post"] == [reduction] == list(new._forward_hooks.values())
    assert sch["0"].metadata.primitives["shard"] == {}
    sch = slapo.create_schedule(Block())
    sch["fc2"].shard("weight", 1).sync("fwd_post", "all_reduce")
    sch.replace(nn.Linear(4, 4), sch.find("fc2"))
    assert len(sch["Linear_0"].mod._forward_hooks) == 1


def test_parameters_on_meta_become_the_old_ones() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    weight = model[0].weight
    new = LinearWithSyncFunc(4, 4, device="meta")
    slapo.create_schedule(model)["0"].replace(new)
    assert new.weight is weight


def test_ties_are_kept() -> None:
    model = Tied()
    sch = slapo.create_schedule(model)
    sch.replace(nn.Linear(4, 8, bias=False), sch.find("head"), name="out")
    assert sch["out_0"].mod.weight is model.emb.weight
    slapo.build(sch)
    model = Tied()
    sch = slapo.create_schedule(model)
    weight = model.emb.weight
    sch["head"].replace(nn.Linear(4, 8, bias=False))
    assert model.head.weight is model.emb.weight is weight

    renamed: Any = make(lambda self, x: x @ self.table.T)
    renamed.table = weight
    sch["head"].replace(renamed)
    assert sch.metadata.tie_weights == {
        "emb.weight": ("head.table",),
        "head.table": ("emb.weight",),
    }
    slapo.build(sch)


# --- replace_all -----------------------------------------------------------------------------
def test_all_of_a_class() -> None:
    model = Stack()
    sch = slapo.create_schedule(model)
    seen: list[tuple[str, type, float]] = []

    def make(path: str, module: nn.Module, p: float) -> nn.Module:
        seen.append((path, type(module), p))
        return nn.Sequential(nn.Dropout(p))

    assert sch.replace_all(nn.Dropout, make, p=0.5) is sch
    assert seen == [(f"layers.{k}.drop", nn.Dropout, 0.5) for k in range(3)]
    assert all(isinstance(layer.drop[0], nn.Dropout) for layer in model.layers)
    assert len(sch.history) == 1


def test_only_below_the_node_and_outermost_first() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Sequential(nn.Sequential(nn.ReLU()))))
    paths: list[str] = []
    sch["0"].replace_all(nn.Sequential, lambda path, m: paths.append(path) or nn.Identity())
    assert paths == ["0.0"]


def test_an_error_of_the_function_changes_nothing() -> None:
    sch = slapo.create_schedule(Stack())
    with refused(sch, ZeroDivisionError, "by zero"):
        sch.replace_all(nn.Linear, lambda p, m: nn.Linear(1 // (p != "head"), 1))


# --- operations ------------------------------------------------------------------------------
class PackedQkv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(4, 12)

    def weight_sources(self) -> dict[str, Source]:
        return {
            f"packed.{n}": Source(tuple(f"{k}.{n}" for k in range(3))) for n in ("weight", "bias")
        }

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.packed(x).chunk(3, -1)


def first_rows(x):
    return x * 2


@pytest.mark.parametrize(
    ("new", "given"),
    [
        (first_rows, "'first_rows' returns one tensor"),
        (lambda x: (x, x), "'_lambda_' returns 2 results"),
        (lambda x: (x, x, x, x), "'_lambda_' returns 4 results"),
        (nn.Sequential(nn.Linear(4, 4)), "'sequential_0' returns one tensor"),
    ],
)
def test_rows_are_not_taken_for_results(new: Any, given: str) -> None:
    sch = slapo.create_schedule(Attention())
    sch.replace(new, sch.find("[qkv]$"))
    items = [node for node in sch.mod.graph.nodes if node.target is operator.getitem]
    assert [node.args[1] for node in items] == [0, 1, 2]
    refusal = f"{given}, but replaces 3 subgraphs.*return a tuple of 3 results"
    for x in (torch.randn(3, 5, 4), torch.randn(1, 5, 4)):
        with pytest.raises(slapo.SlapoError, match=refusal):
            sch.mod(x)


def test_what_a_horizontal_replacement_returns_can_be_part_of_another_match() -> None:
    model = Attention()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    sch.replace(PackedQkv(), sch.find("[qkv]$"), name="QKV")
    assert list(sch.child) == ["out", "QKV_0"]
    assert not sch.find(lambda x: slapo.call_module("QKV_0", x)[3])
    packed = sch.mod.QKV_0.packed

    def pattern(x: Any) -> Any:
        packed = slapo.call_module("QKV_0", x)
        q, k, v = packed[0], packed[1], packed[2]
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    def attend(x: Tensor) -> Tensor:
        q, k, v = packed(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(sch.mod(x), reference(x))
    sch.replace(attend, sch.find(pattern))
    torch.testing.assert_close(sch.mod(x), reference(x))


def test_one_node() -> None:
    sch = slapo.create_schedule(make(lambda self, x: torch.softmax(x, dim=-1)))

    def log_softmax(x: Tensor, dim: int) -> Tensor:
        return torch.log_softmax(x, dim)

    (pair,) = sch.find_node(lambda node: node.target is torch.softmax)
    sch.replace(log_softmax, pair)
    assert torch.allclose(sch.mod(X), torch.log_softmax(X, -1))
    with refused(sch, ValueError, "'x' is the graph's placeholder"):
        sch.replace(log_softmax, ("", next(iter(sch.mod.graph.nodes))))


# --- values by the names of the pattern ------------------------------------------------------
def scores(q: Tensor, k: Tensor, s: float) -> Tensor:
    """Uses the key before the query."""
    return F.gelu(k.transpose(-1, -2) @ q * s)


Q, K = torch.randn(4, 4), torch.randn(4, 4)


def found_scores() -> tuple[Any, Any]:
    sch = slapo.create_schedule(make(lambda self, q, k: scores(q, k, 3.0)))
    (match,) = sch.find(scores)
    return sch, match


def reference_scores(q: Tensor, k: Tensor, s: float = 2.0) -> Tensor:
    return scores(q, k, s)


def half_named(q: Tensor, key: Tensor, s: float = 2.0) -> Tensor:
    return scores(q, key, s)


def key_by_name(query: Tensor, k: Tensor, *, s: float) -> Tensor:
    return scores(query, k, s)


def unnamed(query: Tensor, key: Tensor) -> Tensor:  # in the order of the pattern's arguments
    return scores(query, key, 3.0)


def all_unnamed(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return scores(query, key, scale)


def any_number(*args: Tensor) -> Tensor:
    return scores(*args, 3.0)


IN_ANOTHER_ORDER = make(lambda self, k, s, q: scores(q, k, s))
NAMED = [reference_scores, IN_ANOTHER_ORDER, half_named, key_by_name]


@pytest.mark.parametrize("new", [*NAMED, unnamed, all_unnamed, any_number])
def test_values_go_to_parameters_of_the_same_name(new: Any) -> None:
    sch, match = found_scores()
    sch.replace(new, match)
    sch.mod.graph.lint()
    torch.testing.assert_close(sch.mod(Q, K), scores(Q, K, 3.0))


def test_the_binding_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    sch, match = found_scores()
    with caplog.at_level("INFO", "slapo"):
        sch.replace(half_named, match)
    assert caplog.messages[-1] == (
        "replaced by half_named(q=q, key=k, s=3.0), q, s by name; no parameter has the name of "
        "the pattern's k=k"
    )
    sch, match = found_scores()
    with caplog.at_level("INFO", "slapo"):
        sch.replace(lambda key, query: key, [[*match]])
    assert caplog.messages[-1].endswith("(key=k, query=q), in order of first use")


def test_constants_that_the_user_gives_win() -> None:
    sch, match = found_scores()
    sch.replace(reference_scores, match, concrete_args={"s": 1.0})
    torch.testing.assert_close(sch.mod(Q, K), scores(Q, K, 1.0))
    sch, match = found_scores()
    sch.replace(reference_scores, match, concrete_args={"k": Q.t()[0, 0].item()})
    (call,) = sch.mod.graph.find_nodes(op="call_function", target=reference_scores)
    assert [str(v) for v in call.args] == ["q"]


def test_the_weight_of_a_module_can_be_an_argument() -> None:
    def own_norm(x: Tensor, w: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, (4,), w).exp()

    model: Any = make(lambda self, x: self.norm(x).exp(), norm=nn.LayerNorm(4))
    nn.init.normal_(model.norm.weight)
    expected = model(X)
    sch = slapo.create_schedule(model)
    sch.trace()
    (match,) = sch.find(lambda x, w, b: F.layer_norm(x, (4,), w, b).exp())
    assert match.bindings["w"] == ModuleState("norm", "weight")
    sch.replace(own_norm, match)
    torch.testing.assert_close(sch.mod(X), expected)
    assert list(sch.mod.state_dict()) == ["norm.weight", "norm.bias"]


def both(x: Tensor, s: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.sin(x * s), torch.cos(x * s)


@pytest.mark.parametrize("constants", [{}, {"s": 3.0}], ids=["equal", "given"])
def test_constants_of_several_matches(constants: dict[str, float]) -> None:
    other = 5.0 if constants else 2.0
    sch = slapo.create_schedule(make(lambda self, x: torch.sin(x * 2.0) + torch.cos(x * other)))
    (sine,) = sch.find(lambda x, s: torch.sin(x * s))
    (cosine,) = sch.find(lambda x, s: torch.cos(x * s))
    sch.replace(both, [sine, cosine], concrete_args=constants)
    torch.testing.assert_close(sch.mod(X), sum(both(X, constants.get("s", 2.0))))


def test_fusions_take_their_inputs_in_order() -> None:
    sch, _ = found_scores()
    sch.fuse(sch.find(lambda input_1, input_2: scores(input_1, input_2, 3.0)))
    torch.testing.assert_close(sch.mod(Q, K), scores(Q, K, 3.0))


# --- one node --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "new", "approximate"),
    [
        ("softmax", lambda x, dim: torch.softmax(x, dim), "none"),
        ("gelu", lambda x: F.gelu(x), "none"),
        ("gelu", lambda x, **kwargs: F.gelu(x, **kwargs), "tanh"),
        ("sum", lambda x, dim: torch.sum(x, dim), "none"),
    ],
)
def test_defaults_that_the_new_function_lacks_are_dropped(
    name: str, new: Any, approximate: str
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.gelu(F.softmax(x, dim=-1), approximate=approximate).sum(dim=-1, keepdim=False)

    sch = slapo.create_schedule(make(forward))
    (pair,) = sch.find_node(lambda node: name in node.name)
    sch.replace(new, pair)
    torch.testing.assert_close(sch.mod(X), forward(None, X))


@pytest.mark.parametrize("copied", [False, True])
def test_handles_of_hooks_on_both_modules_work(copied: bool) -> None:
    calls: list[str] = []

    def hooked(linear: nn.Linear, kind: str) -> list[Any]:
        return [
            linear.register_forward_pre_hook(
                lambda *_, **__: calls.append(f"{kind} pre"), with_kwargs=True
            ),
            linear.register_forward_hook(
                lambda *_, **__: calls.append(f"{kind} post"), with_kwargs=True
            ),
            linear.register_full_backward_hook(lambda *_: calls.append(f"{kind} back")),
        ]

    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)))
    old, new = sch["0"].mod, nn.Linear(4, 4)
    handles = [*hooked(old, "old"), *hooked(new, "new")]
    sch["0"].replace(new)
    assert not any(get_hooks(old).values())
    model = copy.deepcopy(sch.mod) if copied else sch.mod
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert calls == [
        f"{kind} {when}" for when in ("pre", "post", "back") for kind in ("old", "new")
    ]
    assert [len(found) for found in get_hooks(model[0]).values()] == [2, 2, 2]
    if copied:
        return
    calls.clear()
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert calls == []
    assert not any(get_hooks(model[0]).values())


@pytest.mark.parametrize("primitive", ["replace", "checkpoint", "fork_rng"])
def test_hooks_of_loading_run(primitive: str) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)))
    seen: list[nn.Module] = []

    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        seen.append(module)
        state[f"{prefix}weight"] = state.pop(f"{prefix}old")

    sch["0"].mod.register_load_state_dict_pre_hook(rename)
    if primitive == "replace":
        sch["0"].replace(nn.Linear(4, 4))
    else:
        getattr(sch["0"], primitive)()
    sch.mod.load_state_dict({"0.old": torch.eye(4), "0.bias": torch.zeros(4)})
    assert seen == [sch["0"].mod]
    torch.testing.assert_close(sch["0"].mod.weight.detach(), torch.eye(4))


def test_a_partial_takes_the_place_of_an_operation() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    wanted = F.gelu(sch.mod[0](torch.ones(2, 4)), approximate="tanh")
    found = sch.find(lambda x: F.gelu(x))
    sch.replace(functools.partial(F.gelu, approximate="tanh"), found)
    assert torch.equal(sch.mod(torch.ones(2, 4)), wanted)
    assert "gelu" in sch.mod.code


# --- what stays, and what is given ---------------------------------------------------------------
def test_a_shared_module_stays_while_it_is_used() -> None:
    model = make(lambda self, x: self.fc(self.fc(x)) + self.fc.bias, fc=nn.Linear(4, 4))
    sch = slapo.create_schedule(model)
    for _ in range(2):
        sch.replace(nn.Identity(), sch.find("fc")[0])
        assert "fc" in sch  # at last its bias is still read
    assert torch.equal(sch.mod(X), X + sch.mod.fc.bias)


def test_modules_within_called_modules_stay() -> None:
    block = nn.Sequential(nn.Linear(4, 4))
    sch = slapo.create_schedule(make(lambda self, x: self.block(self.block[0](x)), block=block))
    sch.trace(recursive=False)
    sch.replace(nn.Identity(), sch.find(r"block\.0"))
    assert "block.0" in sch
    assert torch.equal(sch.mod(X), block(X))


def split_heads(x: Tensor, fc: nn.Module, heads: int) -> Tensor:
    return fc(x).view(x.size(0), x.shape[1], heads, -1).transpose(1, 2)


def shared_size(self: Any, x: Tensor) -> Tensor:
    n = x.size(0)
    return x.exp().view(n, -1) - x.exp().view(n, -1) * 3


def test_sizes_are_given_only_where_they_are_taken() -> None:
    def pattern(x: Any) -> Any:
        return slapo.call_module("[qkv]$", x).view(1).transpose(1, 2)

    parts = {name: nn.Linear(4, 4) for name in "qkv"}
    model = make(lambda s, x: [split_heads(x, fc, 2) for fc in (s.q, s.k, s.v)], **parts)
    x = torch.randn(3, 5, 4)
    expected, sch = model(x), slapo.create_schedule(model)
    # It splits into heads itself, and knows the sizes itself.
    heads = make(
        lambda self, x: tuple(split_heads(x, part, 2) for part in self.parts),
        parts=nn.ModuleList(parts.values()),
    )
    sch.replace(heads, sch.find(pattern))
    assert not [node for node in sch.mod.graph.nodes if node.target == "size"]
    torch.testing.assert_close(sch.mod(x), expected)

    # A size that others share is an input, which a replacement may take or not.
    sch = slapo.create_schedule(make(shared_size))
    taking, leaving = sch.find(lambda x: x.exp().view(1))
    sch.replace(lambda x, n: x.exp().view(n, -1), taking)
    sch.replace(lambda x: x.exp().view(x.size(0), -1), leaving)
    calls = [node for node in sch.mod.graph.nodes if "lambda" in node.name]
    assert [len(node.args) for node in calls] == [2, 1]
    assert torch.equal(sch.mod(X), shared_size(None, X))


def test_a_horizontal_call_stands_after_its_inputs_and_before_its_uses() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, z = x.exp(), y.sin()
        b = x * z
        return a * 2, (x + z), b

    sch = slapo.create_schedule(make(forward))
    sch.trace()
    nodes = {node.name: ("", node) for node in sch.mod.graph.nodes}
    sch.replace(lambda x, z: (x + z, x * z), [[nodes["add"]], [nodes["mul"]]])
    torch.testing.assert_close(sch.mod(X, X), forward(None, X, X))


def test_horizontal_refusals() -> None:
    sch = slapo.create_schedule(make(lambda s, x, y: x.exp() + y.exp() + x.exp().relu()))
    first, second, _ = sch.find(lambda a: a.exp())
    for matches, message in (
        ([first, second], r"different inputs: \[x\] and \[y\]"),
        ([first, first], "is in several of the subgraphs"),
    ):
        with refused(sch, ValueError, message):
            sch.replace(lambda *args: args, matches)
