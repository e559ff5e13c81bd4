"""Schedules that compute or train something else, which a cold reading found accepted."""

import copy
import gc
import subprocess
import sys
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore

import slapo
from tests.distributed import Job
from tests.graph.served import make

on_two_ranks = Job(2)


@pytest.mark.distributed
def test_all_cases_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    on_two_ranks.run()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Scaled(nn.Module):
    """Its second parameter is no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w) * self.b


def pair(sch: slapo.Schedule) -> slapo.Schedule:
    sch["fc1"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", 1).sync("fwd_post", "all_reduce")
    return sch


def gathers_and_sums(sch: slapo.Schedule) -> None:
    fc1 = sch["fc1"].shard("weight", 0).shard("bias", 0).sync("fwd_pre", "SR->RR")
    fc1.sync("bwd_post", "all_reduce")


def puts_another_around_the_slices(sch: slapo.Schedule) -> None:
    old: Any = pair(sch)["fc2"].mod
    new = nn.Linear(old.in_features, old.out_features)
    new.weight, new.bias = old.weight, old.bias
    sch["fc2"].replace(new)


def says_what_is_no_bias(sch: slapo.Schedule) -> None:
    sch["fc2"].replace(Scaled())
    sch["fc2"].shard("w", 1).sync("fwd_post", "all_reduce").annotate("b", "partial_grad", True)


def sums_what_has_no_parameter(sch: slapo.Schedule) -> None:
    sch["fc2"].replace(nn.Identity())
    sch["fc2"].sync("fwd_post", "all_reduce")


@on_two_ranks
def what_looks_like_a_mistake_and_is_none(rank: int, world: int) -> None:
    """Beside the mistakes of ``golden/mistakes/build_on_two_ranks.txt``."""
    for schedule in (
        gathers_and_sums,
        says_what_is_no_bias,
        puts_another_around_the_slices,
        sums_what_has_no_parameter,
    ):
        sch = slapo.create_schedule(MLP())
        schedule(sch)
        slapo.build(sch)


# --- what the bias of a layer by rows shares ----------------------------------------------------
@on_two_ranks
def a_bias_that_another_module_has_too(rank: int, world: int) -> None:
    torch.manual_seed(0)
    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 4), "c": nn.Linear(4, 4)}
    model: Any = make(lambda s, x: s.c(torch.tanh(s.b(torch.tanh(s.a(x))))), **layers)
    model.c.bias = model.b.bias
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    sch["a"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["b"].shard("weight", 1).sync("fwd_post", "reduce_scatter", axis=1)
    sch["c"].sync("fwd_pre", "all_gather", axis=1, tensor_parallel_output_grad=False)
    slapo.build(sch)
    x = torch.randn(2, 6, 4)
    for each in (model, reference):
        each(x).square().sum().backward()
    assert_close(model.c.bias.grad, reference.c.bias.grad, rtol=0, atol=1e-5)


# --- inputs in objects, and by keyword only ------------------------------------------------------
@dataclass
class State:
    hidden: Tensor
    step: int = 0


class Named(NamedTuple):
    hidden: Tensor
    step: int = 0


def reading(read: Callable[[Any], Tensor]) -> nn.Module:
    return make(lambda self, state: self.mlp(read(state)), mlp=MLP())


def by_keyword() -> nn.Module:
    return make(lambda self, *, x, memory: self.mlp(x) + memory, mlp=MLP())


def by_place() -> nn.Module:
    return make(lambda self, x, memory: self.mlp(x) + memory, mlp=MLP())


class Opaque:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@on_two_ranks
def inputs_in_objects_and_by_keyword(rank: int, world: int) -> None:
    from transformers.modeling_outputs import BaseModelOutput

    kinds: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
        (State, lambda state: state.hidden),
        (Named, lambda state: state.hidden),
        (lambda x: UserDict(x=x, n=1), lambda state: state["x"]),
        (lambda x: OrderedDict(x=x, n=1), lambda state: state["x"]),
        (lambda x: BaseModelOutput(last_hidden_state=x), lambda state: state.last_hidden_state),
        (lambda x: [State(x), 1], lambda state: state[0].hidden),
    ]
    for wrap, read in [*kinds, (Opaque, lambda state: state.hidden)]:
        model = reading(read)
        reference = copy.deepcopy(model)
        x, y = (torch.ones(2, 4).requires_grad_() for _ in range(2))
        sch = slapo.create_schedule(model)
        sch["mlp.fc1"].shard("weight", 0).shard("bias", 0)
        sch["mlp.fc2"].shard("weight", 1).sync("fwd_post", "all_reduce")
        sch.sync("bwd_post", "all_reduce")
        slapo.build(sch)
        if wrap is Opaque:
            text = r"the call has no tensor, in \['Opaque'\]; put the sync on"
            with pytest.raises(TypeError, match=text):
                model(wrap(x))
            continue
        model(wrap(x)).square().sum().backward()
        reference(wrap(y)).square().sum().backward()
        assert_close(x.grad, y.grad, rtol=0, atol=1e-5)
    sch = slapo.create_schedule(by_keyword())
    sch.sync("fwd_pre", "all_gather", axis=0, tensor_parallel_output_grad=False)
    x, memory = torch.ones(1, 4), torch.ones(2, 4)
    shapes = [sch.mod(x=x, memory=memory).shape[0], sch.mod(memory=memory, x=x).shape[0]]
    for build in (by_keyword, by_place):
        named = slapo.create_schedule(build()).sync("fwd_pre", "RS->RR", argument="memory").mod
        shapes.append(named(x=torch.ones(2, 4), memory=torch.ones(2, 2)).shape[-1])
    shapes.append(named(torch.ones(2, 4), torch.ones(2, 2)).shape[-1])
    assert shapes == [2, 2, 4, 4, 4]


# --- around the model ----------------------------------------------------------------------------
def test_optimizers_of_what_was_taken_out_go_on() -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    old = model.fc1
    sch["fc1"].replace(nn.Linear(4, 8))
    slapo.build(sch)
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)  # of what trains elsewhere
    (old(torch.ones(2, 4)).sum() + model(torch.ones(2, 4)).sum()).backward()
    optimizer.step()
    kept = MLP()
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)
    sch = slapo.create_schedule(kept)
    sch["fc1"].shard("weight", 0).checkpoint()
    slapo.build(sch)[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()


# --- after build ---------------------------------------------------------------------------------
def test_primitives_after_build(caplog: pytest.LogCaptureFixture) -> None:
    sch = slapo.create_schedule(MLP())
    slapo.build(sch)
    sch["fc1"].checkpoint()
    assert 'sch["fc1"].checkpoint() after slapo.build: it was not checked' in caplog.text


# --- undone --------------------------------------------------------------------------------------


def freeze(param: nn.Parameter) -> None:
    param.requires_grad_(False)


def watch(param: nn.Parameter) -> None:
    param.register_hook(lambda grad: 0 * grad)
    param.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())


@pytest.mark.parametrize("act", [freeze, watch])
def test_what_a_failed_primitive_does_to_parameters_is_undone(act: Any, fails: None) -> None:
    sch = slapo.create_schedule(MLP())
    seen = []
    sch.mod.fc1.weight.register_hook(lambda grad: seen.append(1))
    with pytest.raises(ValueError, match="no"):
        sch.fails(lambda sch: [act(p) for p in sch.mod.parameters()])
    sch.mod(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in sch.mod.parameters())
    assert seen == [1]


def test_a_failed_primitive_leaves_no_tag(fails: None) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.LayerNorm(4)))
    sch["0"].annotate("weight", "first", 1)
    with pytest.raises(ValueError, match="no"):
        sch["0"].fails(lambda s: s.annotate("weight", "first", 3).annotate("weight", "second", 2))
    for weight in (sch.mod[0].weight, copy.deepcopy(sch.mod)[0].weight):
        assert weight.first == 1
        assert not hasattr(weight, "second")


# --- copies --------------------------------------------------------------------------------------
@on_two_ranks
def a_copy_after_a_functional_call(rank: int, world: int) -> None:
    sch = pair(slapo.create_schedule(MLP()))
    model = slapo.build(sch)[0]
    theirs = {name: p * 1.0 for name, p in model.named_parameters()}
    functional_call(model, theirs, (torch.ones(2, 4),)).sum().backward()
    again = copy.deepcopy(model)
    assert_close(again(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_a_group_ends_where_torch_has_imported_more_meanwhile() -> None:
    """As a dispatch mode does at its first operation; in a process of its own."""
    program = """
import weakref, torch, torch.distributed as dist, slapo
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
group = weakref.ref(dist.group.WORLD)
sch = slapo.create_schedule(torch.nn.Linear(4, 4))
slapo.check(sch, torch.ones(2, 4))
dist.destroy_process_group()
assert group() is None
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_group_ends_when_it_is_destroyed() -> None:
    """Threads of gloo that outlive it abort the process at its end."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    group = weakref.ref(dist.group.WORLD)
    sch = pair(slapo.create_schedule(MLP()))
    sch["fc2"].annotate("bias", "partial_grad", True)
    model = slapo.build(sch)[0]
    loss = model(torch.ones(2, 4)).sum()  # whose graph is alive to the end
    loss.backward()
    assert sch.group is group()
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
    with pytest.raises(slapo.SlapoError, match=r"is not initialized \(anymore\); initialize it"):
        model(torch.ones(2, 4))


def test_a_schedule_is_not_iterable() -> None:
    with pytest.raises(TypeError, match="is not iterable"):
        list(slapo.create_schedule(MLP()))
