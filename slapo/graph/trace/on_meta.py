"""Other parameters and buffers, for a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import fake_tensor_tls


@contextmanager
def tensors_replaced(
    root: nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Within the block `root` has what `stand_in` returns for its parameters and buffers.

    Shared ones stay shared; the state of TorchScript, which lies in C++, stays.
    """
    made: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for module in root.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            slots: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            held = [(slot, *item) for slot in slots for item in slot.items() if item[1] is not None]
            for slot, name, tensor in held:
                if id(tensor) not in made:
                    made[id(tensor)] = stand_in(tensor)
                if made[id(tensor)] is not tensor:
                    replaced.append((slot, name, tensor))
                    slot[name] = made[id(tensor)]
        yield
    finally:
        for slot, name, tensor in replaced:
            slot[name] = tensor


def on_meta(root: nn.Module) -> AbstractContextManager[None]:
    """Within the block every parameter and buffer of `root` is on meta."""
    return tensors_replaced(root, _without_data)


def data_of_its_own(root: nn.Module) -> AbstractContextManager[None]:
    """Within the block buffers of `root` are copies, and what is on meta is zeros on the CPU."""
    return tensors_replaced(root, _with_data)


def _with_data(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        if not tensor.is_meta:
            return tensor
        return nn.Parameter(torch.zeros_like(tensor, device="cpu"), tensor.requires_grad)
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    empty = torch.empty_like(tensor, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


@contextmanager
def one_device(root: nn.Module) -> Iterator[None]:
    """Where some of the model is on meta, all of it is for the time of the block.

    Models made under ``init_empty_weights`` have buffers with values on the CPU, which no
    operation could combine with the parameters.
    """
    if any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        # What torch.tensor(..., device="meta") makes is no fake tensor, even among fake ones.
        name = "allow_non_fake_inputs_override"
        taken = mock.patch.object(fake_tensor_tls, name, True, create=True)
        with on_meta(root), taken:
            yield
    else:
        yield
