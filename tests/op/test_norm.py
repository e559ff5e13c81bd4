"""Norms by torch's function, against those of Transformers."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import slapo
from slapo.op.norm import RMSNorm


def made(cls: type[nn.Module], offset: float, size: int, eps: float = 1e-5) -> Any:
    """A norm of Transformers; T5 and others have Llama's, and Gemma's weights are less one."""
    norm: Any = cls(size, eps=eps)
    nn.init.uniform_(norm.weight, 0.5 - offset, 1.5 - offset)
    return norm


PAIRS = [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)]


@pytest.mark.parametrize(("cls", "offset"), PAIRS)
@pytest.mark.parametrize("shape", [(3, 11, 17), (1, 64), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_those_of_the_original(
    cls: type[nn.Module], offset: float, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    original = made(cls, offset, shape[-1])
    norm = RMSNorm.like(original, offset)
    x, scale = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape)
    wanted, found = original(x), norm(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    inputs = (x, original.weight)
    wanted_grads = torch.autograd.grad((wanted * scale).sum(), inputs)
    grads = torch.autograd.grad((found * scale).sum(), inputs)
    torch.testing.assert_close(grads, wanted_grads, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize(("cls", "offset"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_half_precision_is_rounded_where_the_original_rounds(
    cls: type[nn.Module], offset: float, dtype: torch.dtype, is_mixed: bool
) -> None:
    original = made(cls, offset, 257).to(torch.float32 if is_mixed else dtype)
    norm = RMSNorm.like(original, offset)
    x = (3 * torch.randn(64, 257)).to(dtype).requires_grad_()
    wanted, found = original(x), norm(x)
    assert found.dtype == wanted.dtype
    # Alike but where the last bit of float32 decides how a number is rounded.
    assert (found != wanted).float().mean() < 1e-3
    torch.testing.assert_close(found, wanted)
    (wanted_grad,) = torch.autograd.grad(wanted.float().sum(), x)
    (grad,) = torch.autograd.grad(found.float().sum(), x)
    torch.testing.assert_close(grad, wanted_grad)


def test_the_parameter_stays_under_its_name() -> None:
    model = nn.Sequential(LlamaRMSNorm(8), nn.Linear(8, 3))
    names = list(model.state_dict())
    sch = slapo.create_schedule(model)
    sch["0"].replace(RMSNorm.like(model[0]))
    assert list(sch.mod.state_dict()) == names
    norm = RMSNorm.like(nn.RMSNorm(8, eps=1e-4), 1.0)
    assert (norm.eps, norm.offset) == (1e-4, 1.0)
    assert "offset=1.0" in repr(norm)
    copied = copy.deepcopy(norm)
    x = torch.randn(2, 8)
    assert torch.equal(copied(x), norm(x))
