"""Captures: whatever the call, a rewritten module computes what the plain one does."""

import copy
import gc
import operator
import random
import time
import weakref
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import slapo
from slapo.graph.trace.capture import capture
from tests.graph.served import Tripled, assert_alike, make, number_of_captures, rewritten, trace
from tests.versions import TORCH, asks_no_device


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape)


# --- sizes ---------------------------------------------------------------------------------------
def arithmetic(self: Any, x: Tensor) -> Tensor:
    return x.new_ones(x.shape[0] // 2 + 1, x.numel() - 1, max(x.size(1) - 2, 1)) / x.size(1)


def by_rank(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x).squeeze(1)
    return y if y.dim() == 3 else y * 2


def by_rank_of_all(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x).squeeze()
    return y.unsqueeze(1) if y.ndim == 2 else y * 3


SIZES: dict[str, tuple[Any, dict[str, nn.Module], list[tuple[int, ...]]]] = {
    "equal in the example": (
        lambda self, x: self.conv(x).flatten(1),
        {"conv": nn.Conv2d(3, 3, 3)},
        [(3, 3, 5, 5), (4, 3, 7, 6), (1, 3, 4, 4)],
    ),
    "asked to be equal": (
        lambda self, x: x * 2 if x.size(0) == x.size(1) else x,
        {},
        [(3, 3), (4, 4), (4, 5), (1, 1), (0, 0)],
    ),
    "arithmetic": (arithmetic, {}, [(5, 7), (4, 3), (1, 2)]),
    "a branch": (
        lambda self, x: x * 2 if x.size(0) > 4 else -x,
        {},
        [(5, 7), (6, 2), (3, 7), (1, 1), (0, 2)],
    ),
    "zero": (lambda self, x: -x if x.size(1) == 0 else x, {}, [(3, 5), (3, 0), (3, 1)]),
    "one": (lambda self, x: -x if x.size(1) == 1 else x, {}, [(3, 5), (3, 1), (1, 1), (3, 0)]),
    "a loop": (
        lambda self, x: sum(x[i] * i for i in range(x.size(0))),
        {},
        [(3, 5), (3, 7), (4, 5), (1, 2)],
    ),
    "in a set": (lambda self, x: x * 2 if x.size(0) in {3, 5} else x, {}, [(3, 4), (5, 4), (4, 4)]),
    "a type": (lambda self, x: x * 2 if isinstance(x.shape[0], int) else x, {}, [(3, 4), (5, 4)]),
    "squeezed": (by_rank, {"fc": nn.Linear(8, 8)}, [(2, 5, 8), (2, 1, 8), (1, 5, 8), (1, 1, 8)]),
    "all squeezed": (
        by_rank_of_all,
        {"fc": nn.Linear(8, 8)},
        [(2, 5, 8), (2, 1, 8), (1, 5, 8), (1, 1, 8)],
    ),
    "rank": (lambda self, x: x.sum(-1) if x.dim() == 2 else x, {}, [(3, 5), (3,), (2, 3, 4), ()]),
}


@pytest.mark.parametrize("name", SIZES)
def test_calls_of_any_size_are_served(name: str) -> None:
    forward, children, (example, *others) = SIZES[name]
    plain = make(forward, **children)
    module = rewritten(copy.deepcopy(plain), randn(*example))
    for shape in (example, *others, example):
        assert_alike(module, plain, randn(*shape))


def test_one_capture_serves_all_sizes_that_no_code_asks_about() -> None:
    plain = make(lambda self, x: self.fc(x).flatten(0, 1), fc=nn.Linear(5, 5))
    module = rewritten(copy.deepcopy(plain), randn(3, 4, 5))
    for batch, length in ((2, 7), (5, 3), (8, 8)):
        assert_alike(module, plain, randn(batch, length, 5))
    assert number_of_captures(module) == 1
    assert_alike(module, plain, randn(1, 7, 5))
    assert number_of_captures(module) == 2


# --- arguments -----------------------------------------------------------------------------------
def signature(self: Any, x: Tensor, scale: float = 2.0, *more: Tensor, flag: bool = True, **k: Any):
    out = x * scale + k.get("bias", 0) + sum(more)
    return {"out": out if flag else -out, "pair": (x, None), "scale": scale}


def nested(self: Any, x: Tensor, rope: tuple[Any, ...]) -> Tensor:
    return x * rope[0] + rope[1]["shift"] * rope[1].get("factor", 3)


def optional(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    y = self.fc(x)
    return F.gelu(torch.tanh(y + mask)) if mask is not None else F.gelu(torch.sigmoid(y * 2))


def by_dtype(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, 0.0) if mask.dtype == torch.bool else x + mask


def chooses(self: Any, x: Tensor, kind: Any = 1, *rest: Tensor, **more: Any) -> Tensor:
    if x.requires_grad or x.dtype == torch.float64 or kind is True or rest:
        return x * 3
    return x * more["pair"][0] * kind


def broadcast(self: Any, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
    y = self.fc(x).view(x.size(0), x.size(1), 2, 4) * positions.unsqueeze(2)
    y = y.reshape(x.size(0), x.size(1), -1)
    y = y + 1 if positions.size(0) > 1 else y
    return y if mask is None else y * mask


def asks(question: Any) -> Any:
    return lambda self, x: x * 2 if question(x) else x


X, MASK = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), torch.ones(3, 4)
WIDE = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
PAIR = (torch.ones(4), torch.ones(2))
FC = {"fc": nn.Linear(4, 4)}

#: What a module does, its children, and calls: the first is the example.
CALLS: dict[str, tuple[Any, dict[str, nn.Module], list[Any]]] = {
    "signature": (
        signature,
        {},
        [
            ((X,), {"bias": ones(4)}),
            ((X,), {}),
            ((X, 3.0), {}),
            ((X,), {"scale": 3.0}),
            ((X, 2.0, X, X), {}),
            ((X,), {"flag": False}),
            ((X,), {"bias": X, "more": 1}),
        ],
    ),
    "nested": (
        nested,
        {},
        [
            ((X, (X, {"shift": X, "factor": 2})), {}),
            ((X, (X, {"shift": X, "factor": 3})), {}),
            ((X, (X, {"shift": X})), {}),
            ((X, [X, {"shift": X}, X]), {}),
        ],
    ),
    "optional": (optional, FC, [((X, X), {}), ((X,), {}), ((X, None), {}), ((X,), {"mask": X})]),
    "dtypes": (by_dtype, {}, [((X, MASK), {}), ((X, MASK.bool()), {}), ((X, ones(4)), {})]),
    "kinds": (
        chooses,
        {},
        [
            ((X,), {"pair": PAIR}),
            ((X.double(),), {"pair": PAIR}),
            ((X.clone().requires_grad_(),), {"pair": PAIR}),
            ((X[0],), {"pair": PAIR}),
            ((X, True), {"pair": PAIR}),
            ((X, 1), {"pair": PAIR}),
            ((X, 1, X), {"pair": PAIR}),
            ((X,), {"pair": (*PAIR, X)}),
            ((X,), {"pair": PAIR, "third": X}),
        ],
    ),
    "broadcast": (
        broadcast,
        {"fc": nn.Linear(8, 8)},
        [
            ((WIDE, randn(1, 5, 4)), {}),
            ((WIDE, randn(3, 5, 4)), {}),
            ((WIDE[:1], randn(1, 5, 4)), {}),
            ((WIDE, randn(3, 5, 4), ones(3, 5, 1)), {}),
            ((WIDE, randn(1, 5, 4), ones(3, 5, 1)), {}),
        ],
    ),
    "the same object": (
        lambda self, x, y: x * 2 if x is y else x + y,
        {},
        [((X, MASK), {}), ((X, X), {}), ((X, X.clone()), {})],
    ),
    "contiguous": (asks(Tensor.is_contiguous), {}, [((X,), {}), ((X.T,), {}), ((X[:, :2],), {})]),
    "a stride": (
        asks(lambda x: x.stride(0) == x.size(1)),
        {},
        [((X,), {}), ((X.T,), {}), ((X[:, :2],), {})],
    ),
    "isinstance": (asks(lambda x: isinstance(x, Tensor)), {}, [((X,), {}), ((3,), {})]),
    "hasattr": (asks(lambda x: hasattr(x, "nested")), {}, [((X,), {})]),
    "a list": (lambda self, xs: sum(xs) * len(xs), {}, [(([X, X],), {}), (([X, X, X],), {})]),
    "any number": (lambda self, *xs: self.fc(sum(xs)), FC, [((X, X), {}), ((X,), {})]),
    "none": (lambda self, x, **kwargs: x * 2, {}, [((X,), {"flag": None}), ((X,), {})]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_any_kind_are_served(name: str) -> None:
    forward, children, calls = CALLS[name]
    plain = make(forward, **children)
    (args, kwargs), *_ = calls
    parameters = list(plain.forward.__code__.co_varnames[1:])
    given = args if not kwargs else {**dict(zip(parameters, args, strict=False)), **kwargs}
    module = rewritten(copy.deepcopy(plain), given=given)
    for args, kwargs in (*calls, calls[0]):
        assert_alike(module, plain, *args, **kwargs)


def test_arguments_reach_a_decorated_forward_as_they_were_given() -> None:
    def decorated(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] * len(args) + kwargs.get("y", 3)

    decorated.__wrapped__ = lambda self, x, y, z=None: x + y  # type: ignore[attr-defined]
    plain = make(decorated)
    module = rewritten(copy.deepcopy(plain), X, X)
    for args, kwargs in (((X,), {"y": X}), ((X, X), {})):
        assert_alike(module, plain, *args, **kwargs)


# --- the state of the process and of the module --------------------------------------------------


def decides_by_dtype(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    return y.float() if y.dtype == torch.bfloat16 else y * 2


def no_grad_within(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.fc(x)
    return y + self.fc(x)


def autocast_within(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.fc(x)
    return y, self.fc(x)


def asks_for_grad(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.fc(x)
    return y if torch.is_grad_enabled() else -y


def sets_grad(self: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(self.training):
        return self.fc(x)  # type: ignore[no-any-return]


def inference(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = self.fc(x)
    return y * 2


def flag_of_dropout(self: Any, x: Tensor) -> Tensor:
    y = F.dropout(self.fc(x), 0.3 if self.training else 0.1, self.training)
    return self.drop(y) * (2 if self.drop.training else 1)


def branches(self: Any, x: Tensor) -> Tensor:
    return self.fc(x).relu() if self.training else self.fc(x) * 2


STATES = (decides_by_dtype, no_grad_within, autocast_within, asks_for_grad)
MODES = (sets_grad, inference, flag_of_dropout, branches)


@pytest.mark.parametrize("forward", [*STATES, *MODES])
def test_modes_and_regions_are_served(forward: Any) -> None:
    drop = make(lambda self, x: F.dropout(x, 0.5, self.training))
    plain = make(forward, fc=nn.Linear(4, 4), drop=drop)
    module = rewritten(copy.deepcopy(plain), X)
    for training in (True, False, True):
        plain.train(training), module.train(training)
        assert_alike(module, plain, X)
        with torch.no_grad():
            assert_alike(module, plain, X)
            assert not torch.is_grad_enabled()
        with torch.autocast("cpu", torch.bfloat16):
            assert_alike(module, plain, X)
        if forward is not inference:
            with torch.inference_mode():
                assert torch.equal(*(_seeded(each, X)[-1] for each in (module, plain)))
        plain.drop.train(not training), module.drop.train(not training)
        assert_alike(module, plain, X)
    assert_alike(module.double(), plain.double(), X.double())


def _seeded(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    output = module(x)
    return output if isinstance(output, tuple) else (output,)


class Fails(nn.Module):
    traceable = False

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta or isinstance(x, torch._subclasses.FakeTensor):
            return x
        raise ValueError("no such data")


@pytest.mark.parametrize("region", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_an_error_within_a_region_leaves_no_mode_behind(region: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with region():
            return self.fails(self.fc(x))  # type: ignore[no-any-return]

    module = rewritten(make(forward, fc=nn.Linear(4, 4), fails=Fails()), X)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="no such data"):
            module(X)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


# --- what an operation does ----------------------------------------------------------------------
def writes_in_place(self: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., 1:] = x[..., :-1]
    y.mul_(2)
    view = y[0]
    view.add_(1)
    F.relu_(y)
    y += 1
    torch.add(y, 1, out=y)
    return y.masked_fill_(y > 4, 0.0)


def draws_unused(self: Any, x: Tensor) -> Tensor:
    torch.rand_like(x)
    return x + torch.rand(4)


def operators(self: Any, x: Tensor) -> Tensor:
    return -(2 - x) @ x.T / 2 + x.relu()[:, :1]


def calls_torch(self: Any, x: Tensor) -> Tensor:
    y = F.dropout(torch.cat([x, x]), p=0.0, training=False)
    y = F.pad(y, (0, 1)).view(x.shape[0], -1).clamp(min=0.5)
    y = y + torch.zeros((x.shape[0], 1)) + torch.full((x.size(0), 1), 2.0)
    return F.layer_norm(y, (10,))[..., : x.size(1)] * torch.arange(x.size(1))


OUTSIDE = torch.arange(4.0)
HEADS = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}

#: What a module does with one tensor of shape (n, 4), and its children.
DOES: dict[str, tuple[Any, dict[str, nn.Module]]] = {
    "in place": (writes_in_place, {}),
    "to its input": (lambda self, x: x.mul_(2) + 1, {}),
    "unused numbers": (draws_unused, {}),
    "operators": (operators, {}),
    "functions": (calls_torch, {}),
    "own backward": (lambda self, x: Tripled.apply(self.fc(x)) + 1, FC),
    "values of data": (lambda self, x: x * x.max().item(), {}),
    "a choice of rows": (lambda self, x: x[x > 0].relu(), {}),
    "batch norm": (lambda self, x: self.norm(x), {"norm": nn.BatchNorm1d(4)}),
    "instance of a loss": (lambda self, x: nn.MSELoss()(self.fc(x), x), FC),
    "outside": (
        lambda self, x: x * OUTSIDE + torch.ones(x.size(1), device=x.device) + torch.tensor([2.0]),
        {},
    ),
    "named results": (lambda self, x: x.max(-1), {}),
    "its input": (lambda self, x: (x.contiguous(), self.drop(x), x), {"drop": nn.Dropout(0.5)}),
    "a child called self": (lambda s, x: s.self(x[None])[1][0], {"self": nn.LSTM(4, 3)}),
    "a list of children": (
        lambda s, x: [f(x) for f in s.heads],
        {"heads": nn.ModuleList(HEADS.values())},
    ),
    "a dict of children": (
        lambda s, x: {k: f(x) for k, f in s.heads.items()},
        {"heads": nn.ModuleDict(copy.deepcopy(HEADS))},
    ),
    "a size": (lambda self, x: (x, x.size(0), tuple(x.shape)), {}),
    "a shape": (lambda self, x: (x * 2, x.shape), {}),
    "nothing": (lambda self, x: None, {}),
    "a constant": (lambda self, x: (x, 3, "word", None), {}),
    "attention": (
        lambda self, x: self.attention(x, x, x, need_weights=False),
        {"attention": nn.MultiheadAttention(4, 2)},
    ),
}


@pytest.mark.parametrize("name", DOES)
def test_what_a_module_does_its_captures_do(name: str) -> None:
    forward, children = DOES[name]
    plain = make(forward, **children)
    module = rewritten(copy.deepcopy(plain), X)
    for training in (True, False):
        plain.train(training), module.train(training)
        for rows in (3, 2, 7):
            assert_alike(module, plain, randn(rows, 4), rtol=1e-6)
        again = copy.deepcopy(module), copy.deepcopy(plain)
        assert_alike(*again, randn(2, 4), rtol=1e-6)


def test_operators_have_the_spelling_of_symbolic_traces() -> None:
    graph = trace(make(operators), X).graph
    targets = [n.target for n in graph.nodes if n.op.startswith("call")]
    before = [operator.sub, operator.neg, getattr, operator.matmul, operator.truediv]
    assert targets == [*before, "relu", operator.getitem, operator.add]


@pytest.mark.parametrize("name", ["T", "mT", "real", "imag"])
def test_an_attribute_of_a_tensor_is_no_constant(name: str) -> None:
    """Dynamo leaves it to its own bytecode, or makes an operator of it, as releases differ."""
    plain = make(lambda self, x: (x * 2, getattr(x, name)))
    x = torch.randn(3, 4, dtype=torch.complex64 if name in ("real", "imag") else None)
    module = rewritten(copy.deepcopy(plain), x)
    assert_alike(module, plain, torch.randn_like(x))
    plain = make(lambda self, x: (x * 2, getattr(self.fc.weight, name)), fc=nn.Linear(4, 4))
    if name in ("T", "mT"):
        module = rewritten(copy.deepcopy(plain), x)
        assert_alike(module, plain, torch.randn_like(x))


def test_results_that_are_their_input_have_nodes_of_their_own() -> None:
    graph = trace(make(*DOES["its input"][:1], **DOES["its input"][1]), X).graph
    (outputs,) = graph.output_node().args
    assert [node.op for node in outputs] == ["call_method", "call_module", "placeholder"]


def test_placeholders_follow_the_signature() -> None:
    graph = trace(make(signature), given={"x": X, "bias": X}).graph
    given = [(n.target, n.args) for n in graph.find_nodes(op="placeholder")]
    assert given[:3] == [("x", ()), ("scale", (2.0,)), ("*more", ())]
    assert given[3:] == [("flag", (True,)), ("**k", ())]


def test_each_node_tells_what_its_value_is() -> None:
    def forward(self: Any, x: Tensor, pair: Any, scale: Any = None, **kwargs: Any) -> Any:
        with torch.no_grad():
            left, _ = x.chunk(2)
        self.nothing(x)
        y = left.new_ones(x.size(0) // 2, device=x.device) + pair[0].sum() + self.fc.weight.sum()
        return {"y": F.dropout(y, 0.5, self.training), "lstm": self.lstm(x)}

    nothing = make(lambda self, x: None)
    module = make(forward, nothing=nothing, lstm=nn.LSTM(4, 3), fc=nn.Linear(4, 4))
    module = trace(module, X[:2], (ones(3), None), flatten=False, recursive=False)
    for graph in (module.graph, copy.deepcopy(module.graph)):
        kinds = {node.name: node.meta["slapo_kind"] for node in graph.find_nodes(op="call_module")}
        assert kinds == {"nothing": "value", "lstm": "container"}
        kinds = {node.name: node.meta.get("slapo_kind") for node in graph.nodes}
        of = {k: {n for n, kind in kinds.items() if kind == k} for k in set(kinds.values())}
        assert {"x", "fc_weight", "dropout", "getitem", "new_ones"} <= of["tensor"]
        assert {"pair", "kwargs", "chunk", "lstm"} <= of["container"]
        assert {"scale", "nothing", "size", "floordiv"} <= of["value"]


def test_tied_parameters_go_by_their_first_name() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    plain = make(lambda self, x: F.linear(F.linear(x, self.b.weight), self.a.weight), a=a, b=b)
    module = rewritten(copy.deepcopy(plain), X)
    assert [n.target for n in module.graph.find_nodes(op="get_attr")] == ["a.weight"]
    assert_alike(module, plain, randn(2, 4))


def test_a_shape_of_one_of_several_inputs_alike_is_refused() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        return x + y.sum(), y.shape

    with pytest.warns(UserWarning, match=r"a shape that several tensors have.*tuple\(x.shape\)"):
        assert not slapo.create_schedule(make(forward)).trace(
            tracer="huggingface", example_inputs=(X, X.clone())
        )
    module = rewritten(make(forward), X, X[:2])
    assert module(ones(3, 3), ones(3, 7))[1] == (3, 7)


# --- refusals ------------------------------------------------------------------------------------
class Config:
    steps = 0


CALLED = {"times": 0}
OWN = random.Random(3)


def counts_globally(self: Any, x: Tensor) -> Tensor:
    CALLED["times"] += 1
    return x * 2


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * 2


def stores(self: Any, x: Tensor) -> Tensor:
    self.last = x * 2
    return self.last + 1  # type: ignore[no-any-return]


def appends(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x.sum())
    return x * 2


def counts_on_config(self: Any, x: Tensor) -> Tensor:
    self.config.steps += 1
    return x * self.config.steps


def registers_hook(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad)
    return y


def sets_data(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.data = x
    return y


def raises(self: Any, x: Tensor) -> Tensor:
    raise ValueError("bad shape")


def reduces(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y


def seeds_and_draws(seed: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        seed()
        return x + torch.rand_like(x)

    return forward


def forks(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        noise = torch.rand_like(x)
    return x + noise


def sets_state(self: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand_like(x)
    torch.set_rng_state(state)
    return x + noise


FOREIGN = nn.Linear(4, 4)
RANDOM = "random generator|random number|Python's random|OWN"
EFFECT = "changes attribute '{}', which a graph cannot do"

REFUSED: dict[str, tuple[Any, str]] = {
    "a size as a word": (lambda self, x: x * {"3": 2.0}.get(str(x.size(0)), 1.0), "str|repr"),
    "a storage": (asks(lambda x: x.untyped_storage().nbytes() > 0), "nbytes"),
    "a branch on data": (asks(lambda x: x.sum() > 0), "only real data has"),
    "a parameter of another": (lambda self, x: x @ FOREIGN.weight, "not one of its submodules"),
    "a checkpoint": (
        lambda self, x: checkpoint(torch.relu, x, use_reentrant=False),
        "checkpointing inside a traced forward",
    ),
    "a reentrant checkpoint": (
        lambda self, x: checkpoint(torch.relu, x, use_reentrant=True),
        "checkpointing inside a traced forward",
    ),
    "vmap": (lambda self, x: torch.vmap(lambda row: row * 2)(x), "torch.func"),
    "a hook": (registers_hook, "registers a hook"),
    "data": (sets_data, "data"),
    "a number": (counts, EFFECT.format("calls")),
    "a tensor": (stores, EFFECT.format("last")),
    "a list": (appends, EFFECT.format("seen")),
    "a config": (counts_on_config, EFFECT.format("config.steps")),
    "a global": (counts_globally, "CALLED"),
    "an error": (raises, "the forward itself fails, at .*bad shape"),
    "a collective": (reduces, "collective"),
    "seeds": (seeds_and_draws(lambda: torch.manual_seed(0)), RANDOM),
    "seeds cuda": (seeds_and_draws(lambda: torch.cuda.manual_seed_all(0)), RANDOM),
    "seeds again": (seeds_and_draws(lambda: torch.seed()), RANDOM),
    "seeds a generator": (seeds_and_draws(lambda: torch.default_generator.manual_seed(1)), RANDOM),
    "seeds Python": (seeds_and_draws(lambda: random.seed(0)), RANDOM),
    "seeds numpy": (seeds_and_draws(lambda: numpy.random.seed(0)), RANDOM),
    "forks": (forks, f"{RANDOM}|returned non-Tensor"),
    "sets the state": (sets_state, RANDOM),
    "reads the seed": (lambda self, x: x * (torch.initial_seed() % 7), RANDOM),
    "a clock": (lambda self, x: x * time.perf_counter(), "perf_counter"),
    "draws": (lambda self, x: x * random.random(), RANDOM),
    "chooses": (lambda self, x: x if random.choice([True, False]) else x * 2, RANDOM),
    "draws of its own": (lambda self, x: x * OWN.random(), RANDOM),
    "draws of numpy": (lambda self, x: x * float(numpy.random.rand()), RANDOM),
}


def state_of_the_process() -> list[Any]:
    numbers = torch.get_rng_state().tolist(), random.getstate(), OWN.getstate()
    rules = torch._dynamo.trace_rules._allowed_callable_ids
    patched = nn.Module.__call__, vars(torch.autograd.Function)["apply"], torch.autocast.__enter__
    switches = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), dict(CALLED)
    drawn = str(numpy.random.get_state(legacy=False))
    names = set(globals()) - {"__warningregistry__"}
    return [*numbers, drawn, set(rules()), *patched, *switches, names]


if TORCH < (2, 12):
    del REFUSED["a hook"]  # in other words


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why_and_leave_nothing_behind(name: str) -> None:
    forward, message = REFUSED[name]
    module: Any = make(forward)
    module.calls, module.seen, module.config = 0, [], Config()
    sch = slapo.create_schedule(module)
    attributes, before = dict(vars(module)), state_of_the_process()
    with pytest.warns(UserWarning, match=message):
        assert not sch.trace(tracer="huggingface", example_inputs=X)
    assert state_of_the_process() == before
    assert (vars(module), type(module).__name__) == (attributes, "Made")
    assert (module.calls, module.seen, module.config.steps) == (0, [], 0)
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_refusal_names_module_line_and_remedy() -> None:
    inner = make(asks(lambda x: x.sum() > 0))
    outer = make(lambda self, x: self.child(x), child=make(lambda s, x: s.inner(x), inner=inner))
    with pytest.warns(
        UserWarning, match=r"cannot trace child\.inner in Made \(.*test_capture.py:\d+"
    ):
        assert not slapo.create_schedule(outer).trace(
            tracer="huggingface", flatten=True, example_inputs=X
        )
    assert slapo.create_schedule(outer).trace(
        tracer="huggingface", flatten=True, example_inputs=X, leaf_modules=["child.inner"]
    )


def test_inputs_that_do_not_fit_are_a_type_error() -> None:
    module = rewritten(make(lambda self, x: x), X)
    with pytest.raises(TypeError, match=r"'y'|parameters are x"):
        module(y=X)


def test_a_trace_leaves_compiled_code_and_tensors_alone() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    compiled(torch.ones(2))
    counters = torch._dynamo.utils.counters["frames"]["total"]
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    tensors = [*module.parameters(), *module.buffers()]
    before = {k: v.clone() for k, v in module.state_dict().items()}
    slapo.create_schedule(module)  # which says where each tensor comes from
    noted = [dict(vars(tensor)) for tensor in tensors]
    rewritten(module, X)
    assert [vars(tensor) for tensor in tensors] == noted
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    module(X)
    assert [vars(tensor) for tensor in tensors] == noted
    compiled(torch.ones(2))
    assert torch._dynamo.utils.counters["frames"]["total"] == counters


@asks_no_device
def test_a_capture_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a device that this process has not used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was started"))
    trace(nn.Sequential(nn.Linear(4, 4)), X)


def test_a_capture_keeps_no_graph_of_dynamo_and_no_history_of_parameters() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    before = {id(each) for each in gc.get_objects() if issubclass(type(each), fx.GraphModule)}
    captured = capture(plain, (randn(3, 4),), {}, lambda module, path: True)
    weight = weakref.ref(plain[0].weight)
    plain[0].weight = nn.Parameter(torch.zeros(4, 4))
    gc.collect()
    assert weight() is None
    now = {id(each) for each in gc.get_objects() if issubclass(type(each), fx.GraphModule)}
    assert now <= before
    assert captured.inputs
