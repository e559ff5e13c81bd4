"""The traced module: class, state, copies, graphs edited by hand, rules, torch.compile."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn

import slapo
from slapo.graph.trace.module import MAX_KINDS, Traced, rewrite, rules_of
from tests.graph.served import Nothing, assert_alike, make, rewritten, trace
from tests.primitives.models import OneLayer, Stack, Tied

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
TRACERS = pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])


class Modal(nn.Module):
    """Its constants differ between train and eval mode, and two arguments are optional."""

    size = property(lambda self: self.fc.in_features)

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.limit = 3

    def twice(self) -> int:
        return 2 * self.limit

    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0, extra: object = None, **kw
    ) -> Tensor:
        y = F.dropout(self.fc(x), 0.3 if self.training else 0.1, self.training)
        if mask is not None:
            y = y + mask
        return F.linear(y, self.fc.weight, extra) * scale + self.shift


class Frozen(OneLayer):
    """Does something of its own at most of what is done to modules."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.seen = nn.BatchNorm1d(4), 0

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(x))

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "old.weight" in state:
            state[prefix + "fc.weight"] = state.pop(prefix + "old.weight")
        super()._load_from_state_dict(state, prefix, *args)

    def __len__(self) -> int:
        return 7


def traced(module: nn.Module, tracer: str = "huggingface", **options: Any) -> Any:
    given = None if tracer == "pytorch" else X
    return trace(module, given=given, tracer=tracer, **{"flatten": False, **options})


# --- the class -----------------------------------------------------------------------------------
@TRACERS
def test_it_is_the_users_own_module_of_the_users_own_class(tracer: str) -> None:
    module = Modal()
    children, state = dict(module.named_modules()), dict(module.named_parameters())
    gm = traced(module, tracer)
    assert gm is module
    assert isinstance(gm, Modal)
    assert isinstance(gm, fx.GraphModule)
    assert type(gm).__name__ == "Modal"
    assert dict(gm.named_modules()) == children
    assert all(p is state[n] for n, p in gm.named_parameters())
    assert "shift" in gm._non_persistent_buffers_set
    assert (gm.limit, gm.twice(), gm.size) == (3, 6, 4)
    with pytest.raises(AttributeError, match="nothing"):
        _ = gm.nothing
    parameters = inspect.signature(gm.forward).parameters
    assert list(parameters) == ["x", "mask", "scale", "extra", "kw"]
    assert parameters["scale"].default == 2.0
    assert parameters["kw"].kind is inspect.Parameter.VAR_KEYWORD


@TRACERS
def test_methods_that_a_class_overrides_stay_its_own(tracer: str) -> None:
    outer, ref = traced(nn.Sequential(Frozen()), tracer).train(), Frozen()
    gm = outer[0]
    assert isinstance(gm, Traced)
    assert (gm.training, gm.bn.training, len(gm)) == (True, False, 7)
    rewrite(gm, Nothing())
    ref.seen = 5
    state = ref.state_dict()
    state["old.weight"] = state.pop("fc.weight")
    gm.load_state_dict(state)
    assert gm.seen == 5
    assert_alike(gm.train(), ref.train(), X)


class Lossy(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() * 2

    def loss(self, x: Tensor) -> Tensor:
        return self(x).sum()


@TRACERS
def test_methods_that_call_the_module_run_its_rewritten_graph(tracer: str) -> None:
    sch = slapo.create_schedule(Lossy())
    assert sch.trace(tracer=tracer, example_inputs=None if tracer == "pytorch" else X)
    sch.replace(nn.Identity(), sch.find(lambda x: x.relu()))
    assert torch.allclose(sch.mod.loss(X), (X * 2 + 1).sum())


def test_a_forward_that_was_set_on_the_object_acts() -> None:
    gm = rewritten(Modal(), X)
    gm.forward = lambda x: x * 100
    for training in (True, False):
        assert torch.equal(gm.train(training)(X), X * 100)
    del gm.forward
    assert_alike(gm, copy.deepcopy(gm), X)
    module = Modal()
    module.forward = lambda x: x * 100  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="forward was set on this Modal itself"):
        assert not slapo.create_schedule(module).trace()


@TRACERS
def test_traced_modules_of_one_class_share_one(tracer: str) -> None:
    """Python visits all subclasses of nn.Module in each trace by proxies: they may not grow."""
    one, other = traced(Modal(), tracer), traced(Modal(), tracer)
    copies = [copy.deepcopy(one), copy.copy(one), pickle.loads(pickle.dumps(one))]
    assert {type(each) for each in (other, *copies)} == {type(one)}
    before = set(Traced.__subclasses__())
    traced(Modal(), tracer)
    assert set(Traced.__subclasses__()) <= before


# --- copies --------------------------------------------------------------------------------------
COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "replica": lambda module: module._replicate_for_data_parallel(),
}


@pytest.mark.parametrize("how", COPIES)
@TRACERS
def test_copies_compute_the_same_and_are_independent(how: str, tracer: str) -> None:
    plain = Modal()
    gm = copy.deepcopy(plain)
    gm = rewritten(gm, given=None if tracer == "pytorch" else X, tracer=tracer)
    assert_alike(gm, plain, X)
    other = COPIES[how](gm)
    assert isinstance(other, Modal)
    assert isinstance(other, Traced)
    assert len(rules_of(other)) == 1
    if how != "replica":
        assert (other.fc.weight is gm.fc.weight) == (how == "copy")
        for args in ((X,), (X, X), (X, None, 3.0), (X[:1],)):
            assert_alike(other, plain, *args)
    assert not other.eval().fc.training
    with torch.no_grad():
        assert torch.equal(other(X), plain.eval()(X))
    assert gm.training
    assert_alike(gm, plain.train(), X)
    other.graph.erase_node(list(other.graph.nodes)[-1])
    assert len(other.graph.nodes) == len(gm.graph.nodes) - 1


def test_a_deep_copy_keeps_ties_with_the_rest_of_a_model() -> None:
    tokens = torch.randint(0, 8, (3, 5))
    model = rewritten(Tied(), tokens, flatten=False)
    model = copy.deepcopy(model)
    assert model.head.weight is model.emb.weight
    assert_alike(model, copy.deepcopy(model), tokens)


# --- graphs edited by hand -----------------------------------------------------------------------
def negate(gm: Any) -> None:
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_function(torch.neg, (output.args[0],)),)
    gm.recompile()


@TRACERS
def test_a_graph_edited_by_hand_runs_for_calls_of_its_kind(tracer: str) -> None:
    gm = traced(Modal().eval(), tracer)
    plain = copy.deepcopy(gm)
    negate(gm)
    assert "torch.neg" in gm.code
    assert "torch.neg" in str(gm)
    x = torch.randn(2, 4)
    if tracer == "huggingface":
        assert torch.equal(gm(x), -plain(x))
        for args in ((x, x), (x, None, 3.0), (x.double(),), (x,)):
            gm.train(len(args) == 1 and args[0] is x)  # the mode is built in
            with pytest.raises(
                slapo.SlapoError, match="was edited by hand and is valid only for calls"
            ):
                gm(*args)
        gm.eval()
    else:
        assert torch.equal(gm(x, x), -plain(x, x))
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        call = (x,) if tracer == "huggingface" else (x, x)
        assert torch.equal(other(*call), -plain(*call))
    with pytest.raises(slapo.SlapoError, match="was edited by hand"):
        rewrite(gm, Nothing())


def test_a_graph_edited_by_hand_may_be_edited_again_and_set() -> None:
    gm = traced(Stack(1), flatten=True)
    plain = copy.deepcopy(gm)
    negate(gm)
    negate(gm)
    assert torch.equal(gm(X), plain(X))
    assert gm.code.count("torch.neg") == 2
    gm.graph = copy.deepcopy(plain.graph)
    assert torch.equal(gm(X), plain(X))
    negate(gm)
    assert torch.equal(gm(X), -plain(X))


# --- rules ---------------------------------------------------------------------------------------


def test_the_number_of_kinds_is_limited() -> None:
    module = rewritten(make(lambda self, x, k=0: x * k), X)
    for k in range(MAX_KINDS):
        module(X, k)
    with pytest.raises(slapo.TraceError, match=f"{MAX_KINDS} different ways.*as tensors"):
        module(X, -1)
    assert torch.equal(module(X, 3), X * 3)


def rewrites_and_traces(sch: Any) -> None:
    sch["layers.0"].replace(nn.Tanh(), sch["layers.0"].find(lambda x: F.gelu(x)))
    assert sch["layers.1"].trace(tracer="huggingface", example_inputs=X)


@pytest.mark.parametrize("first", [False, True], ids=["no rule", "a rule"])
def test_what_a_failing_primitive_rewrote_is_undone(first: bool, fails: None) -> None:
    model = Stack(2)
    plain = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    assert sch["layers.0"].trace(tracer="huggingface", example_inputs=X)
    if first:
        rewrite(model.layers[0], Nothing())
        assert_alike(model, plain, X)
    before = str(model.layers[0].graph), list(dict(model.named_modules()))
    with pytest.raises(ValueError, match="no"):
        sch.fails(rewrites_and_traces)
    assert (str(model.layers[0].graph), list(dict(model.named_modules()))) == before
    assert len(rules_of(model.layers[0])) == first
    assert not isinstance(model.layers[1], Traced)
    for x in (X, X[:1]):
        assert_alike(model, plain, x)
    sch["layers.0"].replace(nn.Tanh(), sch["layers.0"].find(lambda x: F.gelu(x)))
    assert not torch.equal(model(X), plain(X))


# --- torch.compile -------------------------------------------------------------------------------
@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_as_a_whole(backend: str, flatten: bool) -> None:
    plain = Stack(2)
    module = rewritten(copy.deepcopy(plain), X, flatten=flatten)
    module(X), module(X[:2])
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for x in (X, X[:2], torch.randn(7, 4)):
        torch.testing.assert_close(compiled(x), plain(x))
    plain.double(), module.double()
    module(X.double())
    torch.testing.assert_close(compiled(X.double()), plain(X.double()))


def scaled_twice() -> Any:
    plain: Any = make(lambda s, x: s.inner(x) * s.scale, inner=make(lambda s, x: x + s.shift))
    plain.scale, plain.inner.shift = 2.0, 1
    return plain


def by_mode_and_size() -> Any:
    return make(lambda s, x: x * 2 if s.training or x.size(0) < 9 else -x)


def by_identity() -> Any:
    return make(lambda s, x, y: x * 2 if x is y else x - y)


#: A model, the inputs of a first call, a change, and the inputs of another kind of call.
KINDS: dict[str, tuple[Callable[[], Any], Any, Callable[[Any], object], Any]] = {
    "another mode": (by_mode_and_size, (X,), nn.Module.eval, (X,)),
    "another size": (by_mode_and_size, (X,), nn.Module.eval, (torch.ones(12, 4),)),
    "an attribute": (scaled_twice, (X,), lambda m: setattr(m, "scale", 5), (X,)),
    "of a child": (scaled_twice, (X,), lambda m: setattr(m.inner, "shift", 5), (X,)),
    "two tensors for one": (by_identity, (X, X), lambda m: None, (X, X + 1)),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_kind_of_call_inside_torch_compile_says_what_to_do(kind: str) -> None:
    build, first, change, then = KINDS[kind]
    plain = build()
    module = rewritten(copy.deepcopy(plain), *first)
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    for args in (first, then):
        with pytest.raises(Exception, match="call the model once this way before it is compiled"):
            compiled(*args)
        module(*args)
        assert torch.equal(compiled(*args), plain(*args))
        change(module), change(plain)
    module.register_buffer("more", torch.ones(4))
    module(*then)
    assert torch.equal(compiled(*then), plain(*then))


@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()  # dynamo warns of gradients that it asks for behind a break
@pytest.mark.parametrize("way", ["each", "in place", "apart", "hooked"])
def test_dynamo_meets_rewritten_layers_in_any_way(way: str) -> None:
    plain = Stack(2)
    model: Any = copy.deepcopy(plain)
    for index in range(2):
        rewritten(model.layers[index], X)
    model(X)
    run = model
    if way == "each":
        for layer in model.layers:
            layer.compile(backend="eager")
    elif way == "in place":
        model.compile(backend="eager")
    elif way == "apart":
        for index in range(2):
            model.layers[index] = torch.compile(model.layers[index], backend="eager")
    else:
        model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
        run = torch.compile(model, backend="eager")
    torch.testing.assert_close(run(X), plain(X))
    torch.testing.assert_close(run.eval()(X[:2]), plain.eval()(X[:2]))


# --- checkpoints of the model itself -------------------------------------------------------------
class GradientCheckpointingLayer(OneLayer):
    """As that of Transformers before 5.23, in which a layer checkpoints its own calls."""

    gradient_checkpointing = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            function = functools.partial(super().__call__, **kwargs)
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
        return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu()


@TRACERS
def test_a_layer_that_checkpoints_itself_does_so_around_its_graph(tracer: str) -> None:
    plain = GradientCheckpointingLayer()
    module = rewritten(
        copy.deepcopy(plain), given=None if tracer == "pytorch" else X, tracer=tracer
    )
    assert_alike(module, plain, X)
    module.gradient_checkpointing = plain.gradient_checkpointing = True
    assert_alike(module, plain, X)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_first_call_inside_a_checkpoint(reentrant: bool) -> None:
    plain = Stack(1)
    module = rewritten(copy.deepcopy(plain), X)
    results = []
    for each in (module, plain):
        x = X.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(each, x, use_reentrant=reentrant).pow(2).sum().backward()
        results.append((x.grad, [p.grad for p in each.parameters()]))
    torch.testing.assert_close(*results)
