"""Linear layers with what follows them, against plain ones."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.op.fused_bias import (
    ACTIVATIONS,
    BiasGeLUFunction,
    bias_dropout,
    bias_new_gelu,
    is_new_gelu,
)
from slapo.op.linear import LinearWithAct, LinearWithDropout
from slapo.op.mlp import FusedMLP

X = torch.randn(3, 5, 7)


def written_gelu(x: Tensor) -> Tensor:
    """``gelu_new`` as GPT-2 has it."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def compare(found: Callable[..., Tensor], wanted: Callable[..., Tensor], *args: Any) -> None:
    """Values and gradients."""
    inputs = [arg.clone().requires_grad_() for arg in args]
    outs = [function(*inputs) for function in (found, wanted)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
    scale = torch.randn(outs[0].shape)
    grads = [torch.autograd.grad((out * scale).sum(), inputs) for out in outs]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=2e-6)


# --- functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [bias_new_gelu, BiasGeLUFunction.apply])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 7), (7,)])
def test_a_bias_and_the_new_gelu(function: Any, shape: tuple[int, ...]) -> None:
    compare(function, lambda x, bias: written_gelu(x + bias), torch.randn(shape), torch.randn(7))


def test_the_function_s_gradient_has_a_gradient() -> None:
    x, bias = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 1))
    assert torch.autograd.gradcheck(BiasGeLUFunction.apply, (x, bias))
    assert torch.autograd.gradgradcheck(BiasGeLUFunction.apply, (x, bias))


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_only_gradients_that_are_needed(needed: tuple[bool, bool]) -> None:
    x, bias = torch.randn(3, 4), torch.randn(4)
    for tensor, need in zip((x, bias), needed, strict=True):
        tensor.requires_grad_(need)
    BiasGeLUFunction.apply(x, bias).sum().backward()
    assert (x.grad is not None, bias.grad is not None) == needed


@pytest.mark.parametrize("training", [True, False])
def test_a_bias_and_a_dropout(training: bool) -> None:
    def seeded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            torch.manual_seed(3)
            return function(*args)

        return run

    compare(
        seeded(lambda x, bias: bias_dropout(x, bias, 0.4, training)),
        seeded(lambda x, bias: F.dropout(x + bias, 0.4, training)),
        X,
        torch.randn(7),
    )


def test_activations_by_name() -> None:
    x = torch.linspace(-4, 4, 33)
    transformers = pytest.importorskip("transformers.activations")
    for name, function in ACTIVATIONS.items():
        torch.testing.assert_close(function(x), transformers.ACT2FN[name](x), rtol=1e-5, atol=1e-6)
    assert is_new_gelu(transformers.ACT2FN["gelu_new"])
    assert is_new_gelu(transformers.ACT2FN["gelu_pytorch_tanh"])
    assert not is_new_gelu(transformers.ACT2FN["gelu"])


# --- layers --------------------------------------------------------------------------------------
def same_layer(layer: nn.Linear) -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.load_state_dict(layer.state_dict())
    return plain


def compare_layers(layer: nn.Module, plain: Callable[..., Tensor], *linears: nn.Module) -> Tensor:
    """Values, dropped alike, and gradients of parameters; those of `plain` are in `linears`."""
    outs = []
    for function, modules in ((layer, [layer]), (plain, linears)):
        torch.manual_seed(5)
        out = function(X)
        parameters = [p for module in modules for p in module.parameters()]
        outs.append((out, list(torch.autograd.grad(out.square().sum(), parameters))))
    (found, grads), (wanted, wanted_grads) = outs
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("act", "plain"),
    [
        ("gelu_new", written_gelu),
        (nn.GELU("tanh"), written_gelu),
        (nn.GELU(), F.gelu),
        ("silu", F.silu),
        (torch.tanh, torch.tanh),
    ],
)
def test_a_layer_and_its_activation(bias: bool, act: Any, plain: Any) -> None:
    layer = LinearWithAct(7, 4, act, bias=bias)
    other = same_layer(layer)
    compare_layers(layer, lambda x: plain(other(x)), other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("use_torchscript", [True, False])
def test_a_layer_and_its_dropout(bias: bool, inplace: bool, use_torchscript: bool) -> None:
    layer = LinearWithDropout(7, 400, bias, 0.25, inplace, use_torchscript)
    other = same_layer(layer)
    compare_layers(layer.eval(), other, other)
    found = compare_layers(layer.train(), lambda x: F.dropout(other(x), 0.25), other)
    assert 0.2 < (found == 0).float().mean() < 0.3


@pytest.mark.parametrize("use_torchscript", [True, False])
def test_both_layers_of_a_block(use_torchscript: bool) -> None:
    mlp = FusedMLP(7, 28, "gelu_new", 0.1, use_torchscript)
    plain = nn.Sequential(same_layer(mlp.fc_in), nn.GELU("tanh"), same_layer(mlp.fc_out))
    compare_layers(mlp, lambda x: F.dropout(plain(x), 0.1), plain)


@pytest.mark.parametrize("act", ["gelu_new", "relu", nn.PReLU()])
def test_modules_can_be_copied_and_pickled(act: Any) -> None:
    mlp = FusedMLP(7, 28, act, 0.5, use_torchscript=True)
    mlp(X)  # TorchScript has run
    mlp.eval()
    for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert torch.equal(other(X), mlp(X))
    names = ["fc_in.weight", "fc_in.bias", "fc_out.weight", "fc_out.bias"]
    assert [name for name in mlp.state_dict() if "act_fn" not in name] == names
