"""Where a kernel may stand in for operations: for plain tensors that nobody watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

#: Other types of tensors that count as plain, while a mode that only counts is active.
_counted: tuple[type, ...] | None = None


@contextmanager
def only_counted(*types: type) -> Iterator[None]:
    """Within the block a dispatch mode may count: kernels run as they would without it.

    Parameters
    ----------
    *types
        Tensors without numbers that may stand in for plain ones.

    Examples
    --------
    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> with FlopCounterMode(display=False), only_counted():
    ...     is_plain(torch.ones(2))
    True
    """
    global _counted
    before, _counted = _counted, types
    try:
        yield
    finally:
        _counted = before


def is_plain(*tensors: Any) -> bool:
    """Whether these are tensors of torch's own, and operations on them run as they are called.

    They do not where someone is to see them: a compiler, a trace, a dispatch mode that counts or
    checks, a transform of ``torch.func``, a forward-mode derivative. A kernel would hide them.

    Examples
    --------
    >>> is_plain(torch.ones(2), nn.Parameter(torch.ones(2)))
    True
    >>> torch.func.vmap(lambda x: torch.tensor(is_plain(x)).expand_as(x))(torch.ones(2))
    tensor([False, False])
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if _counted is None and _get_current_dispatch_mode() is not None:
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    kinds = (Tensor, nn.Parameter, *(_counted or ()))
    return all(type(each) in kinds for each in tensors)
