"""``.fuse``: compilers, names, and what would be lost."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo import Schedule
from tests.fingerprint import fingerprint
from tests.primitives.models import Attention, Block

X = torch.randn(3, 4)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(bias + x)


def decomposed() -> Schedule:
    sch = slapo.create_schedule(Block())
    sch["fc1"].decompose()
    return sch


@pytest.mark.parametrize("compiler", ["TorchScript", None])
def test_values_gradients_and_names(compiler: str | None) -> None:
    sch = decomposed()
    reference = copy.deepcopy(sch.mod)
    names = list(sch.mod.state_dict())
    assert sch.fuse(sch.find(bias_gelu), compiler=compiler, name="BiasGeLU") is sch
    fused = sch["BiasGeLU_0"].mod
    if compiler is None:
        assert isinstance(fused, nn.Sequential)
        assert type(fused).__name__ == "BiasGeLU"
    else:
        assert isinstance(fused, torch.jit.ScriptModule)
    for m in (sch.mod, reference):
        m(X).square().sum().backward()
    torch.testing.assert_close(sch.mod(X), reference(X))
    assert list(sch.mod.state_dict()) == names
    for (_, p), (_, q) in zip(
        sch.mod.named_parameters(), reference.named_parameters(), strict=True
    ):
        torch.testing.assert_close(p.grad, q.grad)


def test_the_default_is_torchscript_and_fused_module() -> None:
    sch = decomposed()
    sch.fuse(sch.find(bias_gelu))
    assert isinstance(sch["FusedModule_0"].mod, torch.jit.ScriptModule)


@pytest.mark.slow
def test_inductor() -> None:
    sch = decomposed()
    expected = sch.mod(X)
    sch.fuse(sch.find(bias_gelu), compiler="inductor", name="F")
    with torch.no_grad():
        torch.testing.assert_close(sch.mod(X), expected)


def test_names_count_up() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(torch.cos(torch.sin(torch.cos(x))))

    sch = slapo.create_schedule(Two())
    for k in range(2):
        sch.fuse(sch.find(lambda x: torch.sin(torch.cos(x)))[:1], compiler=None, name="SC")
        assert f"SC_{k}" in sch
    assert torch.allclose(sch.mod(X), Two()(X))


def refused(sch: Schedule, error: type[Exception], message: str, *args: Any, **kw: Any) -> None:
    before = fingerprint(sch)
    with pytest.raises(error, match=message):
        sch.fuse(*args, **kw)
    assert fingerprint(sch) == before


@pytest.mark.parametrize("compiler", ["nvfuser", "torchscript", 3, ""])
def test_unknown_compilers(compiler: Any) -> None:
    sch = decomposed()
    match = sch.find(bias_gelu)
    refused(sch, ValueError, "compiler", match, compiler=compiler)


def test_a_horizontal_match_is_refused() -> None:
    sch = slapo.create_schedule(Attention())
    match = sch.find("[qkv]$")
    refused(sch, ValueError, "one subgraph can be fused at a time, got 3", match)


def test_a_match_of_nothing_is_refused() -> None:
    sch = slapo.create_schedule(Attention())
    match = sch.find(lambda x: torch.sin(x))
    assert match == []
    refused(sch, ValueError, "matched nothing", match)


@pytest.mark.parametrize("name", ["", "a.b", "1st"])
def test_bad_names(name: str) -> None:
    sch = decomposed()
    match = sch.find(bias_gelu)
    before = fingerprint(sch)
    with pytest.raises(ValueError, match="name"):
        sch.fuse(match, compiler=None, name=name)
    assert fingerprint(sch) == before


@pytest.mark.parametrize("hook", ["fwd_post", "bwd_post"])
def test_a_hook_that_would_be_lost_is_a_runtime_error(hook: str) -> None:
    sch = slapo.create_schedule(Block())
    sch["fc1"].sync(hook, lambda *args: None)
    match = sch.find(lambda x: F.gelu(slapo.call_module("fc1", x)))
    before = fingerprint(sch)
    with pytest.raises(RuntimeError, match=rf"hooks \['{hook}'\] of 'fc1' would be lost"):
        sch.fuse(match, compiler=None)
    assert fingerprint(sch) == before


def test_hooks_at_the_ends_move() -> None:
    sch = slapo.create_schedule(Block())
    calls: list[str] = []
    sch["fc2"].sync("fwd_pre", lambda m, i: calls.append("pre"))
    sch["drop"].sync("fwd_post", lambda m, i, o: calls.append("post"))
    sch.fuse(sch.find(lambda x: F.dropout(slapo.call_module("fc2", x))), compiler=None)
    sch.mod(X)
    assert calls == ["pre", "post"]


def test_inner_values_used_outside() -> None:
    class Leaky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(x)
            return torch.cos(y) + y

    sch = slapo.create_schedule(Leaky())
    match = sch.find(lambda x: torch.cos(torch.sin(x)))
    refused(sch, ValueError, "'sin' .*used outside, by 'add'", match, compiler=None)


def test_what_the_compiler_refuses_is_a_slapo_error() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(unscriptable(x))

    sch = slapo.create_schedule(nn.Sequential(Odd()))
    sch.trace(flatten=True)
    match = sch.find(lambda x: torch.relu(unscriptable(x)))
    if match:
        refused(sch, slapo.SlapoError, "TorchScript cannot compile", match)


@torch.fx.wrap
def unscriptable(x: Tensor, **kwargs: Any) -> Tensor:
    return x.new_tensor(list(x.flatten().tolist())).view_as(x)
