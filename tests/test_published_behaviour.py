"""How the published Slapo behaves where scripts rely on it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import slapo
from slapo.pattern import call_module
from tests.distributed import run_distributed

TRACERS = ["pytorch", "huggingface", "dynamo"]


class Loose(nn.Module):
    """A forward with all that a signature can have."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, must: Tensor | None, *rest: Tensor, scale: float = 2.0, **kwargs: Any
    ) -> Tensor:
        y = self.fc(x) * scale
        return y if must is None else y + must


def left_over(module: nn.Module, *inputs: str) -> dict[str, Any]:
    """The idiom of published scripts."""
    parameters = inspect.signature(module.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in inputs}


@pytest.mark.parametrize("tracer", TRACERS)
def test_constants_read_off_a_signature(tracer: str) -> None:
    model, x = Loose(), torch.randn(2, 4)
    constants = left_over(model, "x", "must")
    assert constants["kwargs"] is inspect.Parameter.empty
    sch = slapo.create_schedule(model)
    expected = model(x, x)
    assert sch.trace(tracer=tracer, concrete_args=constants, example_inputs=(x, x))
    assert torch.equal(sch.mod(x, x), expected)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x) + 1


class Kept(Inner):
    pass


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = Inner()
        self.kept = Kept()

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(self.b(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Middle()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


@pytest.mark.parametrize("tracer", TRACERS)
def test_inlined_modules_below_a_child_are_no_nodes(tracer: str) -> None:
    model = Outer()
    sch = slapo.create_schedule(model)
    inner = model.a.b
    x = torch.randn(2, 4)
    expected = model(x)
    assert sch["a"].trace(flatten=True, tracer=tracer, example_inputs=x)
    assert sch["a.b"].mod is inner
    assert "a.b.c" not in sch
    with pytest.raises(KeyError, match="inlined"):
        sch["a.b.c"]
    assert sch["a"].get_module("b") is inner
    assert sch["a.b"].get_module("c") is sch.get_module("a.b.c") is inner.c
    with pytest.raises(slapo.SlapoError, match="'b' was inlined"):
        sch["a.b"].checkpoint()
    # What the graph still calls is a node, under the name it is called by.
    assert sch["a.b.c.0"].mod is inner.c[0]
    assert list(sch["a"].child) == ["b", "kept"]
    assert list(sch["a.b"].child) == ["c.0", "c.1"]
    assert torch.equal(sch.mod(x), expected)
    sch["a.b.c.1"].replace(nn.Identity())
    assert not torch.equal(sch.mod(x), expected)


@pytest.mark.parametrize("name", ["a.kept", "Kept"])
@pytest.mark.parametrize("tracer", TRACERS)
def test_named_leaves_are_leaves_of_the_schedule(name: str, tracer: str) -> None:
    sch = slapo.create_schedule(Outer())
    inputs = torch.randn(2, 4)
    assert sch.trace(flatten=True, tracer=tracer, leaf_modules=[name], example_inputs=inputs)
    assert list(sch.child) == ["a"]
    assert list(sch["a"].child) == ["b.c.0", "b.c.1", "kept"]
    assert not isinstance(sch["a.kept"].mod, fx.GraphModule)
    assert not sch["a.kept"].child
    assert "a.kept.c" not in sch


def test_code_is_that_of_the_graph() -> None:
    sch = slapo.create_schedule(Outer())
    assert sch.trace(flatten=True)
    assert "self.a.b.c" in sch.mod.code
    sch.mod(torch.randn(2, 4))
    sch.replace(torch.sin, sch.find_node("a.b.c.1")[0])
    assert "torch.sin" in sch.mod.code
    assert "torch.sin" in str(sch.mod)
    sch.mod(torch.randn(2, 4))
    assert "torch.sin" in str(sch.mod)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.37)
        self.plain = nn.LayerNorm(16, eps=1e-3, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.drop(self.norm(x)))


def test_functions_in_patterns_match_modules_as_they_are() -> None:
    sch = slapo.create_schedule(Normed())
    assert len(sch.find(lambda x: F.layer_norm(x, 16))) == 2
    assert len(sch.find(lambda x: F.layer_norm(x, (16,)))) == 2
    assert len(sch.find(lambda x: F.dropout(x))) == 1
    assert len(sch.find(lambda x: F.dropout(F.layer_norm(x, 16)))) == 1


class Same(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * torch.sin(x) + x * torch.sin(y)


def test_an_argument_used_twice_is_one_value() -> None:
    sch = slapo.create_schedule(Same())
    assert len(sch.find(lambda v: v * torch.sin(v))) == 1
    assert len(sch.find(lambda v, w: v * torch.sin(w))) == 2


def test_decompose_after_a_shard_that_made_nothing_smaller() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 6), nn.ReLU()))
    weight, x = sch.mod[0].weight, torch.randn(3, 4)
    expected = sch.mod(x)
    sch["0"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
    sch["0"].decompose()
    assert sch["0"].mod.weight is weight
    assert sch["0"].metadata.primitives["shard"]
    model, _ = slapo.build(sch)
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(ValueError, match="sharded already"):
        sch["0"].shard("weight", axis=0)


def test_decompose_after_a_row_shard_alone() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 6), nn.ReLU()))
    x = torch.randn(3, 4)
    expected = sch.mod(x)
    sch["0"].shard("weight", axis=1).sync("fwd_post", "all_reduce").decompose()
    model, _ = slapo.build(sch)
    torch.testing.assert_close(model(x), expected)


def decompose_a_slice(rank: int, world_size: int) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 6), nn.ReLU()))
    sch["0"].shard("bias", axis=0)
    with pytest.raises(ValueError, match=r"sharded already \(bias\)"):
        sch["0"].decompose()


@pytest.mark.distributed
def test_decompose_after_a_shard_that_made_it_smaller() -> None:
    run_distributed(decompose_a_slice, 2)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Joined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * 2)


def test_hooks_of_a_chain_go_to_what_replaces_it() -> None:
    model, seen = Chain(), []
    model.first.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.first.register_full_backward_hook(lambda *_: seen.append("backward"))
    model.last.register_forward_hook(lambda *_: seen.append("post"))
    sch = slapo.create_schedule(model)
    subgraph = sch.find(lambda x: call_module("last", call_module("first", x)))
    new = Joined()
    sch.replace(new, subgraph)
    sch.mod(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert seen == ["pre", "post", "backward"]
    hooks = slapo.utils.common.get_hooks(new)
    assert [len(hooks[mode]) for mode in ("fwd_pre", "fwd_post", "bwd_post")] == [1, 1, 1]


class Soft(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x, dim=-1, _stacklevel=3, dtype=None)


def test_keywords_that_say_nothing_are_dropped() -> None:
    def lean(x: Tensor, dim: int) -> Tensor:
        return torch.exp(x) / torch.exp(x).sum(dim, keepdim=True)

    sch = slapo.create_schedule(Soft())
    sch.trace()
    x = torch.randn(2, 3)
    expected = sch.mod(x)
    sch.replace(lean, sch.find_node(lambda node: node.target is F.softmax)[0])
    torch.testing.assert_close(sch.mod(x), expected)


def fill(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.ones_(param)


def test_a_part_is_built_by_itself() -> None:
    with slapo.init_empty_weights():
        model = Outer()
    part = slapo.create_schedule(model.a)
    built, _ = slapo.build(part, init_weights=fill)
    assert built is model.a
    assert not any(p.is_meta for p in built.parameters())


def test_a_node_is_built_by_itself() -> None:
    with slapo.init_empty_weights():
        model = Outer()
    sch = slapo.create_schedule(model)
    sch["a.b"].checkpoint()
    built, optimizer = slapo.build(sch["a.b"])
    assert built is sch["a.b"].mod
    assert optimizer is None
    assert not any(p.is_meta for p in built.parameters())
    assert all(p.is_meta for p in model.a.kept.parameters())
    sch["a"].checkpoint()
    with pytest.raises(slapo.SlapoError, match=r'sch\["a"\]\.checkpoint'):
        slapo.build(sch["a.b"])
