"""``.checkpoint``: names stay, activations go, whatever stands around it."""

import copy
import inspect
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing import assert_close

import slapo
from slapo.op import CheckPointWrapper
from slapo.wrapper import ModuleWrapper
from tests.graph.served import make
from tests.primitives.models import Block, Computes, Stack, Twice


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Size of what autograd keeps for the backward pass."""
    sizes: list[int] = []

    def pack(t: Tensor) -> Tensor:
        sizes.append(t.numel() * t.element_size())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(sizes)


def same_gradients(model: nn.Module, reference: nn.Module, *args: Any, **kwargs: Any) -> None:
    found = []
    for m in (model, reference):
        m.zero_grad()
        out = m(*args, **kwargs)
        out.square().sum().backward()
        found.append((out, {n: p.grad for n, p in m.named_parameters()}))
    torch.testing.assert_close(found[0], found[1])


def test_a_module() -> None:
    model = Stack()
    reference = copy.deepcopy(model)
    names, x = list(model.state_dict()), torch.randn(3, 4)
    paths = [path for path, _ in slapo.create_schedule(model).named_schedules()]
    sch = slapo.create_schedule(model)
    before = saved_bytes(model, x)
    block = sch["layers.1"].mod
    node = sch["layers.1"].checkpoint()
    assert isinstance(node.mod, CheckPointWrapper)
    assert node.mod.mod is block
    assert model.layers[1] is node.mod
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names
    assert [path for path, _ in sch.named_schedules()] == paths
    assert saved_bytes(model, x) < before
    same_gradients(model, reference, x)
    reference.load_state_dict(model.state_dict())
    model.load_state_dict(reference.state_dict())


def test_primitives_act_on_the_module_within() -> None:
    sch = slapo.create_schedule(Stack())
    sch["layers.0"].checkpoint()
    sch["layers.0.fc1"].checkpoint().shard("weight", 0)
    assert sch["layers.0.fc1"].mod.mod.weight.orig_shape == (8, 4)
    new = nn.Linear(4, 8)
    assert sch["layers.0.fc1"].replace(new).mod.mod is new
    assert isinstance(sch["layers.0.fc1"].mod, CheckPointWrapper)
    assert sch.mod.layers[0].mod.fc1.mod is new


def test_order_args_fn() -> None:
    sch = slapo.create_schedule(nn.Sequential(make(lambda self, a, b: a - b)))
    sch["0"].checkpoint(order_args_fn=lambda b, a: (a, b))
    assert sch["0"].mod(torch.ones(1), torch.zeros(1)).item() == -1


def test_hooks_run_once_around_it() -> None:
    model = nn.Sequential(Block())
    calls: list[str] = []
    handle = model[0].register_forward_hook(lambda m, i, o: calls.append("after"))
    model[0].register_forward_pre_hook(lambda m, i: calls.append("before"))
    slapo.create_schedule(model)["0"].checkpoint()
    model(torch.randn(2, 4)).sum().backward()
    assert calls == ["before", "after"]
    handle.remove()  # the user's handle still works
    model(torch.randn(2, 4))
    assert calls == ["before", "after", "before"]


def test_state_dict_code_of_the_module_still_runs() -> None:
    class Extra(nn.Linear):
        _version = 7

        def get_extra_state(self) -> Any:
            return {"k": 1}

        def set_extra_state(self, state: Any) -> None:
            self.loaded = state

    model = nn.Sequential(Extra(2, 2))
    state = model.state_dict()
    slapo.create_schedule(model)["0"].checkpoint()
    assert list(model.state_dict()) == list(state)
    assert model.state_dict()._metadata == state._metadata
    model.load_state_dict(state)
    assert model[0].mod.loaded == {"k": 1}


# --- operations ------------------------------------------------------------------------------
def mlp(x: Tensor) -> Tensor:
    return F.gelu(slapo.call_module("fc1", x))


def test_operations() -> None:
    model = Block()
    reference = copy.deepcopy(model)
    names = list(model.state_dict())
    sch = slapo.create_schedule(model)
    sch.checkpoint(sch.find(mlp))
    sch.checkpoint(sch.find(lambda x: F.dropout(slapo.call_module("fc2", x))))
    assert list(sch.child) == ["fc1", "fc2", "drop", "CheckPointWrapper_0", "CheckPointWrapper_1"]
    assert isinstance(sch["CheckPointWrapper_1"].mod, CheckPointWrapper)
    assert list(sch.mod.state_dict()) == names
    assert [name for name, _ in sch.mod.named_parameters()] == names
    same_gradients(sch.mod, reference, torch.randn(3, 4))
    same_gradients(copy.deepcopy(sch.mod), reference, torch.randn(3, 4))
    sch.mod.eval()
    assert not sch.mod.CheckPointWrapper_0.mod.training


def test_modules_within_operations_keep_their_paths() -> None:
    sch = slapo.create_schedule(Block())
    sch.checkpoint(sch.find(mlp))
    calls: list[int] = []
    sch["fc1"].sync("fwd_post", lambda m, i, o: calls.append(1))
    sch["fc1"].replace(nn.Linear(4, 8))
    sch.mod(torch.randn(2, 4))
    calls.clear()  # the capture has run them, on stand-ins
    sch.mod(torch.randn(2, 4))
    assert calls == [1]


def test_a_write_to_another_value_is_none_of_its_inputs() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.fc(x)
        y = torch.tanh(x * 2)
        (x + 1).mul_(2)
        return y

    model = make(forward, fc=nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    sch.checkpoint(sch.find(lambda x: torch.tanh(x * 2)))
    same_gradients(sch.mod, reference, torch.randn(3, 4))


def test_a_module_that_a_checkpoint_calls_stays() -> None:
    model = Twice()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    sch.checkpoint(sch.find(lambda x: torch.cos(slapo.call_module("fc", x))))
    rest = sch.find(lambda x: torch.sin(slapo.call_module("fc", x)))
    sch.replace(nn.Sequential(sch["fc"].mod, Computes(torch.sin)), rest, name="Last")
    x = torch.randn(3, 4)
    torch.testing.assert_close(sch.mod(x), reference(x))


def caches(self: Any, x: Tensor, past: Any = None, use_cache: bool = False) -> Tensor:
    """Appends to a cache that it is given, as a decoder layer does."""
    y = self.fc(x)
    if past is not None:
        past.states.append(y)
        y = torch.cat(past.states).tanh()
    return y.tanh()


class ListCache:
    def __init__(self) -> None:
        self.states: list[Tensor] = []


def test_a_cache_is_left_out_while_there_are_gradients() -> None:
    sch = slapo.create_schedule(nn.ModuleList([make(caches, fc=nn.Linear(4, 4))]))
    module, cache = sch["0"].checkpoint().mod, ListCache()
    with pytest.warns(UserWarning, match="use_cache=False"):
        module(torch.ones(2, 4), past=cache, use_cache=True).sum().backward()
    assert cache.states == []
    with torch.no_grad():
        module(torch.ones(2, 4), past=cache, use_cache=True)
    assert len(cache.states) == 1


class Owner(nn.Module):
    """Has what a subclass and its objects may hide from each other."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = 2.0
        self.calls = 0

    @property
    def twice(self) -> float:
        return 2 * self.scale

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * self.scale

    def direct(self, x: Tensor) -> Tensor:
        return self.forward(x) + 1

    def train(self, mode: bool = True) -> "Owner":
        super().train(mode)
        self.fc.eval()
        return self

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("wrap", ["checkpoint", "fork_rng"])
def test_a_wrapped_module_is_still_one_of_its_class(wrap: str) -> None:
    slapo.set_random_seed(2013)
    sch = slapo.create_schedule(nn.Sequential(Owner(), Owner()))
    owner = sch["0"].mod
    getattr(sch["0"], wrap)()
    wrapped = sch["0"].mod
    assert isinstance(wrapped, Owner)
    assert isinstance(wrapped, ModuleWrapper)
    assert type(wrapped).__name__ == "Owner"  # policies of Accelerate go by the name
    assert inspect.signature(wrapped.forward) == inspect.signature(owner.forward)  # as Trainer asks
    assert (wrapped.scale, wrapped.twice, len(wrapped)) == (2.0, 4.0, 3)
    wrapped.scale = 3.0
    assert owner.scale == 3.0
    owner.scale = 2.5
    assert wrapped.scale == 2.5
    wrapped.function = len  # a layer of Transformers gets attributes that it did not have
    assert owner.function is len
    with pytest.raises(AttributeError):
        _ = wrapped.nothing
    assert wrapped.double().float().fc.weight is owner.fc.weight
    wrapped.train()
    assert owner.training
    assert not owner.fc.training
    x = torch.ones(2, 4)
    assert_close(wrapped.direct(x), owner(x) + 1)
    assert owner.calls == 2
    sch["0"].fork_rng() if wrap == "checkpoint" else sch["0"].checkpoint()
    assert isinstance(sch["0"].mod, Owner)
    sch["0"].mod.eval()
    assert not owner.training
    for again in (copy.deepcopy(sch["0"].mod), pickle.loads(pickle.dumps(sch["0"].mod))):
        assert isinstance(again, Owner)
        assert isinstance(again, CheckPointWrapper) == isinstance(sch["0"].mod, CheckPointWrapper)
        assert again.fc is not owner.fc
        assert again.fc is again.mod.fc
        assert again._parameters is again.mod._parameters
        assert_close(again(x), owner(x))
    sch["0"].replace(nn.Linear(4, 4))
    assert not isinstance(sch["0"].mod, Owner)
    assert isinstance(sch["0"].mod, nn.Linear)


def test_policies_by_class_find_what_is_checkpointed() -> None:
    sch = slapo.create_schedule(nn.Sequential(Block(), Block()))
    sch["0"].trace()
    sch.select("*").checkpoint()
    named = [module for module in sch.mod.modules() if type(module).__name__ == "Block"]
    assert len(named) == 2
    for found in (Block, type(named[0])):  # Accelerate takes the class of the first of that name
        policy = ModuleWrapPolicy({found})
        assert [policy(child, False, 0) for child in sch.mod] == [True, True]


def sharded_by_rows(sch: slapo.Schedule) -> None:
    sch["fc2"].shard("weight", 1).sync("fwd_post", "all_reduce")


def checkpointed(sch: slapo.Schedule) -> None:
    sch["fc2"].checkpoint()


@pytest.mark.parametrize("before", [sharded_by_rows, checkpointed])
def test_pickles_of_a_trace_find_classes_that_were_made(before: Any) -> None:
    sch = slapo.create_schedule(Block())
    before(sch)
    sch.trace()
    again = pickle.loads(pickle.dumps(sch.mod))
    assert type(again.fc2) is type(sch["fc2"].mod)
    assert_close(again(torch.ones(2, 4)), sch.mod(torch.ones(2, 4)))


def acts_twice() -> nn.Module:
    """One activation, called at two places."""
    layers = {"fc1": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "act": nn.GELU()}
    return nn.Sequential(OrderedDict(**layers, fc2=nn.Linear(4, 4), act_again=layers["act"]))


def norm_and_gelu(x: Any) -> Any:
    return F.gelu(slapo.call_module("norm", x))


@pytest.mark.parametrize("compiler", ["TorchScript", None])
def test_fused_inside_of_a_checkpoint(compiler: str | None) -> None:
    """The graph around it calls one of the fused modules, too, and not the other."""
    model = acts_twice()
    reference, params = copy.deepcopy(model), dict(model.named_parameters())
    sch = slapo.create_schedule(model)
    sch.checkpoint(sch.find(norm_and_gelu)[0])
    (found,) = sch.find(norm_and_gelu)
    assert found[0][0] == "CheckPointWrapper_0"
    sch.fuse(found, compiler=compiler)
    assert "act" in sch
    assert "norm" not in sch
    assert len(list(sch.mod.parameters())) == len(params)
    x = torch.randn(3, 4)
    for _ in range(3):  # TorchScript profiles first
        sch.mod.zero_grad(), reference.zero_grad()
        out, expected = sch.mod(x), reference(x)
        assert_close(out, expected)
        out.square().sum().backward(), expected.square().sum().backward()
    wanted = dict(reference.named_parameters())
    for name, param in params.items():
        assert_close(param.grad, wanted[name].grad)


def test_hooks_of_a_call_outside_of_the_checkpoint_are_not_lost() -> None:
    sch = slapo.create_schedule(acts_twice())
    sch.checkpoint(sch.find(norm_and_gelu)[0])
    sch["act"].sync("fwd_post", lambda module, args, output: 2 * output)
    before = str(sch.mod), sch["CheckPointWrapper_0"].mod.mod.code
    with pytest.raises(RuntimeError, match="other call 'act_1'"):
        sch.fuse(sch.find(norm_and_gelu)[0], compiler=None)
    assert (str(sch.mod), sch["CheckPointWrapper_0"].mod.mod.code) == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_script_that_saves_the_last_tensor(reentrant: bool) -> None:
    """A recomputation must not end by an exception from within it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    sch.fuse(sch.find(lambda x: F.gelu(x)))
    wrapped = sch["FusedModule_0"].checkpoint(use_reentrant=reentrant).mod
    assert isinstance(wrapped, CheckPointWrapper)
    for _ in range(3):
        same_gradients(sch.mod, reference, torch.randn(3, 4))
