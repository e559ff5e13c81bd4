"""TracedModule: state, laziness, contract, copies; and the two symbolic-trace merges."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn

import slapo
from slapo.graph.trace.leaves import default_is_leaf
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.symbolic import trace_symbolically
from tests.primitives.models import Stack, Tied

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


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


def traced(module: nn.Module, **concrete: object) -> TracedModule:
    return trace_symbolically(module, default_is_leaf(False), concrete)


def test_all_state_stays_under_its_names() -> None:
    module = Modal()
    gm = traced(module)
    assert list(gm.state_dict()) == list(module.state_dict())
    assert gm.unused is module.unused
    assert gm.fc.weight is module.fc.weight
    assert "shift" in gm._non_persistent_buffers_set
    tied = traced(Tied())
    assert tied.head.weight is tied.emb.weight


def test_attributes_methods_and_properties_of_the_original_work() -> None:
    gm = traced(Modal())
    assert (gm.limit, gm.twice(), gm.size) == (3, 6, 4)
    with pytest.raises(AttributeError, match="nothing"):
        _ = gm.nothing


def test_the_signature_is_the_original_ones() -> None:
    parameters = inspect.signature(traced(Modal()).forward).parameters
    assert list(parameters) == ["x", "mask", "scale", "extra", "kw"]
    assert parameters["scale"].default == 2.0
    assert parameters["kw"].kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize("start", [True, False])
def test_one_graph_follows_train_and_eval(start: bool) -> None:
    module = Modal().train(start)
    gm = traced(module)
    assert gm.contract.training is None
    for mode in (True, False, True):
        module.train(mode)
        gm.train(mode)
        torch.manual_seed(3)
        expected = module(X, X)
        torch.manual_seed(3)
        assert torch.equal(gm(X, X), expected)
    assert not torch.equal(gm.train()(X, X), gm.eval()(X, X))


@pytest.mark.parametrize("start", [True, False])
def test_modes_of_different_structure_have_a_graph_each(start: bool) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() if self.training else x

    module = Branches().train(start)
    gm = traced(module)
    for mode in (True, False):
        assert torch.equal(gm.train(mode)(X), module.train(mode)(X))


@pytest.mark.parametrize("start", [True, False])
def test_a_forward_that_one_mode_allows_holds_for_that_mode(start: bool) -> None:
    """The mode it was traced in, which is the mode it says."""

    class OnlyOne(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.training is not start and x.sum() > 0:
                return x
            return x * 2

    gm = traced(OnlyOne().train(start))
    assert torch.equal(gm.train(start)(X), X * 2)
    was, now = ("train", "eval") if start else ("eval", "train")
    with pytest.raises(slapo.SlapoError, match=f"traced in {was} mode .* {now} mode"):
        gm.train(not start)(X)


def test_a_trace_leaves_modes_and_the_module_alone() -> None:
    module = Stack(2)
    module.layers[0].drop.eval()
    before = [m.training for m in module.modules()]
    assert slapo.create_schedule(module).trace()
    assert [m.training for m in module.modules()] == before


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X, X, 3.0), {}, r"'scale' is 3\.0, .* traced with 2\.0"),
        ((X, X), {"flag": 1}, r"\{'flag': 1\}"),
    ],
)
def test_calls_outside_the_contract_are_refused(
    args: tuple[object, ...], kwargs: dict[str, object], message: str
) -> None:
    with pytest.raises(slapo.SlapoError, match=message):
        traced(Modal())(*args, **kwargs)


def test_what_is_handed_on_may_be_none_or_not() -> None:
    gm, bias = traced(Modal()).eval(), torch.ones(4)
    assert torch.allclose(gm(X, X, extra=bias), gm(X, X) + 2 * bias)
    assert torch.equal(gm(X, X, flag=None), gm(X, X))


@pytest.mark.parametrize("mode", [True, False])
def test_what_is_branched_on_may_be_none_or_not(mode: bool) -> None:
    """Each kind of call has its graph, and all follow the mode and the state of the module."""
    module = Modal().train(mode)
    gm = traced(module)
    assert len(gm.graphs) == 2
    for args in ((X, X), (X,), (X, None)):
        module.fc.weight.data.mul_(0.9)
        torch.manual_seed(3)
        expected = module(*args)
        torch.manual_seed(3)
        assert torch.equal(gm(*args), expected)
    with pytest.raises(slapo.SlapoError, match="'scale'"):
        gm(X, scale=3.0)


def test_hooks_run_whichever_graph_serves_the_call() -> None:
    gm = traced(Modal()).eval()
    expected = gm(X), gm(X, X)
    handle = gm.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(gm(X), expected[0] + 1)
    assert torch.equal(gm(X, X), expected[1] + 1)
    handle.remove()
    assert torch.equal(gm(X), expected[0])


def test_a_graph_edited_by_hand_serves_its_own_calls_only() -> None:
    gm = traced(Modal()).eval()
    gm(X)
    node = next(n for n in gm.graph.nodes if n.name == "fc")
    node.replace_all_uses_with(next(n for n in gm.graph.nodes if n.name == "x"))
    gm.graph.erase_node(node)
    gm.recompile()
    gm(X, X)
    with pytest.raises(slapo.SlapoError, match="'mask' is None"):
        gm(X)


def test_an_attribute_that_the_graph_has_built_in_cannot_be_set() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.note = 3, "a"

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    gm = traced(Scaled())
    with pytest.raises(slapo.SlapoError, match="factor = 3"):
        gm.factor = 4
    gm.factor, gm.note = 3, "b"
    assert (torch.equal(gm(X), X * 3), gm.note) == (True, "b")
    outer = trace_symbolically(nn.Sequential(Scaled()), default_is_leaf(True), {})
    outer.get_submodule("0").factor = 4
    with pytest.raises(slapo.SlapoError, match=r"'0.factor' is 4"):
        outer(X)


def test_what_is_printed_is_the_present_graph() -> None:
    gm = traced(Modal())
    assert "self.fc" in str(gm)
    node = next(n for n in gm.graph.nodes if n.name == "fc")
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.relu, (node,))
    gm.recompile()
    assert "torch.relu" in str(gm)


def test_a_constant_argument_is_traced_in_and_checked() -> None:
    gm = traced(Modal(), mask=None).eval()
    gm(X)
    with pytest.raises(slapo.SlapoError, match="'mask' is a tensor of shape"):
        gm(X, X)
    with pytest.raises(ValueError, match=r"\['masks'\].*parameters are"):
        traced(Modal(), masks=None)


def test_code_is_generated_once_however_often_the_graph_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gm = traced(Modal())
    compiled = []
    original = TracedModule.compile_now
    monkeypatch.setattr(
        TracedModule, "compile_now", lambda self: (compiled.append(1), original(self))[1]
    )
    for _ in range(3):
        node = next(n for n in gm.graph.nodes if n.name == "fc")
        with gm.graph.inserting_after(node):
            gm.graph.call_function(torch.relu, (node,))
        gm.recompile()
        assert gm.is_stale
    assert not compiled
    gm(X, X)
    gm(X, X)
    assert len(compiled) == 1
    assert gm.code.count("torch.relu") == 3


def test_copies_and_pickles_compute_the_same_and_are_independent() -> None:
    module = Modal().eval()
    gm = traced(module)
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert isinstance(other, TracedModule)
        assert torch.equal(other(X, X), gm(X, X))
        assert other.fc.weight is not gm.fc.weight
        assert other.contract == gm.contract
        assert torch.equal(other(X), gm(X))
        other.graph.erase_node(list(other.graph.nodes)[-1])
        assert len(other.graph.nodes) == len(gm.graph.nodes) - 1


def test_a_deep_copy_keeps_ties_with_the_rest_of_a_model() -> None:
    sch = slapo.create_schedule(Tied())
    sch.trace()
    model = copy.deepcopy(sch.mod)
    assert model.head.weight is model.emb.weight


def test_it_compiles_as_a_whole() -> None:
    sch = slapo.create_schedule(Stack(2))
    sch.trace()
    model, _ = slapo.build(sch)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(X), model(X))


class ByMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.fc(x).relu() if self.training else self.fc(x) * scale


class Breaks(nn.Module):
    """A leaf that dynamo cannot have in one graph."""

    traceable = False

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.leaf = nn.Linear(4, 4), Breaks()

    def forward(self, x: Tensor) -> Tensor:
        return self.leaf(self.fc(x)).relu()


class Layered(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compile_each(model: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend="eager")
    return model


def compile_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compile_apart(model: Any) -> Any:
    for index in range(2):
        model.layers[index] = torch.compile(model.layers[index], backend="eager")
    return model


def compile_hooked(model: Any) -> Any:
    model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return torch.compile(model, backend="eager")


@torch.no_grad()  # dynamo warns of gradients that it asks for behind a break
@pytest.mark.parametrize("layer", [ByMode, Broken])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    "compiled", [compile_each, compile_in_place, compile_apart, compile_hooked]
)
def test_dynamo_meets_traced_layers_in_any_way(
    compiled: Callable[[Any], Any], called: bool, layer: type[nn.Module]
) -> None:
    torch._dynamo.reset()
    model = Layered(layer)
    expected = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    for index in range(2):
        sch[f"layers.{index}"].trace()
    if called:
        model(X)
    one = model.layers[0]
    run = compiled(model)
    torch.testing.assert_close(run(X), expected(X))
    one.recompile()
    torch.testing.assert_close(run(X), expected(X))
    # What is edited after that acts.
    (output,) = (node for node in one.graph.nodes if node.op == "output")
    with one.rewritten_together(), one.graph.inserting_before(output):
        output.args = (one.graph.call_function(torch.neg, (output.args[0],)),)
        one.recompile()
    torch.testing.assert_close(run(X), expected.layers[1](-expected.layers[0](X)))


class _Decides(nn.Module):
    """Takes another path in float64; what it decides by is no input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y * 2 if y.dtype == torch.float64 else y


def test_a_graph_follows_the_dtype_of_parameters() -> None:
    sch = slapo.create_schedule(Stack(1))
    expected = copy.deepcopy(sch.mod).double()
    sch.trace(tracer="huggingface", flatten=True, example_inputs=torch.randn(3, 4))
    sch.mod.double()
    assert torch.equal(sch.mod(X.double()), expected(X.double()))


def test_a_graph_that_python_chose_by_dtype_holds_for_that_dtype() -> None:
    sch = slapo.create_schedule(_Decides())
    sch.trace(tracer="huggingface", flatten=True, example_inputs=torch.randn(3, 4))
    sch.mod.double()
    with pytest.raises(slapo.SlapoError, match=r"float32 parameters, they are now torch.float64"):
        sch.mod(X.double())


# --- copies of a module with several graphs ------------------------------------------------------
@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_copies_keep_graphs_and_limits(tracer: str) -> None:
    x = torch.randn(3, 4)
    sch = slapo.create_schedule(ByMode())
    assert sch.trace(tracer=tracer, example_inputs=x)
    module = sch.mod.eval()
    copies = [copy.copy(module), module._replicate_for_data_parallel()]
    for other in copies:
        assert torch.equal(other(x), module(x))
        assert torch.equal(other.train()(x), module.fc(x).relu())
        assert not module.training
        with pytest.raises(slapo.SlapoError, match="scale"):
            other(x, scale=2.0)
    assert copies[0].fc is module.fc


def _graph_classes() -> set[type]:
    return {*fx.GraphModule.__subclasses__(), *TracedModule.__subclasses__()}


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_traced_modules_of_one_class_share_one(tracer: str) -> None:
    """Python visits all subclasses of nn.Module in each trace by proxies: they may not grow."""
    x = torch.randn(3, 4)

    def trace(module: nn.Module) -> Any:
        sch = slapo.create_schedule(module)
        assert sch.trace(tracer=tracer, flatten=True, example_inputs=x)
        return sch.mod

    one, other = trace(ByMode()), trace(ByMode())
    before = _graph_classes()
    third = trace(ByMode())
    rebuilt = [copy.deepcopy(one), copy.copy(one), pickle.loads(pickle.dumps(one))]
    assert torch.equal(third(x), third.fc(x).relu())
    gc.collect()
    assert _graph_classes() <= before
    assert {type(each) for each in (one, other, third, *rebuilt)} == {type(one)}
    # Each has a code of its own all the same.
    expected = other(x)
    (output,) = (node for node in one.graph.nodes if node.op == "output")
    with one.graph.inserting_before(output):
        output.args = (one.graph.call_function(torch.neg, (output.args[0],)),)
    one.recompile()
    assert torch.equal(one(x), -one.fc(x).relu())
    assert torch.equal(other(x), expected)
    assert torch.equal(type(one).forward(other, x), expected)
    assert "neg" in one.code
    assert "neg" not in other.code


def test_checkpointing_by_transformers_is_refused_with_what_to_do() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.graph.zoo import checkpoint_layers

    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    sch = slapo.create_schedule(transformers.BertModel(config))
    assert sch["encoder.layer.0"].trace(tracer="huggingface", flatten=True)
    with pytest.raises(slapo.SlapoError, match=r"by sch\[path\]\.checkpoint\(\) instead"):
        checkpoint_layers(sch.mod)


class Chooses(nn.Module):
    def forward(self, x: Tensor, kind: Any = 1, *rest: Tensor, **more: Any) -> Tensor:
        if x.requires_grad or x.dtype == torch.float64 or kind is True or rest:
            return x * 3
        return x * more["pair"][0] * kind


def test_a_call_like_the_last_is_let_through_and_no_other() -> None:
    sch = slapo.create_schedule(Chooses())
    x, pair = torch.ones(3, 4), (torch.ones(4), torch.ones(2))
    assert sch.trace(tracer="huggingface", example_inputs={"x": x, "pair": pair})
    module: Any = sch.mod
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x.double(),), {"pair": pair}),
        ((x.clone().requires_grad_(),), {"pair": pair}),
        ((x[0],), {"pair": pair}),
        ((x, True), {"pair": pair}),
        ((x, 1, x), {"pair": pair}),
        ((x,), {"pair": (*pair, x)}),
        ((x,), {"pair": pair, "third": x}),
    ]
    for args, kwargs in others:
        for _ in range(2):
            assert torch.equal(module(x, pair=pair), x)
        with pytest.raises(slapo.SlapoError):
            module(*args, **kwargs)
        with pytest.raises(slapo.SlapoError):
            module(*args, **kwargs)


class Weighs(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * 2 if mask is not None and mask.sum() > 0 else x


def test_a_tensor_that_was_a_constant_is_that_tensor_alone() -> None:
    """Another one with its shape is not like it: the code has read the values."""
    x, mask = torch.ones(3, 4), torch.ones(3, 4)
    sch = slapo.create_schedule(Weighs())
    assert sch.trace(concrete_args={"mask": mask})
    module: Any = sch.mod
    assert torch.equal(module(x, mask), x * 2)
    with pytest.raises(slapo.SlapoError, match="argument 'mask' is a tensor"):
        module(x, torch.zeros(3, 4))


class GradientCheckpointingLayer(nn.Module):
    """As that of Transformers before 5.23, in which a layer checkpoints its own calls."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            function = functools.partial(super().__call__, **kwargs)
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
        return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu()


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_a_layer_that_could_checkpoint_itself_is_traced(tracer: str) -> None:
    x = torch.randn(3, 4)
    layer = GradientCheckpointingLayer()
    expected = layer(x)
    sch = slapo.create_schedule(layer)
    assert sch.trace(tracer=tracer, example_inputs=x)
    module: Any = sch.mod
    torch.testing.assert_close(module(x), expected)
    module.gradient_checkpointing = False
    with pytest.raises(slapo.SlapoError, match=r"by sch\[path\]\.checkpoint\(\) instead"):
        module.gradient_checkpointing = True
        module(x)


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_a_layer_that_checkpoints_itself_is_refused(tracer: str) -> None:
    layer = GradientCheckpointingLayer()
    layer.gradient_checkpointing = True
    sch = slapo.create_schedule(layer)
    with pytest.warns(UserWarning, match="defines '__call__'"):
        assert not sch.trace(tracer=tracer, example_inputs=torch.randn(3, 4))


def test_the_signature_of_the_forward_is_that_of_the_graph() -> None:
    """Trainers read there which columns of a data set the model takes."""
    sch = slapo.create_schedule(ByMode())
    assert sch.trace(tracer="huggingface", example_inputs=torch.randn(3, 4))
    assert list(inspect.signature(sch.mod.forward).parameters) == ["x", "scale"]
    assert inspect.signature(sch.mod.forward).parameters["scale"].default == 1.0


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_a_forward_that_is_set_acts(tracer: str) -> None:
    x = torch.randn(3, 4)
    sch = slapo.create_schedule(ByMode())
    assert sch.trace(tracer=tracer, example_inputs=x)
    module: Any = sch.mod
    module.forward = lambda x: x * 100
    for training in (True, False):
        assert torch.equal(module.train(training)(x), x * 100)
    del module.forward
    assert torch.equal(module.eval()(x), module.fc(x))
