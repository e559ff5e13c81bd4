"""The three tracers through ``Schedule.trace``: Transformers modules, recursion, fall-backs."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slapo
from slapo.graph.trace.module import TracedModule
from tests.graph import zoo
from tests.primitives.models import DataDependent, Stack

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of their mean square."""
    model.zero_grad()
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    without_cache = {"use_cache": False} if takes_cache else {}
    logits = model(**inputs, **without_cache).logits
    logits.pow(2).mean().backward()
    return logits.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def check_equal(model: nn.Module, reference: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Same operations in the same order: equal up to the fused kernels' rounding."""
    (have, mine), (want, theirs) = outputs(model, inputs), outputs(reference, inputs)
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
    assert mine.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-4, atol=1e-6)


def test_siblings_are_captured_by_one_run_of_the_model() -> None:
    spec = zoo.FAMILIES["gpt2"]
    sch = slapo.create_schedule(spec.build())
    for k in range(zoo.LAYERS):
        assert sch[f"{spec.layers}.{k}"].trace(tracer="huggingface", recursive=False)
    assert len(sch.state.captured) == 1  # the second layer reuses the run of the first
    assert isinstance(sch[f"{spec.layers}.1"].mod, TracedModule)


def test_find_records_what_proxies_cannot_trace() -> None:
    sch = slapo.create_schedule(zoo.FAMILIES["bert"].build())
    attention = sch["bert.encoder.layer.0.attention.self"]
    found = attention.find(r"query|key|value")
    assert [node.target for ((_, node),) in found] == ["query", "key", "value"]
    assert isinstance(attention.mod, TracedModule)


def test_find_says_why_a_module_cannot_be_traced() -> None:
    sch = slapo.create_schedule(DataDependent())
    with pytest.raises(slapo.SlapoError, match="branch or loop depends on a tensor") as info:
        sch.find("fc")
    assert "example_inputs" in str(info.value)
    assert sch.history == []


def test_concrete_args_that_name_what_is_no_input() -> None:
    model = zoo.FAMILIES["gpt2"].build()
    names = inspect.signature(model.forward).parameters
    concrete = {
        n: p.default for n, p in names.items() if n not in ("input_ids", "attention_mask", "kwargs")
    }
    sch = slapo.create_schedule(model)
    assert sch.trace_until("transformer", tracer="huggingface", concrete_args=concrete)
    ids = torch.randint(0, 128, (2, 9))
    out = sch.mod(ids, attention_mask=torch.ones_like(ids))
    assert out.logits.shape == (2, 9, 128)


def test_recorded_training_flags_follow_the_mode() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)

    x = torch.randn(2, 3, 5, 4)
    module = Dropping()
    sch = slapo.create_schedule(copy.deepcopy(module))
    assert sch.trace(tracer="huggingface", flatten=True, example_inputs=(x,))
    for mode in (True, False):
        torch.manual_seed(1)
        want = module.train(mode)(x)
        torch.manual_seed(1)
        assert torch.equal(sch.mod.train(mode)(x), want)


# --- dynamo --------------------------------------------------------------------------------------
class Nested(nn.Module):
    """Parameters, buffers, dropout, a dict output and a nested input."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(2, p=0.5)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, pair: tuple[Tensor, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        x, y = pair
        return {"sum": self.stack(x) * scale + self.shift + y, "same": y}


def test_dynamo_gives_one_flat_graph_with_names_and_gradients() -> None:
    module = Nested().eval()
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    state = torch.get_rng_state()
    pair = (X, torch.randn(3, 4, generator=torch.Generator().manual_seed(2)))
    assert sch.trace(tracer="dynamo", example_inputs=(pair,))
    assert torch.equal(torch.get_rng_state(), state)
    gm = sch.mod
    assert "stack.layers.1.fc2" in {n.target for n in gm.graph.find_nodes(op="call_module")}
    have, want = gm(pair), reference(pair)
    assert have.keys() == want.keys()
    torch.testing.assert_close(have["sum"], want["sum"])
    have["sum"].sum().backward()
    want["sum"].sum().backward()
    for (name, p), q in zip(gm.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert list(gm.state_dict()) == list(reference.state_dict())


def test_dynamo_holds_for_any_size_and_both_modes() -> None:
    module = Stack(1)
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer="dynamo", example_inputs=X)
    x = torch.randn(5, 4)
    torch.testing.assert_close(sch.mod.eval()(x), reference.eval()(x))


def test_dynamo_refuses_what_breaks_the_graph() -> None:
    sch = slapo.create_schedule(DataDependent())
    before = sch.mod
    with pytest.warns(UserWarning, match="DataDependent"):
        assert not sch.trace(tracer="dynamo", example_inputs=X)
    assert sch.mod is before


def test_a_cache_is_refused_with_the_remedy() -> None:
    spec = zoo.FAMILIES["gpt2"]
    sch = slapo.create_schedule(spec.build())
    assert sch["transformer.h.0"].trace(tracer="huggingface", recursive=False)
    with pytest.raises(slapo.SlapoError, match="use_cache=False"):
        sch.mod(**spec.inputs(2, 7, False), use_cache=True)


def test_concrete_args_go_with_captured_inputs() -> None:
    spec = zoo.FAMILIES["gpt2"]
    sch = slapo.create_schedule(spec.build())
    block = sch["transformer.h.0.attn"]
    assert block.trace(
        tracer="huggingface", recursive=False, concrete_args={"attention_mask": None}
    )
    ids = spec.inputs(2, 7, False)["input_ids"]
    reference = spec.build()
    with torch.no_grad():
        have = sch.mod(ids, use_cache=False).logits
        want = reference(ids, use_cache=False).logits
    torch.testing.assert_close(have, want)


def test_dynamo_takes_a_keyword_that_is_none_as_not_given() -> None:
    class Loose(nn.Module):
        def forward(self, x: Tensor, **kwargs: object) -> Tensor:
            return x * 2

    sch = slapo.create_schedule(Loose())
    assert sch.trace(tracer="dynamo", example_inputs={"x": X, "flag": None})
    assert torch.equal(sch.mod(X), X * 2)
    assert torch.equal(sch.mod(X, flag=None), X * 2)


# --- what a trace must not do to a module --------------------------------------------------------
class Counting(nn.Module):
    """It counts its calls, as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind, self.n, self.cache = nn.Linear(4, 4), kind, 0, [0]
        self.register_buffer("seen", torch.zeros(1000))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "number":
            self.n += 1
        elif self.kind == "tensor":
            self.n = x
        elif self.kind == "new":
            self.last = x
        elif self.kind == "list":
            self.cache.append(x)
        elif self.kind == "failure":
            self.n = x
            raise RuntimeError("no")
        elif self.kind == "buffer":
            self.seen.add_(1)
        return self.fc(x)


CHANGES = {"number": "'n'", "tensor": "'n'", "new": "'last'", "list": "cache", "failure": "no"}


@pytest.mark.parametrize("tracer", ["pytorch", "dynamo"])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_forward_that_changes_its_module_is_refused_and_put_back(kind: str, tracer: str) -> None:
    module = Counting(kind)
    before = dict(vars(module))
    sch = slapo.create_schedule(module)
    given = X if tracer == "dynamo" else None
    with pytest.warns(UserWarning, match=CHANGES[kind]):
        assert not sch.trace(tracer=tracer, example_inputs=given)
    assert sch.mod is module
    assert {k: v for k, v in vars(module).items() if before.get(k) is not v} == {}
    assert (module.n, module.cache, hasattr(module, "last")) == (0, [0], False)


@pytest.mark.parametrize("tracer", ["pytorch", "dynamo"])
def test_a_trace_does_not_write_buffers(tracer: str) -> None:
    module = Counting("buffer")
    seen, version = module.seen, module.seen._version
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer=tracer, example_inputs=X if tracer == "dynamo" else None)
    assert module.seen is sch.mod.seen is seen
    assert seen._version == version
    sch.mod(X)
    assert torch.equal(seen, torch.ones(1000))


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_a_child_called_self(tracer: str) -> None:
    model = zoo.FAMILIES["bert"].build().bert
    layer = model.encoder.layer[0]
    reference = copy.deepcopy(layer)
    x = torch.randn(2, 5, model.config.hidden_size)
    sch = slapo.create_schedule(model)
    assert sch["encoder.layer.0"].trace(tracer=tracer)
    torch.testing.assert_close(sch["encoder.layer.0"].mod(x), reference(x))
    assert "self_1 = self.self(" in sch["encoder.layer.0.attention"].mod.code


class Region(nn.Module):
    """Its first layer runs in a region."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self.a, self.b, self.region = nn.Linear(4, 4), nn.Linear(4, 4), region

    def forward(self, x: Tensor) -> Tensor:
        regions = {
            "no_grad": torch.no_grad,
            "enable_grad": torch.enable_grad,
            "set_grad_enabled": lambda: torch.set_grad_enabled(False),
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
            "inference_mode": torch.inference_mode,
        }
        with regions[self.region]():
            y = self.a(x)
        return self.b(y.float())


class Outer(nn.Module):
    """It calls a module that has a region."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self.inner = Region(region)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


@pytest.mark.parametrize(
    "region", ["no_grad", "enable_grad", "set_grad_enabled", "autocast", "inference_mode"]
)
def test_proxies_refuse_regions_that_they_would_lose(region: str) -> None:
    enter = torch.autocast.__enter__, torch.inference_mode.__enter__
    sch = slapo.create_schedule(Outer(region))
    with pytest.warns(UserWarning, match='tracer="huggingface"'):
        assert not sch.trace(flatten=True)
    assert torch.is_grad_enabled()
    assert enter == (torch.autocast.__enter__, torch.inference_mode.__enter__)
    assert sch.trace()  # as a leaf it may do so
    assert isinstance(sch["inner"].mod, Region)


@pytest.mark.parametrize("tracer", ["huggingface", "dynamo"])
def test_no_grad_within_a_forward_is_kept(tracer: str) -> None:
    sch = slapo.create_schedule(Region("no_grad"))
    assert sch.trace(tracer=tracer, flatten=True, example_inputs=X)
    sch.mod(X).sum().backward()
    assert sch.mod.a.weight.grad is None
    assert sch.mod.b.weight.grad is not None
    with torch.no_grad():
        sch.mod(X)
        assert not torch.is_grad_enabled()


# --- optional masks ------------------------------------------------------------------------------
class Masked(nn.Module):
    """It takes another path without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.fc(x)
        return y + mask if mask is not None else y


class HandsOn(nn.Module):
    """It hands its mask on, or makes one."""

    def __init__(self, makes: bool = False) -> None:
        super().__init__()
        self.inner, self.makes = Masked(), makes

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner(x, torch.ones_like(x) if self.makes else mask) * 2


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_a_child_serves_what_its_caller_can_do_without(tracer: str) -> None:
    given = None if tracer == "pytorch" else (X, X)
    module = HandsOn()
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer=tracer, example_inputs=given)
    assert isinstance(sch["inner"].mod, TracedModule)
    for mask in (X, None):
        assert torch.equal(sch.mod(X, mask), reference(X, mask))
    sure = slapo.create_schedule(HandsOn(makes=True))
    assert sure.trace(tracer=tracer, example_inputs=given)
    assert isinstance(sure["inner"].mod, TracedModule)


@pytest.mark.parametrize("path", ["", "transformer.h.0"])
@pytest.mark.slow
def test_what_is_traced_with_a_mask_runs_without(path: str) -> None:
    spec = zoo.FAMILIES["gpt2"]
    model = spec.build()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    assert sch[path].trace(tracer="huggingface")
    assert isinstance(sch["transformer.h.0"].mod, TracedModule)
    ids = spec.inputs(2, 9, False)["input_ids"]
    padded = torch.ones_like(ids)
    padded[0, 6:] = 0
    for mask in (None, torch.ones_like(ids), padded):
        inputs = {"input_ids": ids, "attention_mask": mask}
        check_equal(sch.mod, reference, inputs)


# --- modes of inlined modules --------------------------------------------------------------------
@pytest.mark.parametrize("tracer", ["pytorch", "huggingface", "dynamo"])
def test_an_inlined_module_has_the_mode_of_the_root(tracer: str) -> None:
    given = None if tracer == "pytorch" else X

    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training)

    module = nn.Sequential(Functional(), nn.Linear(4, 4))
    module[0].eval()
    sch = slapo.create_schedule(module)
    with pytest.warns(UserWarning, match="set the modes alike"):
        assert not sch.trace(tracer=tracer, flatten=True, example_inputs=given)
    module.train()
    assert sch.trace(tracer=tracer, flatten=True, example_inputs=given)
    sch.mod(X)
    sch.mod.get_submodule("0").eval()
    with pytest.raises(slapo.SlapoError, match="'0' is in eval mode"):
        sch.mod(X)
    sch.mod.train()(X)


# --- what proxies do not survive -----------------------------------------------------------------
class Doubled(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5


class Lost(nn.Module):
    """What `kind` does, proxies would lose."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "function":
            return Doubled.apply(self.fc(x))
        return checkpoint(self.fc, x, use_reentrant=self.kind == "reentrant")


@pytest.mark.parametrize("kind", ["function", "checkpoint", "reentrant"])
def test_proxies_refuse_what_they_would_lose(kind: str) -> None:
    module = Lost(kind)
    sch = slapo.create_schedule(module)
    apply = vars(torch.autograd.Function)["apply"]
    word = "backward of its own" if kind != "checkpoint" else "torch.utils.checkpoint"
    with pytest.warns(UserWarning, match=word):
        assert not sch.trace()
    assert sch.mod is module
    assert vars(torch.autograd.Function)["apply"] is apply


def test_a_trace_falls_back_to_a_capture_where_there_are_inputs() -> None:
    module = Lost("function")
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch.trace(example_inputs=X)
    for each in (sch.mod, reference):
        each(X).sum().backward()
    assert torch.equal(sch.mod.fc.weight.grad, reference.fc.weight.grad)


@pytest.mark.parametrize("path", ["transformer.h.0", "transformer.h.0.attn"])
def test_a_layer_of_transformers_is_traced_by_default(path: str) -> None:
    spec = zoo.FAMILIES["gpt2"]
    model = spec.build()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    assert sch[path].trace(recursive=False)
    check_equal(sch.mod, reference, {"input_ids": spec.inputs(2, 9, False)["input_ids"]})


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface", "dynamo"])
def test_constants_as_scripts_write_them(tracer: str) -> None:
    """All parameters but the inputs, with their defaults, ``**kwargs`` and empty ones included."""
    model = zoo.FAMILIES["bert"].build().bert
    layer = model.encoder.layer[0]
    reference = copy.deepcopy(layer)
    parameters = inspect.signature(layer.forward).parameters.values()
    constants = {p.name: p.default for p in parameters if p.name != "hidden_states"}
    sch = slapo.create_schedule(model)
    assert sch["encoder.layer.0"].trace(tracer=tracer, flatten=True, concrete_args=constants)
    x = torch.randn(2, 5, model.config.hidden_size)
    torch.testing.assert_close(sch["encoder.layer.0"].mod(x), reference(x))


def test_naming_a_flag_fixes_the_flag_and_nothing_else() -> None:
    spec = zoo.FAMILIES["gpt2"]
    model = spec.build()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    constants = {"use_cache": False}
    assert sch.trace_until("transformer", tracer="huggingface", concrete_args=constants)
    inputs = spec.inputs(2, 9, False)
    have, want = (m(**inputs, use_cache=False).logits for m in (sch.mod, reference))
    torch.testing.assert_close(have, want)


# --- what proxies cannot answer ------------------------------------------------------------------
class Pair(nn.Module):
    """It returns a dict with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(first=self.fc(x), second=x)


def asks_isinstance(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if isinstance(x, Tensor) else x


def asks_in_a_test(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) * 2 if isinstance(module.fc(x), (tuple, list)) else x


def asks_is_tensor(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if torch.is_tensor(x) else x


def asks_parameter(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if isinstance(x.T, nn.Parameter) else x


def asks_abstract(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if isinstance(x, Mapping) else x


def asks_size(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if isinstance(x.shape[0], int) else x


def asks_class(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.__class__ is Tensor else x


def asks_match(module: nn.Module, x: Tensor) -> Tensor:
    match x:
        case Tensor():
            return x * 2
    return x


def asks_and_swallows(module: nn.Module, x: Tensor) -> Tensor:
    try:
        return x * 2 if isinstance(x, Tensor) else x
    except Exception:
        return x


def asks_hasattr(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if hasattr(x, "nested") else x


def asks_hasattr_of_tensors(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if hasattr(x, "shape") else x


def asks_getattr(module: nn.Module, x: Tensor) -> Tensor:
    return x * getattr(x, "factor", 2)


def asks_output(module: nn.Module, x: Tensor) -> Tensor:
    out = module.pair(x)
    return out.first if hasattr(out, "third") else out.second


def asks_by_trying(module: nn.Module, x: Tensor) -> Tensor:
    try:
        return x.nested
    except AttributeError:
        return x * 2


def _deep(x: Any) -> Any:
    return x.nested


def asks_by_trying_deep(module: nn.Module, x: Tensor) -> Tensor:
    try:
        return _deep(x)
    except AttributeError:
        return x * 2


ATTRIBUTES = (asks_hasattr, asks_getattr, asks_output, asks_by_trying, asks_by_trying_deep)
KINDS = (
    *(asks_isinstance, asks_in_a_test, asks_is_tensor, asks_parameter, asks_abstract, asks_size),
    *(asks_class, asks_match, asks_and_swallows, asks_hasattr_of_tensors),
)


class Asking(nn.Module):
    """Its forward is a function."""

    def __init__(self, ask: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.pair, self.ask = nn.Linear(4, 4), Pair(), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(self, x)


@pytest.mark.parametrize("ask", [*KINDS, *ATTRIBUTES])
def test_proxies_refuse_questions_that_they_cannot_answer(ask: Any) -> None:
    module = Asking(ask)
    sch = slapo.create_schedule(module)
    with pytest.warns(UserWarning, match=r"asks .*test_tracers.py:\d+"):
        assert not sch.trace()
    assert sch.mod is module


@pytest.mark.parametrize("ask", [asks_isinstance, asks_hasattr, asks_getattr, asks_by_trying])
def test_a_capture_answers_what_proxies_cannot(ask: Any) -> None:
    module = Asking(ask)
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch.trace(example_inputs=X)
    assert torch.equal(sch.mod(X), reference(X))


def test_plain_attributes_of_what_a_child_returns_are_no_question() -> None:
    module = Asking(lambda module, x: module.pair(x).first + getattr(x, "T").T)  # noqa: B009
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch.trace(recursive=False)
    assert torch.equal(sch.mod(X), reference(X))


def test_kinds_that_torch_itself_looks_at_are_no_question() -> None:
    def compute(module: nn.Module, x: Tensor) -> Tensor:
        y = F.dropout(torch.cat([x, x]), p=0.0, training=False)
        y = F.pad(y, (0, 1)).view(x.shape[0], -1).clamp(min=0.5)
        y = y + torch.zeros((x.shape[0], 1)) + torch.full((x.size(0), 1), 2.0)
        return F.layer_norm(y, (10,))[..., : x.size(1)] * torch.arange(x.size(1))

    module = Asking(compute)
    sch = slapo.create_schedule(module)
    assert sch.trace()
    assert torch.equal(sch.mod(X), module(X))


# --- random numbers ------------------------------------------------------------------------------
def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.rand_like(x)


def seeds_cuda(x: Tensor) -> Tensor:
    torch.cuda.manual_seed_all(0)
    return x + torch.rand_like(x)


def seeds_anew(x: Tensor) -> Tensor:
    torch.seed()
    return x + torch.rand_like(x)


def seeds_generator(x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(1)
    return x + torch.rand_like(x)


def forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        noise = torch.rand_like(x)
    return x + noise


def sets_state(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand_like(x)
    torch.set_rng_state(state)
    return x + noise


def reads_seed(x: Tensor) -> Tensor:
    return x * (torch.initial_seed() % 7)


def draws_number(x: Tensor) -> Tensor:
    return x * random.random()


def draws_choice(x: Tensor) -> Tensor:
    return x if random.choice([True, False]) else x * 2


OWN = random.Random(3)


def draws_own(x: Tensor) -> Tensor:
    return x * OWN.random()


def seeds_python(x: Tensor) -> Tensor:
    random.seed(0)
    return x * 2


def draws_numpy(x: Tensor) -> Tensor:
    return x * float(numpy.random.rand())


def seeds_numpy(x: Tensor) -> Tensor:
    numpy.random.seed(0)
    return x * 2


COUNTED = iter(range(9))


def draws_constant(x: Tensor) -> Tensor:
    return x * torch.rand(()).item()


RANDOM = (
    *(seeds, seeds_cuda, seeds_anew, seeds_generator, forks, sets_state, reads_seed),
    *(draws_number, draws_choice, draws_own, seeds_python, draws_numpy, seeds_numpy),
)


def generators() -> list[Any]:
    """States of the process that numbers are drawn from."""
    states = torch.get_rng_state().tolist(), random.getstate(), OWN.getstate()
    return [*states, str(numpy.random.get_state(legacy=False))]


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface", "dynamo"])
@pytest.mark.parametrize("draw", RANDOM)
def test_seeds_and_draws_of_python_are_refused(draw: Any, tracer: str) -> None:
    module = Asking(lambda module, x: draw(x))
    sch = slapo.create_schedule(module)
    before = generators()
    with pytest.warns(UserWarning, match="random generator|random number|OWN"):
        assert not sch.trace(tracer=tracer, example_inputs=None if tracer == "pytorch" else X)
    assert sch.mod is module
    assert generators() == before


def test_proxies_refuse_a_number_of_torch_that_would_be_a_constant() -> None:
    sch = slapo.create_schedule(Asking(lambda module, x: draws_constant(x)))
    before = generators()
    with pytest.warns(UserWarning, match="random number"):
        assert not sch.trace()
    assert generators() == before


@pytest.mark.parametrize(
    "number", [lambda: numpy.random.default_rng().random(), time.perf_counter, COUNTED.__next__]
)
def test_proxies_refuse_a_forward_that_differs_from_run_to_run(number: Any) -> None:
    module = Asking(lambda module, x: x * float(number()))
    sch = slapo.create_schedule(module)
    with pytest.warns(UserWarning, match="two runs of the forward differ.*a clock"):
        assert not sch.trace()
    assert sch.mod is module


@pytest.mark.parametrize("draws_in_training", [True, False])
def test_proxies_refuse_the_mode_that_differs_from_run_to_run(draws_in_training: bool) -> None:
    """The two modes answer for each other only where they do the same."""

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        drawn = time.perf_counter() if module.training is draws_in_training else 1.0
        return x * drawn

    module = Asking(forward).train(not draws_in_training)
    sch = slapo.create_schedule(module)
    assert sch.trace()
    assert torch.equal(sch.mod(X), X)
    sch.mod.train(draws_in_training)
    with pytest.raises(slapo.SlapoError, match="mode"):
        sch.mod(X)
    sch = slapo.create_schedule(Asking(forward).train(draws_in_training))
    with pytest.warns(UserWarning, match="two runs of the forward differ"):
        assert not sch.trace()


def test_what_a_leaf_does_to_generators_is_undone() -> None:
    """A capture runs leaves to see what they return."""
    module = nn.Sequential(Asking(lambda module, x: seeds(x)), nn.Linear(4, 4))
    sch = slapo.create_schedule(module)
    before = generators()
    assert sch.trace(tracer="huggingface", recursive=False, example_inputs=X)
    assert generators() == before


def test_draws_within_the_graph_are_kept() -> None:
    module = Asking(lambda module, x: x + torch.rand_like(x))
    sch = slapo.create_schedule(copy.deepcopy(module))
    assert sch.trace()
    torch.manual_seed(2)
    want = module(X)
    torch.manual_seed(2)
    assert torch.equal(sch.mod(X), want)


class AsksCuda(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.get_rng_state()
        return x * 2


def test_a_capture_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a device that this process has not used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was started"))
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)))
    assert sch.trace(tracer="huggingface", example_inputs=torch.ones(3, 4))
    sch = slapo.create_schedule(AsksCuda())
    with pytest.warns(UserWarning, match="seeds a random generator, or reads"):
        assert not sch.trace(tracer="huggingface", example_inputs=torch.ones(3, 4))


def test_a_leaf_called_before_an_entered_model_collects_its_outputs() -> None:
    """Both name the collector of Transformers, which is put back."""
    family = zoo.FAMILIES["t5"]
    model = family.build()
    example, other = family.inputs(3, 13, False), family.inputs(2, 7, False)
    expected = model(**other).logits
    sch = slapo.create_schedule(model)
    assert sch.trace(
        tracer="huggingface",
        flatten=True,
        leaf_modules=["encoder"],
        example_inputs=example,
        concrete_args={"use_cache": False},
    )
    torch.testing.assert_close(sch.mod(**other).logits, expected)


# --- what a refusal says -------------------------------------------------------------------------
def test_a_tensor_of_a_closure_is_no_change_of_an_attribute() -> None:
    twice = torch.tensor(2.0)
    module = Asking(lambda module, x: x * twice)
    sch = slapo.create_schedule(module)
    with pytest.warns(UserWarning, match="neither a parameter nor a buffer"):
        assert not sch.trace()
    assert "_tensor_constant0" not in vars(module)
    assert sch.trace(example_inputs=X)
    assert torch.equal(sch.mod(X), X * 2)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, *xs: Tensor) -> Tensor:
        return self.fc(sum(xs))


def test_any_number_of_arguments_needs_an_example() -> None:
    sch = slapo.create_schedule(Sums())
    with pytest.warns(UserWarning, match="any number of arguments.*pass example_inputs"):
        assert not sch.trace()
    assert sch.trace(example_inputs=(X, X))
    assert torch.equal(sch.mod(X, X), sch.mod.fc(X + X))
    with pytest.raises(slapo.SlapoError, match="entries"):
        sch.mod(X)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @functools.cached_property
    def total(self) -> float:
        return float(self.fc.weight.sum())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.total


def test_each_tracer_tells_its_own_reason() -> None:
    sch = slapo.create_schedule(Remembers())
    with pytest.warns(UserWarning, match="by a capture") as told:
        assert not sch.trace(example_inputs=X)
    _, _, capture = str(told[0].message).partition("by a capture")
    assert "Proxy" not in capture


def test_named_results_of_torch_stay_named() -> None:
    module = Asking(lambda module, x: module.fc(x).max(-1))
    expected = module(X)
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer="huggingface", example_inputs=X)
    assert torch.equal(sch.mod(X).values, expected.values)
    assert torch.equal(sch.mod(X).indices, expected.indices)
