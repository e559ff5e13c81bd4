"""What a trace with proxies cannot see, and so must not meet: regions, backwards of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import fx
from torch.overrides import TorchFunctionMode

from slapo.errors import TraceError

_REFUSED = (
    'the forward {}, which this tracer would lose; use tracer="huggingface", or name the module '
    "that does so in leaf_modules"
)


_FUNCTION = "has a backward of its own (a torch.autograd.Function)"
_CHECKPOINT = "uses torch.utils.checkpoint"


class _RefuseGradMode(TorchFunctionMode):
    """Sees every switch of the grad mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            raise TraceError(_REFUSED.format("switches gradients on or off"))
        return func(*args, **(kwargs or {}))


@contextmanager
def refuse_regions() -> Iterator[None]:
    """Within the block this thread may not do what proxies would lose."""
    with ExitStack() as stack:
        stack.enter_context(_refuse_enter(torch.autocast, "uses torch.autocast"))
        stack.enter_context(_refuse_enter(torch.inference_mode, "uses torch.inference_mode"))
        stack.enter_context(_RefuseGradMode())
        stack.enter_context(_refuse_call(torch.autograd.Function, "apply", _FUNCTION))
        stack.enter_context(
            _refuse_call(
                torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _CHECKPOINT
            )
        )
        yield


@contextmanager
def _refuse_call(owner: Any, name: str, what: str) -> Iterator[None]:
    """Within the block calls with proxies in this thread are an error."""
    original = vars(owner)[name]
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        values = torch.utils._pytree.tree_leaves((args, kwargs))
        proxies = any(isinstance(value, fx.Proxy) for value in values)
        if proxies and threading.get_ident() == thread:
            raise TraceError(_REFUSED.format(what))
        if isinstance(original, classmethod):
            return original.__get__(None, args[0])(*args[1:], **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, classmethod(call) if isinstance(original, classmethod) else call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _refuse_enter(region: Any, what: str) -> AbstractContextManager[Any]:
    refused = refusing(region.__enter__, _REFUSED.format(what))
    return mock.patch.object(region, "__enter__", refused)


def refusing(original: Any, message: str) -> Any:
    """A function that is `original`, and an error in the thread that is here now."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise TraceError(message)
        return original(*args, **kwargs)

    return call
