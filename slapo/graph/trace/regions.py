"""Regions that a trace with proxies cannot see, and so must not meet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from slapo.errors import TraceError

_REFUSED = (
    'the forward {}, which this tracer would lose; use tracer="huggingface", or name the module '
    "that does so in leaf_modules"
)


class _RefuseGradMode(TorchFunctionMode):
    """Sees every switch of the grad mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            raise TraceError(_REFUSED.format("switches gradients on or off"))
        return func(*args, **(kwargs or {}))


@contextmanager
def refuse_regions() -> Iterator[None]:
    """Within the block this thread may not enter ``no_grad``, ``autocast`` and their kin."""
    with ExitStack() as stack:
        stack.enter_context(_refuse_enter(torch.autocast, "uses torch.autocast"))
        stack.enter_context(_refuse_enter(torch.inference_mode, "uses torch.inference_mode"))
        stack.enter_context(_RefuseGradMode())
        yield


@contextmanager
def _refuse_enter(region: Any, what: str) -> Iterator[None]:
    original = region.__enter__
    thread = threading.get_ident()

    def __enter__(self: Any) -> Any:
        if threading.get_ident() == thread:
            raise TraceError(_REFUSED.format(what))
        return original(self)

    region.__enter__ = __enter__
    try:
        yield
    finally:
        region.__enter__ = original
