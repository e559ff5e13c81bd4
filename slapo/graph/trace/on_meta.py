"""Parameters and buffers without data, for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def on_meta(root: nn.Module) -> Iterator[None]:
    """Within the block every parameter and buffer of `root` is on meta; shared ones stay shared."""
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (slot, name, tensor)
        for module in root.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for slot in (module._parameters, module._buffers)
        for name, tensor in slot.items()
        if tensor is not None and not tensor.is_meta
    ]
    copies: dict[int, Any] = {}
    for slot, name, tensor in replaced:
        if id(tensor) not in copies:
            copy = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
        slot[name] = copies[id(tensor)]
    try:
        yield
    finally:
        for slot, name, tensor in replaced:
            slot[name] = tensor


@contextmanager
def one_device(root: nn.Module) -> Iterator[None]:
    """Where some of the model is on meta, all of it is for the time of the block.

    Models made under ``init_empty_weights`` have buffers with values on the CPU, which no
    operation could combine with the parameters.
    """
    if any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        with on_meta(root):
            yield
    else:
        yield
