"""Where kernels may stand in for operations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from slapo.op import residual
from slapo.op.dispatch import is_plain


def test_tensors_of_torch_s_own() -> None:
    assert is_plain()
    assert is_plain(torch.empty(2), nn.Parameter(torch.empty(2)))
    assert not is_plain(torch.empty(2), nn.parameter.UninitializedParameter())
    assert not is_plain(torch.empty(2), None)
    with FakeTensorMode():
        fake = torch.empty(2, device="cuda")
    assert not is_plain(fake)


def in_a_mode(see: Any, x: Tensor) -> None:
    with FlopCounterMode(display=False):
        see(x)


def in_forward_mode(see: Any, x: Tensor) -> None:
    with forward_ad.dual_level():
        see(x)


@pytest.mark.parametrize(
    "watch",
    [
        in_a_mode,
        in_forward_mode,
        lambda see, x: torch.func.grad(lambda x: see(x).sum())(x),
        lambda see, x: torch.func.vmap(see)(x),
        lambda see, x: torch.jit.trace(see, x, check_trace=False),
    ],
)
def test_no_kernel_hides_what_somebody_is_to_see(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residual, "_unsupported", lambda *operands: None)
    end = residual.DenseDropoutAddNorm(3, 3)
    end.backend = "triton"
    found: list[tuple[bool, bool]] = []

    def see(x: Tensor) -> Tensor:
        found.append((is_plain(x), end._is_fused(x, x)))
        return x + 1

    x = torch.ones(3)
    see(x)
    watch(see, x)
    assert found == [(True, True), (False, False)]


def test_a_compiler_sees_operations() -> None:
    found: list[bool] = []

    @torch.compile(backend="eager")
    def run(x: Tensor) -> Tensor:
        found.append(is_plain(x))
        return x + 1

    run(torch.ones(2))
    assert found == [False]
