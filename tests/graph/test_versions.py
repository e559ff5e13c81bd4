"""Several graphs of one module, for calls that take different paths: rewrites reach all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.graph.trace.module import TracedModule
from slapo.pattern import call_module
from tests.graph.zoo import FAMILIES, each_layer

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Masked(nn.Module):
    """With a mask it adds it, without it scales; what follows is common to both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.a(x)
        y = torch.tanh(y + mask) if mask is not None else torch.sigmoid(y * 2)
        return F.gelu(self.b(y) + x) * 2


CALLS = ((X, X), (X,), (X, None))


def both() -> tuple[slapo.Schedule, nn.Module]:
    """A traced module of two graphs, and the original."""
    module = Masked()
    sch = slapo.create_schedule(copy.deepcopy(module))
    assert sch.trace()
    assert isinstance(sch.mod, TracedModule)
    assert len(sch.mod.graphs) == 2
    return sch, module


def check(sch: slapo.Schedule, module: nn.Module) -> None:
    for args in CALLS:
        results = []
        for each in (sch.mod, module):
            each.zero_grad()
            output = each(*args)
            output.sum().backward()
            results.append((output, [p.grad for p in each.parameters()]))
        torch.testing.assert_close(results[0], results[1])


class Gelu(nn.Module):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        Gelu.calls += 1
        return F.gelu(x + y)


def test_what_both_graphs_have_is_found_once_and_replaced_in_both() -> None:
    sch, module = both()
    found = sch.find(lambda x, y: F.gelu(x + y))
    assert len(found) == 1
    sch.replace(Gelu(), found)
    before = Gelu.calls
    check(sch, module)
    assert Gelu.calls - before == len(CALLS)
    assert [n for n, _ in sch.mod.named_children()] == ["a", "b", "Gelu_0"]


@pytest.mark.parametrize("compiler", ["TorchScript", None])
def test_what_both_graphs_have_is_fused_in_both(compiler: str | None) -> None:
    sch, module = both()
    (found,) = sch.find(lambda x, y: F.gelu(x + y))
    sch.fuse(found, compiler=compiler, name="AddGelu")
    check(sch, module)
    for owner in sch.mod.graphs:
        assert [n.target for n in owner.graph.find_nodes(op="call_module")][-1] == "AddGelu_0"


@pytest.mark.parametrize("act", [torch.tanh, torch.sigmoid])
def test_what_one_graph_has_is_found_and_replaced_there(act: Any) -> None:
    sch, module = both()
    found = sch.find(lambda x: act(x))
    assert len(found) == 1
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(x)
        return act(x)

    sch.replace(counted, found)
    check(sch, module)
    assert len(calls) == (1 if act is torch.tanh else 2)


def test_modules_called_in_one_graph_only_are_kept_for_it() -> None:
    """A chain that one of the graphs has otherwise is replaced in the other, and stays here."""
    sch, module = both()
    (found,) = sch.find(lambda x, m: torch.tanh(call_module("a", x) + m))

    class Front(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = sch.mod.a

        def forward(self, x: Tensor, m: Tensor) -> Tensor:
            return torch.tanh(self.a(x) + m)

    sch.replace(Front(), found)
    assert "a" in dict(sch.mod.named_children())
    for args in CALLS:
        torch.testing.assert_close(sch.mod(*args), module(*args))


def test_modules_replaced_and_sharded_later_are_so_in_all_graphs() -> None:
    sch, module = both()
    sch["b"].replace(nn.Identity())
    module.b = nn.Identity()
    for args in CALLS:
        torch.testing.assert_close(sch.mod(*args), module(*args))


def test_a_failed_rewrite_changes_no_graph() -> None:
    sch, module = both()
    before = [str(owner.graph) for owner in sch.mod.graphs]
    (found,) = sch.find(lambda x, y: F.gelu(x + y))
    with pytest.raises(ValueError, match="required"):
        sch.replace(lambda a, b, c: a, found)
    assert [str(owner.graph) for owner in sch.mod.graphs] == before
    check(sch, module)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_layer_of_transformers_is_rewritten_for_calls_with_and_without_a_mask(name: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    eager = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    path = [path for path, _ in each_layer(model, family)][-1]
    assert sch[path].trace(flatten=True, tracer="huggingface")
    patterns = {
        "llama": lambda x, y: F.silu(x) * y,
        "gpt2": lambda x, y: x + y,
        "bert": lambda x: F.gelu(x),
    }
    found = sch[path].find(patterns[name])
    assert found
    sch[path].fuse(found[-1])
    for batch, length in ((2, 21), (1, 9)):
        inputs = family.inputs(batch, length, False)
        for mask in (inputs["attention_mask"], torch.ones_like(inputs["attention_mask"]), None):
            results = []
            for each in (sch.mod, eager):
                each.zero_grad()
                given = {"input_ids": inputs["input_ids"], "attention_mask": mask}
                cache = {} if name == "bert" else {"use_cache": False}
                logits = each(**given, **cache).logits
                logits.pow(2).mean().backward()
                results.append((logits, {n: p.grad for n, p in each.named_parameters()}))
            torch.testing.assert_close(results[0], results[1])


def test_a_cache_asked_for_by_the_config_alone_is_not_made() -> None:
    """GraniteMoe's model has no parameter ``use_cache``; its layers take it among **kwargs."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    config = GraniteMoeConfig(vocab_size=32, **sizes, **heads, num_experts_per_tok=1)
    model = GraniteMoeForCausalLM._from_config(config).eval()
    ids, padded = torch.randint(1, 32, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    padded[1, 4:] = 0
    calls = [{}, {"use_cache": False}, {"use_cache": False, "attention_mask": padded}]
    pairs = [(call, model(input_ids=ids, **call).logits) for call in calls]

    whole = slapo.create_schedule(copy.deepcopy(model))
    assert whole.trace_until(
        "model", tracer="huggingface", example_inputs={"input_ids": ids[:, :5]}
    )
    layer = slapo.create_schedule(copy.deepcopy(model))
    assert layer["model.layers.1"].trace(tracer="huggingface", flatten=True)
    assert model.config.use_cache is True
    for call, logits in pairs[:2]:
        torch.testing.assert_close(whole.mod(input_ids=ids, **call).logits, logits)
    for call, logits in pairs[1:]:
        torch.testing.assert_close(layer.mod(input_ids=ids, **call).logits, logits)


# --- batches of one ------------------------------------------------------------------------------
class Positioned(nn.Module):
    """Adds what may be the same for all samples, as Llama's layers do."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.fc, self.asks = nn.Linear(8, 8), asks

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.fc(x).view(x.size(0), x.size(1), 2, 4) * positions.unsqueeze(2)
        y = y.reshape(x.size(0), x.size(1), -1)
        if self.asks and positions.size(0) > 1:
            y = y + 1
        return y if mask is None else y * mask


def positions_of(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 4, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("traced_with", [1, 3])
def test_what_is_the_same_for_all_samples_may_be_given_for_each(traced_with: int) -> None:
    module = Positioned()
    sch = slapo.create_schedule(copy.deepcopy(module))
    example = torch.randn(3, 5, 8), positions_of(traced_with, 5), torch.ones(3, 5, 1)
    assert sch.trace(tracer="huggingface", flatten=True, example_inputs=example)
    for batch, length in ((2, 7), (1, 4), (5, 2)):
        x, mask = torch.randn(batch, length, 8), torch.rand(batch, length, 1)
        for given in {traced_with, batch} - ({1} if traced_with > 1 and batch > 1 else set()):
            positions = positions_of(batch if given > 1 else 1, length)
            for rest in ((), (mask,)):
                assert torch.equal(sch.mod(x, positions, *rest), module(x, positions, *rest))


def test_a_batch_of_one_in_the_example_is_no_limit() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    sch = slapo.create_schedule(copy.deepcopy(module))
    assert sch.trace(tracer="huggingface", flatten=True, example_inputs=torch.randn(1, 5, 8))
    x = torch.randn(4, 3, 8)
    assert torch.equal(sch.mod(x), module(x))


def test_code_that_asks_for_a_batch_of_one_keeps_its_limit() -> None:
    module = Positioned(asks=True)
    sch = slapo.create_schedule(copy.deepcopy(module))
    x, one, all_of_them = torch.randn(3, 5, 8), positions_of(1, 5), positions_of(3, 5)
    assert sch.trace(tracer="huggingface", flatten=True, example_inputs=(x, one))
    assert torch.equal(sch.mod(x, one), module(x, one))
    with pytest.raises(slapo.SlapoError, match=r"positions\.size\(0\) == 1"):
        sch.mod(x, all_of_them)


def test_the_error_is_of_the_graph_that_comes_closest() -> None:
    sch = slapo.create_schedule(Positioned(asks=True))
    example = torch.randn(3, 5, 8), positions_of(1, 5), torch.ones(3, 5, 1)
    assert sch.trace(tracer="huggingface", flatten=True, example_inputs=example)
    with pytest.raises(slapo.SlapoError, match=r"only while positions\.size\(0\) == 1"):
        sch.mod(torch.randn(3, 5, 8), positions_of(3, 5))
