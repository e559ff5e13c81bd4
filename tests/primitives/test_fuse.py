"""``.fuse``: compilers, names, and what would be lost."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo import Schedule, scripting
from slapo.graph.fuse.modules import CompiledModule
from tests.primitives.models import Block

X = torch.randn(3, 4)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(bias + x)


def decomposed() -> Schedule:
    sch = slapo.create_schedule(Block())
    sch["fc1"].decompose()
    return sch


def test_the_default_is_torchscript_and_fused_module() -> None:
    sch = decomposed()
    sch.fuse(sch.find(bias_gelu))
    assert isinstance(sch["FusedModule_0"].mod, torch.jit.ScriptModule)


def test_paths_within_a_fused_module_are_short_where_there_is_no_state() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    sch = slapo.create_schedule(nn.Sequential(inner, nn.Linear(4, 4)))
    sch.trace(flatten=True)
    sch.fuse(sch.find(lambda x: F.dropout(slapo.call_module(r"0\.0", x))))
    assert {name for name, _ in sch["FusedModule_0"].mod.named_modules()} == {"", "0", "0.0", "1"}


def test_backward_hooks_at_the_ends_move() -> None:
    def scheduled(fuse: bool) -> tuple[Tensor, list[str]]:
        torch.manual_seed(0)
        model = Block()
        sch = slapo.create_schedule(model)
        order: list[str] = []

        def scale(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
            order.append("of the input")
            return tuple(2 * g for g in grad_input)

        def scale_first(module: nn.Module, grad_output: Any) -> Any:
            order.append("of the output")
            return tuple(3 * g for g in grad_output)

        handle = model.fc2.register_full_backward_hook(scale)
        model.drop.register_full_backward_pre_hook(scale_first)
        sch.trace()
        if fuse:
            match = sch.find(lambda x: F.dropout(slapo.call_module("fc2", x)))
            sch.fuse(match, compiler=None)
        x = X.clone().requires_grad_()
        for _ in range(3):
            sch.mod(x).square().sum().backward()
        handle.remove()  # the handle that the user kept still works
        sch.mod(x).square().sum().backward()
        return x.grad, order

    (grad, order), (expected, expected_order) = scheduled(True), scheduled(False)
    assert order == expected_order
    torch.testing.assert_close(grad, expected)


def test_without_torchscript_inductor_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scripting, "has_scripts", lambda: False)
    sch = decomposed()
    with caplog.at_level("INFO", "slapo"):
        sch.fuse(sch.find(bias_gelu), name="BiasGeLU")
    assert "BiasGeLU is compiled by inductor: torch" in caplog.text
    assert isinstance(sch["BiasGeLU_0"].mod, CompiledModule)
