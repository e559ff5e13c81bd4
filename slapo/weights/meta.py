"""Models without memory: parameters created on the ``meta`` device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Create modules whose parameters have a shape and no memory.

    :func:`slapo.build` creates them later, each rank only its share. Parameters that a model ties
    while it is constructed stay tied.

    Parameters
    ----------
    enable
        False does nothing.
    include_buffers
        Put buffers on ``meta`` as well. Else they are computed as usual, which keeps tables such
        as rotary frequencies right.

    Examples
    --------
    >>> with init_empty_weights():
    ...     model = nn.Linear(5_000, 5_000)
    >>> model.weight.device
    device(type='meta')
    """
    if not enable:
        yield
        return
    patched = {"register_parameter": _empty_parameter}
    if include_buffers:
        patched["register_buffer"] = _empty_buffer
    originals = {name: getattr(nn.Module, name) for name in patched}
    for name, wrapper in patched.items():
        setattr(nn.Module, name, wrapper(originals[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.Module, name, original)


def _empty_parameter(register: Any) -> Any:
    # A parameter that is registered twice is tied: both places get one empty parameter.
    empties: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.is_meta:
            return
        if id(param) not in empties:
            empty = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(param.__dict__)
            empties[id(param)] = (param, empty)
        module._parameters[name] = empties[id(param)][1]

    return register_parameter


def _empty_buffer(register: Any) -> Any:
    def register_buffer(
        module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        empty = tensor.to("meta") if tensor is not None else None
        register(module, name, empty, persistent=persistent)

    return register_buffer
