"""Calls of TorchScript, which torch deprecates: its warnings are handled only in this module."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


def script(function: Any) -> Any:
    """Compile a function or a module by TorchScript, without its warnings.

    Raises an exception of any kind if it cannot be compiled.
    """
    with quiet():
        return torch.jit.script(function)


@functools.cache
def has_scripts() -> bool:
    """Return whether this version of torch compiles anything by TorchScript."""
    try:
        script(nn.Identity())
    except Exception:  # versions without TorchScript may raise anything
        return False
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore torch's warnings about TorchScript inside the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit")
        # Raised for an annotation inside fx.GraphModule itself.
        warnings.filterwarnings("ignore", "The TorchScript type system doesn't", UserWarning)
        yield


@contextmanager
def compiled_kept(model: nn.Module, values: Mapping[int, Tensor] | None = None) -> Iterator[None]:
    """Compute with copies of what compiled modules hold, or with `values` by a parameter's id.

    A compiled module holds on to its tensors, so within the block these have other data.
    """
    compiled = [each for each in model.modules() if isinstance(each, torch.jit.ScriptModule)]
    tensors = {id(t): t for each in compiled for t in (*each.parameters(), *each.buffers())}
    with _disable_current_modes():  # which would return fake data
        # In a copied model these are no leaves.
        kept = [(t, t.data, t.grad if t.is_leaf else None) for t in tensors.values()]
        for tensor, data, _ in kept:
            _set(tensor, (values or {}).get(id(tensor), data).to(data, copy=True), None)
    try:
        yield
    finally:
        with _disable_current_modes():
            for tensor, data, grad in kept:
                _set(tensor, data, grad)


def _set(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    if tensor.is_leaf:
        tensor.grad = None  # of another shape, perhaps
    tensor.data = data
    if tensor.is_leaf:
        tensor.grad = grad
