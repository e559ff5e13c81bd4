"""A CPU that answers where Megatron-Core asks for CUDA by name. For tests alone.

Megatron-Core is written for CUDA: it makes its buffers with ``device="cuda"`` or on
``torch.cuda.current_device()``, waits for streams, and knows types by names such as
``torch.cuda.FloatTensor``. Within :func:`cuda_on_cpu` those few calls act on the CPU, so that its
schedules, reductions and optimizers run for real, over gloo. Nothing is computed here.

It changes ``torch.cuda`` of the whole process: use it in processes of :func:`run_distributed` only.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _triton

from slapo.framework_dialect.megatron.load import megatron_core

_CPU = torch.device("cpu")


class _Idle:
    """A stream or an event of a device that is never behind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _idle() -> Any:
    """A function that does nothing; each its own, since torch.compile tells them apart."""
    return lambda *args, **kwargs: None


def _no() -> bool:
    return False


_ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "current_device": lambda: _CPU,
    "set_device": _idle(),
    "synchronize": _idle(),
    "empty_cache": _idle(),
    "is_current_stream_capturing": lambda: False,
    "Stream": _Idle,
    "Event": _Idle,
    "current_stream": _Idle,
    "default_stream": _Idle,
    "stream": lambda stream: contextlib.nullcontext(),
    "FloatTensor": torch.FloatTensor,
    "IntTensor": torch.IntTensor,
}


def _on_cpu(value: Any) -> Any:
    """A device by any name; the CPU if it is CUDA."""
    is_cuda = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return _CPU if is_cuda else value


class _Redirect(TorchFunctionMode):
    """Sends what is meant for CUDA to the CPU, and calls CPU types by their CUDA names."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(value) for value in args)
        if func is torch.Tensor.type:
            if len(args) == 1 and not kwargs:
                return func(*args).replace("torch.", "torch.cuda.", 1)
            args = tuple(
                a.replace("torch.cuda.", "torch.") if isinstance(a, str) else a for a in args
            )
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Let the CPU stand in for CUDA."""
    megatron_core()  # what looks at the real torch.cuda has seen it by then
    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        # Dynamo asks what the device can do, if there is Triton.
        stack.enter_context(mock.patch.object(_triton, "has_triton_package", _no))
        stack.enter_context(_Redirect())
        yield
