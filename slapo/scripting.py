"""Calls of TorchScript, which torch deprecates: its warnings are handled only in this module."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


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
