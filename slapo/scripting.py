"""TorchScript, which torch deprecates: its warnings are handled here, and nowhere else."""

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

    Raises
    ------
    Exception
        Of many kinds, if it cannot be compiled.
    """
    with quiet():
        return torch.jit.script(function)


@functools.cache
def has_scripts() -> bool:
    """Return whether this version of torch compiles anything by TorchScript."""
    try:
        script(nn.Identity())
    except Exception:  # whatever a version raises that does not have it any more
        return False
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block torch does not warn of TorchScript."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit")
        # It stumbles over an annotation within fx.GraphModule itself.
        warnings.filterwarnings("ignore", "The TorchScript type system doesn't", UserWarning)
        yield
