"""What Python decides by must stay true: a call for which it does not is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
TRACERS = pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])


class Does(nn.Module):
    """Its forward is a function."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.drop, self.body = nn.Linear(8, 8), nn.Dropout(0.0), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def traced(body: Callable[[Any, Tensor], Any], tracer: str) -> tuple[Any, Any]:
    """The traced module and a copy of the original."""
    module = Does(body)
    original = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer=tracer, example_inputs=X)
    return sch.mod, original


def equal_or_refused(module: Any, original: Any, x: Tensor, reason: str) -> None:
    try:
        found = module(x)
    except slapo.SlapoError as error:
        found = str(error)
    if isinstance(found, str):
        assert reason in found
        return
    expected = original(x)
    assert torch.equal(found, expected)
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)


# --- the number of dimensions --------------------------------------------------------------------
def by_dim(module: Any, x: Tensor) -> Tensor:
    y = module.fc(x).squeeze(1)
    return y if y.dim() == 3 else y * 2


def by_ndim(module: Any, x: Tensor) -> Tensor:
    y = module.fc(x).squeeze()
    return y.unsqueeze(1) if y.ndim == 2 else y * 3


def by_shape(module: Any, x: Tensor) -> Tensor:
    y = torch.squeeze(module.fc(x), (0, 1))
    return y.permute(0, 2, 1) if len(y.shape) == 3 else y


@pytest.mark.parametrize("body", [by_dim, by_ndim, by_shape])
def test_sizes_that_are_squeezed_away(body: Callable[[Any, Tensor], Tensor]) -> None:
    module, original = traced(body, "huggingface")
    assert torch.equal(module(X), original(X))
    for x in (X[:, :1], X[:1], X[:1, :1]):
        equal_or_refused(module, original, x, "> 1")


def test_a_dimension_of_one_may_be_squeezed_away() -> None:
    module, original = traced(lambda m, x: m.fc(x).sum(-1, keepdim=True).squeeze(-1), "huggingface")
    for x in (X, X[:1], X[:, :1]):
        assert torch.equal(module(x), original(x))


# --- modes ---------------------------------------------------------------------------------------
def by_mode_of_child(module: Any, x: Tensor) -> Tensor:
    return module.fc(x) * (2 if module.drop.training else 1)


def hands_on_mode_of_child(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.fc(x)
    return F.dropout(y, 1.0, module.drop.training)


@TRACERS
@pytest.mark.parametrize("body", [by_mode_of_child, hands_on_mode_of_child])
def test_the_mode_of_a_child_that_is_read(
    body: Callable[[Any, Tensor], Tensor], tracer: str
) -> None:
    module, original = traced(body, tracer)
    for training in (False, True):
        module.train(training)
        original.train(training)
        assert torch.equal(module(X), original(X))
        module.drop.train(not training)
        original.drop.train(not training)
        equal_or_refused(module, original, X, "'drop' is in")
        module.drop.train(training)
        original.drop.train(training)


# --- the state of the process --------------------------------------------------------------------
def asks_for_grad(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.fc(x)
    return y if torch.is_grad_enabled() else -y


def enables_grad(module: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y: Tensor = module.fc(x)
    return y


def sets_grad(module: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(module.training):
        y: Tensor = module.fc(x)
    return y


@pytest.mark.parametrize(
    ("body", "tracer"),
    [
        (asks_for_grad, "pytorch"),
        (asks_for_grad, "huggingface"),
        (enables_grad, "huggingface"),
        (sets_grad, "huggingface"),
    ],
)
def test_whether_gradients_are_recorded(body: Callable[[Any, Tensor], Tensor], tracer: str) -> None:
    module, original = traced(body, tracer)
    assert torch.equal(module(X), original(X))
    with torch.no_grad():
        equal_or_refused(module, original, X, "gradients are recorded")


# --- dtypes --------------------------------------------------------------------------------------
def scales_images(module: Any, x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float() / 255


def scales_images_too(module: Any, x: Tensor) -> Tensor:
    return x if torch.is_floating_point(x) else x.float() / 255


def takes_real(module: Any, x: Tensor) -> Tensor:
    return x.real if torch.is_complex(x) else x


@pytest.mark.parametrize(
    ("body", "dtype"),
    [
        (scales_images, torch.uint8),
        (scales_images_too, torch.uint8),
        (takes_real, torch.complex64),
    ],
)
def test_kinds_of_numbers(body: Callable[[Any, Tensor], Tensor], dtype: torch.dtype) -> None:
    module, original = traced(body, "huggingface")
    equal_or_refused(module, original, torch.ones(2, 5, 8, dtype=dtype), "is a tensor of")
