"""What a recording replaces in torch while it runs, and puts back in any case.

Modules, ``autograd.Function``, checkpoints and autocast do not pass through function modes. The
replacements act for the thread that records only; other threads get the originals.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from slapo.graph.trace.recorder.mode_reads import training_flag
from slapo.graph.trace.recorder.recorder import Recorder

_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_lock = threading.Lock()
_recordings = 0
_originals: dict[tuple[Any, str], Any] = {}
_local = threading.local()


def _stack() -> list[Recorder]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def current() -> Recorder | None:
    """The innermost recording of this thread."""
    stack = _stack()
    return stack[-1] if stack else None


def _no_meta_errors(entry: logging.LogRecord) -> bool:
    """Torch logs errors of fake kernels and raises them too; the exception is enough."""
    return "run meta" not in str(entry.msg)


class Watcher(TorchDispatchMode):
    """Sees what reaches the dispatcher without having passed the function mode."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the recorder object, then go on."""
        self._recorder.check_dispatch(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def outer_at_rest() -> Iterator[None]:
    """Within the block a recording that this thread is in the middle of sees nothing."""
    outer = current()
    if outer is None:
        yield
        return
    with outer.pause(), _disable_current_modes():
        yield


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within the block `recorder` sees all of torch that this thread does."""
    _install()
    _stack().append(recorder)
    _FAKE_TENSOR_LOG.addFilter(_no_meta_errors)
    try:
        with Watcher(recorder), recorder:
            yield
    finally:
        _FAKE_TENSOR_LOG.removeFilter(_no_meta_errors)
        _stack().pop()
        _uninstall()


def _install() -> None:
    global _recordings
    with _lock:
        _recordings += 1
        if _recordings > 1:
            return
        _replace(nn.Module, "__call__", _module_call)
        _replace(torch.autograd.Function, "apply", _function_apply)
        _replace(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _checkpoint)
        _replace(torch.autocast, "__enter__", _autocast_enter)
        _replace(torch.autocast, "__exit__", _autocast_exit)
        nn.Module.training = training_flag(_mode_is_asked)  # type: ignore[assignment]


def _uninstall() -> None:
    global _recordings
    with _lock:
        _recordings -= 1
        if _recordings:
            return
        for (owner, name), original in _originals.items():
            setattr(owner, name, original)
        _originals.clear()
        del nn.Module.training


def _mode_is_asked() -> None:
    recorder = current()
    if recorder is not None:
        recorder.modes.note()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    _originals[owner, name] = original
    setattr(owner, name, make(original))


def _module_call(original: Any) -> Any:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is None:
            return original(self, *args, **kwargs)
        return recorder.call_module(original, self, args, kwargs)

    return __call__


def _function_apply(original: Any) -> Any:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        recorder = current()
        if recorder is None:
            return bound(*args, **kwargs)
        return recorder.apply_function(bound, cls, args, kwargs)

    return classmethod(apply)


def _checkpoint(original: Any) -> Any:
    def start(*args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is not None:
            recorder.refuse_checkpoint()
        return original(*args, **kwargs)

    return start


def _autocast_enter(original: Any) -> Any:
    def __enter__(self: torch.autocast) -> Any:
        recorder = current()
        if recorder is not None:
            self.__dict__.setdefault("_slapo_regions", []).append(recorder.enter_autocast(self))
        return original(self)

    return __enter__


def _autocast_exit(original: Any) -> Any:
    def __exit__(self: torch.autocast, *details: Any) -> Any:
        recorder = current()
        regions = self.__dict__.get("_slapo_regions")
        if recorder is not None and regions:
            recorder.leave_autocast(regions.pop())
        return original(self, *details)

    return __exit__
