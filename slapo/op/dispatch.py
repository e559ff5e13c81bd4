"""Conditions under which a kernel may replace torch operations, and their autograd checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

#: Further tensor types that count as plain, while a mode that only counts is active.
_counted: tuple[type, ...] | None = None


@contextmanager
def only_counted(*types: type) -> Iterator[None]:
    """Allow kernels under dispatch modes within the block, also for tensors of these types."""
    global _counted
    before, _counted = _counted, types
    try:
        yield
    finally:
        _counted = before


def is_plain(*tensors: Any) -> bool:
    """Return True for plain tensors, outside of anything that must see the single operations.

    That includes compilers, traces, dispatch modes that count or check, transforms of
    ``torch.func`` and forward-mode derivatives.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if _counted is None and _get_current_dispatch_mode() is not None:
        return False
    # Custom autograd functions have no vmap or jvp rule, and kernels bypass these transforms.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    # Subclasses such as DTensor and fake tensors override single operations.
    kinds = (Tensor, nn.Parameter, *(_counted or ()))
    return all(type(each) in kinds for each in tensors)


def is_graph_kept() -> bool:
    """Return True if a later backward pass may read the saved tensors again."""
    if torch.compiler.is_compiling():  # the compiler decides about copies itself
        return True
    # A private name of torch; without it, copies are always made.
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())


def refuse_graph(what: str, instead: str) -> None:
    """Raise for a gradient of a gradient, since the first one is computed outside of autograd.

    ``once_differentiable`` would treat it as a constant if only the losses were differentiated.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"the gradient of {what} is not differentiable (create_graph=True); {instead} where "
            "you need that"
        )
