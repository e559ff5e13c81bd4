"""The three tracers through ``Schedule.trace``: previews, captures, recursion, messages."""

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slapo
from slapo import scripting
from slapo.example_inputs import example_inputs
from slapo.graph.trace.capture import capture
from slapo.graph.trace.module import Traced, rewrite
from tests.graph import zoo
from tests.graph.served import (
    Nothing,
    Tripled,
    assert_alike,
    make,
    number_of_captures,
    rewritten,
    scheduled,
)
from tests.graph.test_capture import (
    appends,
    arithmetic,
    asks,
    branches,
    counts,
    no_grad_within,
    optional,
    stores,
)
from tests.graph.test_children import none_of_parts
from tests.primitives.models import DataDependent, Stack

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
TRACERS = pytest.mark.parametrize("tracer", ["pytorch", "huggingface", "dynamo"])


def given_to(tracer: str, inputs: Any = X) -> Any:
    return None if tracer == "pytorch" else inputs


# --- previews ------------------------------------------------------------------------------------
PREVIEWED: dict[str, Callable[..., Any]] = {
    "a region": no_grad_within,
    "a type": asks(lambda x: isinstance(x, Tensor) and x.__class__ is Tensor),
    "a part that is none": none_of_parts,
    "a backward of its own": lambda self, x: Tripled.apply(self.fc(x)),
    "a mode": branches,
    "numbers": lambda self, x: x * torch.rand_like(x) if self.training else x,
    "a size": arithmetic,
    "an argument": optional,
}


@pytest.mark.parametrize("name", PREVIEWED)
def test_a_preview_shows_and_never_runs(name: str) -> None:
    """What proxies answer wrongly misleads no number: calls run captures."""
    child = make(lambda self, x: (x + 1, None))
    plain = make(PREVIEWED[name], fc=nn.Linear(4, 4), child=child)
    module = copy.deepcopy(plain)
    sch = slapo.create_schedule(module)
    if not slapo_trace_without_warning(sch):
        assert sch.trace(example_inputs=X)  # by a capture, where there are inputs
    rewrite(sch.mod, Nothing())
    for training in (True, False):
        plain.train(training), module.train(training)
        assert_alike(module, plain, X)
    assert number_of_captures(module) > 0


def slapo_trace_without_warning(sch: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(sch.trace(recursive=False))


def fails_after_a_change(self: Any, x: Tensor) -> Tensor:
    self.calls = x
    raise RuntimeError("no")


@TRACERS
@pytest.mark.filterwarnings("ignore:.*could not be traced")
@pytest.mark.parametrize("forward", [counts, stores, appends, fails_after_a_change])
def test_a_trace_leaves_no_change_that_a_forward_makes(forward: Any, tracer: str) -> None:
    module: Any = make(forward)
    module.calls, module.seen = 0, []
    before = dict(vars(module))
    done = slapo.create_schedule(module).trace(tracer=tracer, example_inputs=given_to(tracer))
    assert not done or tracer == "pytorch"
    assert {k for k, v in vars(module).items() if before.get(k) is not v} <= {"_trace"}
    assert (module.calls, module.seen) == (0, [])
    if done:  # without rewrites the forward does what it did; with them a call is refused
        rewrite(module, Nothing())
        with pytest.raises(slapo.TraceError, match=r"cannot trace|changes attribute"):
            module(X)


@TRACERS
def test_a_trace_does_not_write_buffers_and_a_call_does(tracer: str) -> None:
    module = make(lambda self, x: self.seen.add_(1)[:4] * x)
    module.register_buffer("seen", torch.zeros(1000))
    seen, version = module.seen, module.seen._version
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer=tracer, example_inputs=given_to(tracer))
    rewrite(sch.mod, Nothing())
    assert module.seen is seen
    assert seen._version == version
    sch.mod(X)
    assert torch.equal(seen, torch.ones(1000))


@TRACERS
def test_a_trace_does_not_write_buffers_of_compiled_modules(tracer: str) -> None:
    norm = scripting.script(nn.BatchNorm1d(4))
    module = make(lambda self, x: self.norm(x).relu(), norm=norm)
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer=tracer, example_inputs=given_to(tracer))
    assert norm.num_batches_tracked.device == X.device
    assert norm.num_batches_tracked == 0
    sch.mod(X)
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_proxies_lose_is_refused_at_the_call(reentrant: bool) -> None:
    module = make(lambda self, x: checkpoint(self.fc, x, use_reentrant=reentrant))
    module.fc = nn.Linear(4, 4)
    sch = slapo.create_schedule(module)
    if slapo_trace_without_warning(sch):
        rewrite(sch.mod, Nothing())
        with pytest.raises(slapo.TraceError, match="checkpointing inside a traced forward"):
            sch.mod(X)


def test_find_captures_what_proxies_cannot_trace() -> None:
    sch = slapo.create_schedule(zoo.FAMILIES["bert"].build())
    attention = sch["bert.encoder.layer.0.attention.self"]
    found = attention.find(r"query|key|value")
    assert [node.target for ((_, node),) in found] == ["query", "key", "value"]
    assert isinstance(attention.mod, Traced)


# --- constants and inputs ------------------------------------------------------------------------
@TRACERS
def test_constants_as_scripts_write_them(tracer: str) -> None:
    """All parameters but the inputs, with their defaults, ``**kwargs`` and empty ones included."""
    model = zoo.FAMILIES["bert"].build().bert
    layer = model.encoder.layer[0]
    plain = copy.deepcopy(layer)
    parameters = inspect.signature(layer.forward).parameters.values()
    constants = {p.name: p.default for p in parameters if p.name != "hidden_states"}
    sch = slapo.create_schedule(model)
    assert sch["encoder.layer.0"].trace(tracer=tracer, flatten=True, concrete_args=constants)
    rewrite(layer, Nothing())
    assert_alike(layer, plain, torch.randn(2, 5, model.config.hidden_size), rtol=1e-6)


def test_a_constant_argument_is_part_of_what_is_shown_and_other_values_are_served() -> None:
    def forward(self: Any, x: Tensor, mask: Tensor | None = None, scale: int = 2) -> Tensor:
        return x * scale if mask is None else x + mask

    plain = make(forward)
    sch = slapo.create_schedule(copy.deepcopy(plain))
    assert sch.trace(concrete_args={"mask": None, "scale": 3})
    assert "x * 3" in sch.mod.code
    rewrite(sch.mod, Nothing())
    for args in ((X, None, 3), (X,), (X, X)):
        assert_alike(sch.mod, plain, *args)


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_example_inputs_run_through_the_model(name: str) -> None:
    family = zoo.FAMILIES[name]
    model = family.build()
    inputs = example_inputs(model)
    assert ("attention_mask" in inputs) == ("input_ids" in inputs)
    assert ("decoder_input_ids" in inputs) == (name == "t5")
    model(**inputs)


def test_example_inputs_follow_concrete_args() -> None:
    model = zoo.FAMILIES["bert_classifier"].build()
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    others = {p: None for p in inspect.signature(model.forward).parameters if p not in names}
    inputs = example_inputs(model, others)
    assert {k: tuple(v.shape) for k, v in inputs.items()} == {
        **dict.fromkeys(names[:3], (3, 13)),
        "labels": (3,),
    }
    model(**inputs)
    with pytest.raises(KeyError, match="inputs_ids"):
        example_inputs(model, {"inputs_ids": None})
    with pytest.raises(slapo.TraceError, match="pass example_inputs="):
        example_inputs(nn.Linear(2, 2))


def test_siblings_get_their_inputs_from_one_run_of_the_model() -> None:
    spec = zoo.FAMILIES["gpt2"]
    sch = slapo.create_schedule(spec.build())
    for k in range(zoo.LAYERS):
        assert sch[f"{spec.layers}.{k}"].trace(tracer="huggingface", recursive=False)
    assert len(sch.state.captured) == 1
    assert isinstance(sch[f"{spec.layers}.1"].mod, Traced)


@pytest.mark.parametrize("given", ["tokens alone", "padding", "packed samples"])
def test_masks_that_are_only_causal_are_left_out(given: str) -> None:
    """Attention with a mask misses the fastest kernels, and stages would send it on."""
    spec = zoo.FAMILIES["llama"]
    inputs: dict[str, Any] = {**spec.inputs(2, 9, False), "use_cache": False}
    mask = inputs.pop("attention_mask")
    if given == "padding":
        inputs["attention_mask"] = mask
    if given == "packed samples":
        inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    sch, plain = scheduled(spec.build(), example_inputs=inputs, flatten=True)
    graph = capture(plain, (), inputs, spec.is_leaf).graph
    calls = [n for n in graph.find_nodes(op="call_module") if ".layers." in n.target]
    masks = [node.kwargs["attention_mask"] for node in calls]
    assert masks
    assert all((mask is None) == (given == "tokens alone") for mask in masks)
    output = assert_alike(sch.mod, plain, **inputs, rtol=1e-6)
    if given == "packed samples":
        alone = plain(inputs["input_ids"][:, 4:]).logits
        torch.testing.assert_close(output.logits[:, 4:], alone, rtol=1e-5, atol=1e-5)


# --- what is traced ------------------------------------------------------------------------------
def test_dynamo_gives_one_flat_graph() -> None:
    plain = Stack(2, p=0.5)
    module = rewritten(copy.deepcopy(plain), X, tracer="dynamo", flatten=False)
    assert "layers.1.fc2" in {node.target for node in module.graph.find_nodes(op="call_module")}
    for training in (True, False):
        plain.train(training), module.train(training)
        assert_alike(module, plain, X[:1])


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x, mask=None: self.inner(x, mask) * 2,
        lambda self, x, mask=None: self.inner(x, torch.ones_like(x)) * 2,
    ],
    ids=["hands it on", "makes one"],
)
@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_traced_children_serve_calls_with_and_without_a_mask(tracer: str, forward: Any) -> None:
    """The child takes another path without one."""
    inner = make(lambda s, x, mask=None: s.fc(x) if mask is None else s.fc(x) + mask)
    inner.fc = nn.Linear(4, 4)
    plain = make(forward, inner=inner)
    sch = slapo.create_schedule(copy.deepcopy(plain))
    assert sch.trace(tracer=tracer, example_inputs=given_to(tracer, (X, X)))
    assert isinstance(sch["inner"].mod, Traced)
    for each in (sch["inner"].mod, sch.mod):
        rewrite(each, Nothing())
        for mask in (X, None):
            assert_alike(sch.mod, plain, X, mask)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_a_second_trace_is_fine_before_a_rewrite_and_refused_after(
    tracer: str, flatten: bool
) -> None:
    plain = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.ReLU())
    sch = slapo.create_schedule(copy.deepcopy(plain))
    options: Any = {"tracer": tracer, "example_inputs": given_to(tracer)}
    assert sch["0"].trace(**options)
    assert sch["0"].trace(flatten=flatten, **options)
    targets = [str(node.target) for node in sch["0"].mod.graph.find_nodes(op="call_module")]
    assert flatten == ("0.0" in targets)
    assert sch.trace(flatten=flatten, **options)
    rewrite(sch.mod, Nothing())
    assert_alike(sch.mod, plain, X)
    with pytest.warns(UserWarning, match="its graph was rewritten.*trace it once"):
        assert not sch.trace(flatten=flatten, **options)
    assert_alike(sch.mod, plain, X)


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_a_flat_trace_keeps_rewritten_modules_as_calls(tracer: str) -> None:
    plain = Stack(2)
    sch = slapo.create_schedule(copy.deepcopy(plain))
    assert sch["layers.0"].trace(tracer=tracer, example_inputs=given_to(tracer))
    layer = sch["layers.0"]
    layer.replace(nn.Tanh(), layer.find(lambda x: F.gelu(x)))
    assert sch.trace(flatten=True, tracer=tracer, example_inputs=given_to(tracer))
    targets = [str(node.target) for node in sch.mod.graph.find_nodes(op="call_module")]
    assert targets[:2] == ["layers.0", "layers.1.fc1"]
    expected = sch.mod(X)
    rewrite(sch.mod, Nothing())
    assert torch.equal(sch.mod(X), expected)
    assert not torch.equal(expected, plain(X))


def test_children_that_cannot_be_captured_stay_calls() -> None:
    plain = nn.Sequential(DataDependent(), nn.Sequential(nn.Linear(4, 4)))
    sch, _ = scheduled(copy.deepcopy(plain), example_inputs=X)
    assert [isinstance(m, Traced) for m in (sch.mod, sch.mod[0], sch.mod[1])] == [1, 0, 1]
    for x in (X, -X.abs()):
        assert_alike(sch.mod, plain, x)
