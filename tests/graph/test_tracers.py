"""The three tracers through ``Schedule.trace``: Transformers modules, recursion, fall-backs."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import slapo
from slapo.graph.traced_module import TracedModule
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


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("flatten", [False, True])
def test_layers_of_transformers_are_recorded_where_they_stand(family: str, flatten: bool) -> None:
    spec = zoo.FAMILIES[family]
    model = spec.build()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    for k in range(zoo.LAYERS):
        assert sch[f"{spec.layers}.{k}"].trace(
            tracer="huggingface", flatten=flatten, recursive=not flatten
        )
    assert len(sch.state.captured) == 1  # the second layer reuses the run of the first
    assert isinstance(sch[f"{spec.layers}.1"].mod, TracedModule)
    for batch, length in ((2, 21), (5, 7)):
        check_equal(sch.mod, reference, spec.inputs(batch, length, False))
    sch.mod.train()
    check_equal(sch.mod, reference.train(), spec.inputs(2, 9, False))


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "llama"])
def test_containers_down_to_the_layers(family: str) -> None:
    spec = zoo.FAMILIES[family]
    model = spec.build()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    deepest = [p for p in spec.chain if p]
    assert sch.trace_until(deepest, tracer="huggingface")
    for path in ("", *deepest):
        assert isinstance(sch[path].mod, TracedModule), path
    for name, layer in ((n, s) for n, s in sch.named_schedules() if n not in ("", *deepest)):
        assert not isinstance(layer.mod, fx.GraphModule), name
    for batch, length in ((2, 21), (5, 7)):
        check_equal(sch.mod, reference, spec.inputs(batch, length, False))
    assert list(sch.mod.state_dict()) == list(reference.state_dict())
    layer = next(n for n, _ in sch.named_schedules() if n == f"{spec.layers}.0")
    assert sch[layer].cut_pipeline_stage()


def test_find_records_what_proxies_cannot_trace() -> None:
    sch = slapo.create_schedule(zoo.FAMILIES["bert"].build())
    attention = sch["bert.encoder.layer.0.attention.self"]
    found = attention.find(r"query|key|value")
    assert [node.target for ((_, node),) in found] == ["query", "key", "value"]
    assert sch.history[-1].call().endswith("trace(tracer='huggingface')")


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
    assert not any(n.op == "call_module" for n in gm.graph.nodes)
    assert "stack.layers.1.fc2.weight" in {n.target for n in gm.graph.nodes if n.op == "get_attr"}
    have, want = gm(pair), reference(pair)
    assert have.keys() == want.keys()
    torch.testing.assert_close(have["sum"], want["sum"])
    have["sum"].sum().backward()
    want["sum"].sum().backward()
    for (name, p), q in zip(gm.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert list(gm.state_dict()) == list(reference.state_dict())


def test_dynamo_holds_for_the_sizes_mode_and_constants_of_the_example() -> None:
    sch = slapo.create_schedule(Stack(1))
    assert sch.trace(tracer="dynamo", example_inputs=X)
    with pytest.raises(slapo.SlapoError, match=r"x.size\(0\) == 3"):
        sch.mod(torch.randn(5, 4))
    with pytest.raises(slapo.SlapoError, match="traced in train mode"):
        sch.mod.eval()(X)


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
