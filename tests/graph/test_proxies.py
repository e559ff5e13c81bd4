"""What Python asks of tensors while a forward is traced, and no graph can answer for every call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

#: What a forward does: it is given its module and what the module is called with.
Body = Callable[..., Any]


class Does(nn.Module):
    """Its forward is a function; children may be given."""

    def __init__(self, body: Body, **children: nn.Module) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Any, *others: Any) -> Any:
        return self.body(self, x, *others)


def refused(module: nn.Module, reason: str, **options: Any) -> None:
    """A trace says why it cannot be, and leaves the module."""
    sch = slapo.create_schedule(module)
    with pytest.warns(UserWarning, match=reason):
        assert not sch.trace(**options)
    assert sch.mod is module


def traced(module: nn.Module, *args: Any, **options: Any) -> None:
    """A trace computes what the module does."""
    reference = copy.deepcopy(module)
    sch = slapo.create_schedule(module)
    assert sch.trace(**options)
    torch.testing.assert_close(sch.mod(*args), reference(*args))


# --- how a tensor lies in memory -----------------------------------------------------------------
def asks_contiguous(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.is_contiguous() else x


def asks_stride(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.stride(0) == x.size(1) else x


def asks_strides(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.stride() == (x.size(1), 1) else x


def asks_offset(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.storage_offset() == 0 else x


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface", "dynamo"])
@pytest.mark.parametrize("ask", [asks_contiguous, asks_stride, asks_strides, asks_offset])
def test_a_branch_on_how_a_tensor_lies_in_memory_is_refused(ask: Body, tracer: str) -> None:
    refused(Does(ask), "lie in memory", tracer=tracer, example_inputs=X)


# --- sizes as keys and words ---------------------------------------------------------------------
def words(module: nn.Module, x: Tensor) -> Tensor:
    return x * {"3": 2.0}.get(str(x.size(0)), 1.0)


def formats(module: nn.Module, x: Tensor) -> Tensor:
    return x * len(f"{x.shape}")


def looks_up(module: nn.Module, x: Tensor) -> Tensor:
    return x * {3: 2.0}.get(x.size(0), 1.0)


def looks_up_set(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.size(0) in {3, 5} else x


@pytest.mark.parametrize("ask", [words, formats, looks_up, looks_up_set])
def test_a_size_as_a_word_or_a_key_is_refused(ask: Body) -> None:
    refused(Does(ask), r"asks for a value as a (word|key) .*test_proxies.py:\d+")
